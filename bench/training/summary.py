"""The results of the suite ``train``: medians over seeds, tables, and curves of the loss."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from kfac_engine.bench.report import Form
from kfac_engine.bench.training.plan import Group
from kfac_engine.bench.training.run import Outcome, Point, Run, budget_text
from kfac_engine.bench.training.tasks import find_task
from kfac_engine.system.writing import write_rendered

# The method that the others are compared with.
_OURS = "kfac"


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a run in CPU seconds and steps, a fraction between two evaluations."""

    seconds: float
    steps: float


NEVER = Moment(inf, inf)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The results of a method on a task within a budget, as medians over the seeds.

    ``setting`` is the learning rate and the schedule with the lowest loss for the first seed.
    ``loss`` is the validation loss that counts: the lowest one, or the one after the last step.
    ``losses`` has it for each seed; the accuracy is of the same moment. ``rise`` is the largest
    quotient of the last and the lowest validation loss of a run.
    """

    task: str
    method: str
    setting: str
    seconds: float
    budget_steps: int
    seeds: int
    steps: float
    milliseconds: float
    loss: float
    losses: tuple[float, ...]
    accuracy: float | None
    died: int
    rise: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """K-FAC beside another method on a task.

    The level is the median over the seeds of the validation loss of the other method that counts.
    ``budget`` has the CPU seconds of the budget that reaches it first, ``seconds`` and ``steps``
    the medians until then; None if it is not reached. Their ratios are to the rival until its loss
    that counts. ``loss_ratio`` and ``accuracy_gain``, in percentage points, are at equal budgets.
    """

    task: str
    rival: str
    rival_seconds: float
    rival_steps: int
    level: float
    method: str
    budget: float
    seconds: float | None
    seconds_ratio: float | None
    steps: float | None
    steps_ratio: float | None
    loss_ratio: float | None
    accuracy_gain: float | None


def best_so_far(curve: Iterable[Point]) -> list[Point]:
    """Return a curve in which each loss is the lowest one until this moment."""
    lowest, points = inf, []
    for point in curve:
        lowest = min(lowest, point.loss)
        points.append(replace(point, loss=lowest))
    return points


def reached(curve: Sequence[Point], level: float) -> Moment:
    """Return the moment in which the lowest loss so far reaches a level.

    It is interpolated linearly between two evaluations; infinite if there is none.
    """
    points = best_so_far(curve)
    if points and points[0].loss <= level:
        return Moment(points[0].cpu, points[0].step)
    for before, after in pairwise(points):
        if after.loss <= level:
            part = (before.loss - level) / (before.loss - after.loss)
            return Moment(
                before.cpu + part * (after.cpu - before.cpu),
                before.step + part * (after.step - before.step),
            )
    return NEVER


def group_row(group: Group, runs: Mapping[Run, Outcome]) -> GroupRow:
    """Return the results of a group."""
    run, outcomes = next(iter(runs)), list(runs.values())
    rate = "" if run.rate is None else f"{run.rate:g} "
    options = run.method.partition(":")[2] if run.method != group.method else ""
    points = [group.counted(outcome) for outcome in outcomes]
    return GroupRow(
        group.task, group.method, f"{rate}{run.schedule}{options and ' ' + options}",
        group.seconds, group.budget_steps, len(outcomes),
        median(outcome.steps for outcome in outcomes),
        median(1e3 * outcome.cpu / max(1, outcome.steps) for outcome in outcomes),
        median(point.loss for point in points), tuple(point.loss for point in points),
        _median_of([point.accuracy for point in points]),
        sum(bool(outcome.died) for outcome in outcomes),
        max(outcome.curve[-1].loss / outcome.lowest for outcome in outcomes),
    )  # fmt: skip


def _median_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def compare(results: Mapping[Group, Mapping[Run, Outcome]]) -> list[Comparison]:
    """Return a comparison of K-FAC with each group of another method on the same task."""
    contenders: dict[tuple[str, str, bool], list[Group]] = {}
    for group in results:
        if _is_ours(group):
            key = group.task, group.method, bool(group.budget_steps)
            contenders.setdefault(key, []).append(group)
    return [
        _comparison(rival, ours, results)
        for rival in results
        if not _is_ours(rival)
        for (task, _, in_steps), ours in contenders.items()
        if task == rival.task and in_steps == bool(rival.budget_steps)
    ]


def _is_ours(group: Group) -> bool:
    name: str = group.method.partition(":")[0]
    return name == _OURS


def _comparison(
    rival: Group, ours: Sequence[Group], results: Mapping[Group, Mapping[Run, Outcome]]
) -> Comparison:
    """Compare the budgets of one method with a rival."""
    points = [rival.counted(outcome) for outcome in results[rival].values()]
    level = median(point.loss for point in points)
    moments = {
        group: [reached(outcome.curve, level) for outcome in results[group].values()]
        for group in ours
    }
    seconds = {group: median(m.seconds for m in of_seeds) for group, of_seeds in moments.items()}
    quickest = min(ours, key=lambda group: seconds[group])
    steps = median(moment.steps for moment in moments[quickest])
    loss_ratio, gain = _at_equal_budgets(rival, ours, results)
    return Comparison(
        rival.task, rival.method, rival.seconds, rival.budget_steps, level, quickest.method,
        quickest.seconds,
        _finite(seconds[quickest]),
        _finite(seconds[quickest] / median(point.cpu for point in points)),
        _finite(steps), _finite(steps / median(point.step for point in points)),
        loss_ratio, gain,
    )  # fmt: skip


def _at_equal_budgets(
    rival: Group, ours: Sequence[Group], results: Mapping[Group, Mapping[Run, Outcome]]
) -> tuple[float | None, float | None]:
    """Return the quotient of the losses and the difference of the accuracies, or None."""
    budget = rival.seconds, rival.budget_steps
    equal = next((group for group in ours if (group.seconds, group.budget_steps) == budget), None)
    if equal is None:
        return None, None
    kfac, other = (group_row(group, results[group]) for group in (equal, rival))
    gain = None
    if kfac.accuracy is not None and other.accuracy is not None:
        gain = 100 * (kfac.accuracy - other.accuracy)
    return kfac.loss / other.loss, gain


def _finite(value: float) -> float | None:
    """Return a number, or None for infinity and NaN."""
    return value if -inf < value < inf else None


def _result(row: Mapping[str, Any]) -> list[str]:
    accuracy, rise = row["accuracy"], row.get("rise")  # older reports have no rise
    return [
        row["task"], row["method"], row["setting"], _budget(row, "seconds", "budget_steps"),
        f"{row['steps']:g}",
        f"{row['milliseconds']:.1f}", f"{row['loss']:.4g}",
        ", ".join(f"{loss:.4g}" for loss in row["losses"]), formatted(rise, ".2f"),
        "" if accuracy is None else f"{accuracy:.2%}", str(row["died"] or ""),
    ]  # fmt: skip


def _comparison_cells(row: Mapping[str, Any]) -> list[str]:
    variant = "" if row["method"] == "kfac" else f" ({row['method']})"
    return [
        row["task"], f"{row['rival']}, {_budget(row, 'rival_seconds', 'rival_steps')}{variant}",
        f"{row['level']:.4g}",
        formatted(row["seconds"], ".1f", "not reached"), formatted(row["seconds_ratio"], ".2f"),
        formatted(row["steps"], ".0f"), formatted(row["steps_ratio"], ".2f"),
        formatted(row["loss_ratio"], ".3f"), formatted(row["accuracy_gain"], "+.2f"),
    ]  # fmt: skip


RESULTS = Form(
    ("task", "method", "rate, schedule"),
    (
        "budget", "steps", "ms a step", "loss", "all seeds", "last ÷ lowest", "accuracy",
        "runs that died",
    ),
    _result,
)  # fmt: skip
COMPARISONS = Form(
    ("task", "rival"),
    (
        "its loss", "K-FAC, s", "÷ rival's", "steps", "÷ rival's", "loss ÷ rival's, equal time",
        "accuracy, points",
    ),
    _comparison_cells,
)  # fmt: skip


def formatted(value: float | None, form: str, missing: str = "") -> str:
    """Return a number as text; ``missing`` for None."""
    return missing if value is None else format(value, form)


def _budget(row: Mapping[str, Any], seconds: str, steps: str) -> str:
    """Return the budget of a row; older reports have seconds alone."""
    text: str = budget_text(row[seconds], row.get(steps, 0))
    return text


_SIZE, _DOTS_AN_INCH = (10.0, 4.6), 120
_STYLES = ("-", "--", ":", "-.")


def draw_curves(folder: Path, results: Mapping[Group, Mapping[Run, Outcome]]) -> list[Path]:
    """Write ``train-<task>.png`` for each task.

    Each method has a colour, each of its budgets a line style, each seed a line.
    """
    from matplotlib.figure import Figure

    colours = {m: f"C{i}" for i, m in enumerate(dict.fromkeys(group.method for group in results))}
    paths = []
    for name in dict.fromkeys(group.task for group in results):
        figure = Figure(figsize=_SIZE, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        of_method: dict[str, int] = {}
        for group, runs in ((g, r) for g, r in results.items() if g.task == name):
            style = _STYLES[of_method.get(group.method, 0) % len(_STYLES)]
            of_method[group.method] = of_method.get(group.method, 0) + 1
            for number, outcome in enumerate(runs.values()):
                # The loss of the initial model would compress all others.
                points = outcome.curve[1:]
                losses = [point.loss for point in points]
                label = f"{group.method}, {group.seconds:g} s" if number == 0 else "_"
                axes = [point.cpu for point in points], [point.step for point in points]
                for panel, x in zip(panels, axes, strict=True):
                    panel.plot(x, losses, style, color=colours[group.method], label=label,
                               linewidth=1.2)  # fmt: skip
        for panel, label in zip(panels, ("CPU seconds", "steps"), strict=True):
            panel.set(xlabel=label, xscale="log")
            panel.grid(alpha=0.3)
        panels[0].set(ylabel="validation loss", title=find_task(name)[0].title)
        panels[1].legend(fontsize="small")
        paths.append(folder / f"train-{name}.png")
        write_rendered(paths[-1], partial(figure.savefig, format="png", dpi=_DOTS_AN_INCH))
    return paths
