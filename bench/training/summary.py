"""The results of the suite: medians over seeds, and the time until a loss is reached."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median

from kfac_engine.bench.training.plan import Group
from kfac_engine.bench.training.run import Outcome, Point, Run

# The method that the others are compared with.
_OURS = "kfac"


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a run.

    Attributes:
        seconds: CPU seconds.
        steps: Steps; a fraction between two evaluations.
    """

    seconds: float
    steps: float


NEVER = Moment(inf, inf)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The results of a method on a task within a budget, as medians over the seeds.

    Attributes:
        task: Name of the task.
        method: Name of the method, with its options.
        setting: Learning rate and schedule with the lowest loss for the first seed.
        seconds: CPU seconds of the budget.
        budget_steps: Steps of the budget, in place of seconds; 0 for seconds.
        seeds: Number of runs.
        steps: Number of steps.
        milliseconds: CPU milliseconds of a step.
        loss: Validation loss of a run that counts: the lowest one, or that after the last step.
        losses: These losses of all runs, in order of the seeds.
        accuracy: Accuracy at this moment; None without classes.
        died: Number of runs that ended early.
        rise: Largest quotient of the last and the lowest validation loss of a run.
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

    Attributes:
        task: Name of the task.
        rival: Name of the other method.
        rival_seconds: CPU seconds of its budget.
        rival_steps: Steps of its budget, in place of seconds; 0 for seconds.
        level: The level.
        method: Name of the method, with its options.
        budget: CPU seconds of the budget with which the level is reached first.
        seconds: CPU seconds until the level is reached, a median; None if it is not reached.
        seconds_ratio: These seconds divided by those of the rival until its loss that counts.
        steps: Steps until the level is reached, a median.
        steps_ratio: These steps divided by those of the rival until its loss that counts.
        loss_ratio: Quotient of the median losses at equal budgets; None without equal budgets.
        accuracy_gain: Difference of the median accuracies at equal budgets, in percentage points.
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

    Args:
        curve: Evaluations in order.
        level: A loss.

    Returns:
        The moment, linearly interpolated between two evaluations; infinite if there is none.
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
    """Return the results of a group.

    Args:
        group: The group.
        runs: Settings to result of its runs: equal settings but for the seed.

    Returns:
        The row.
    """
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
    """Return a comparison of K-FAC with each group of another method on the same task.

    Args:
        results: Group to the results of its runs.

    Returns:
        A comparison for each rival and each variant of K-FAC.
    """
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
