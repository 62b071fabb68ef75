"""``demo``: curvature, natural gradients and training of a small network on real data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

import click

from kfac_engine.cli.command import Command, Group
from kfac_engine.cli.display import print_table, progress, say, working
from kfac_engine.cli.inspect import print_layers
from kfac_engine.cli.options import debug_option
from kfac_engine.cli.precondition import norm_rows, print_norms

if TYPE_CHECKING:
    from kfac_engine._types import Array
    from kfac_engine.cli.comparison import Run

    # The runs of each method with its best rate, one for each seed.
    Winners: TypeAlias = Mapping[str, Sequence[Run]]

PICTURE = "demo.png"
# An early, a middle and a late loss of the held-out digits.
TARGETS = (0.5, 0.2, 0.1)
OURS = "K-FAC"


@click.command(cls=Command, example="kfac-engine demo --seconds 0.1 --seeds 1")
@Group.LENGTH.option(
    "--seconds", type=click.FloatRange(0.01, 60), default=0.8, help="CPU seconds of each run."
)
@Group.LENGTH.option(
    "--seeds",
    type=click.IntRange(1, 20),
    default=3,
    help="Number of seeds; the tables have medians.",
)
@Group.OUTPUT.file("--out", default=Path("demo-output"), help="Folder of the picture.")
@debug_option
def demo(seconds: float, seeds: int, out: Path) -> None:
    """Train a small CNN on digits with K-FAC, Muon, Adam and SGD."""
    import kfac_engine as ke
    from kfac_engine.cli.comparison import BATCH_SIZE
    from kfac_engine.data import demo_model, digits
    from kfac_engine.errors import InputError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder '{out}': {error.strerror}.") from error
    model, (images, labels) = demo_model("cnn"), digits()
    with working("preparing the model"):
        engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
        result = engine.step({"image": images[:BATCH_SIZE]}, labels[:BATCH_SIZE])
    click.echo(f"a CNN and {BATCH_SIZE} of 1,797 handwritten digits (8×8 pixels)\n")
    print_layers(engine)
    click.echo(f"loss of the batch: {result.loss:.4f}\n")
    print_norms(norm_rows(result.gradients, result.natural_gradients))
    winners = _compare(model, (images, labels), range(seeds), seconds)
    _print_comparison(winners, seeds, seconds)
    for line in verdicts(winners):
        say(line)
    _draw(winners, out / PICTURE)


def _compare(
    model: bytes, data: "tuple[Array, Array]", seeds: Sequence[int], seconds: float
) -> "Winners":
    """Run all methods with all rates, and return the runs with the best rate of each method."""
    from kfac_engine.cli.comparison import METHODS, best_rate, compared

    runs: dict[str, dict[float | None, list[Run]]] = {name: {} for name in METHODS}
    with progress() as bar:
        total = len(seeds) * sum(len(method.rates) for method in METHODS.values())
        task = bar.add_task("", total=total)
        for name, rate, run in compared(model, data, seeds, seconds):
            runs[name].setdefault(rate, []).append(run)
            bar.update(task, advance=1, description=name)
    rows = [
        (
            name,
            "default" if rate is None else f"{rate:g}",
            f"{median(run.training_loss for run in of_rate):.3g}",
        )
        for name, by_rate in runs.items()
        for rate, of_rate in by_rate.items()
    ]
    heads = ("method", "learning rate", " training loss")
    print_table("all runs: training loss over the last epoch", heads, rows)
    return {name: by_rate[best_rate(by_rate)] for name, by_rate in runs.items()}


def _print_comparison(winners: "Winners", seeds: int, seconds: float) -> None:
    count = "one seed" if seeds == 1 else f"median of {seeds} seeds"
    title = f"the best rate of each: {seconds:g} CPU seconds of one thread, {count}"
    for text, columns in (
        (title, {**_COURSE, **_LOSSES}),
        ("steps and CPU seconds to a held-out loss", _REACHED),
    ):
        rows = [
            (name, *(show(measured(runs)) for measured, show in columns.values()))
            for name, runs in winners.items()
        ]
        print_table(text, ("method", *(f" {head}" for head in columns)), rows)


def verdicts(winners: "Winners") -> list[str]:
    """Return a line for each measured number: the best method, and the value of K-FAC."""
    lines = []
    for head, (measured, show) in {**_LOSSES, **_REACHED}.items():
        values = {name: measured(runs) for name, runs in winners.items()}
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            best = min(known, key=known.__getitem__)
            ours = "" if best == OURS else f"; {OURS}: {show(values[OURS])}"
            lines.append(f"{head}: {best} is ahead, {show(known[best])}{ours}")
    return lines


def _draw(winners: "Winners", path: Path) -> None:
    from kfac_engine.cli.comparison import draw

    if draw(winners, path):
        say(f"loss curves: {path}")
    else:
        click.echo("no picture: pip install 'kfac-engine[plot]' brings matplotlib")


def median_or_never(values: Iterable[float | None]) -> float | None:
    """Return the median of numbers; None counts as larger than any number."""
    middle = median(inf if value is None else value for value in values)
    return None if middle == inf else middle


def _measure(
    of_run: "Callable[[Run], float | None]", form: str
) -> "tuple[Callable[[Sequence[Run]], float | None], Callable[[float | None], str]]":
    """Return two functions: the median of a number over runs, and its text."""
    return (
        lambda runs: median_or_never(of_run(run) for run in runs),
        lambda value: "never" if value is None else format(value, form),
    )


def _steps_to(loss: float) -> "Callable[[Run], float | None]":
    return lambda run: run.steps_to(loss)


def _seconds_to(loss: float) -> "Callable[[Run], float | None]":
    return lambda run: run.seconds_to(loss)


# The median over the runs of a method, and its text, by head of the column. In the columns that are
# not in ``_COURSE``, the smallest number is the best.
_COURSE = {
    "steps": _measure(lambda run: len(run.losses), "g"),
    "ms/step": _measure(lambda run: 1e3 * run.spent / len(run.losses), ".1f"),
}
_LOSSES = {
    "training loss": _measure(lambda run: run.training_loss, ".4f"),
    "held-out loss": _measure(lambda run: run.held_out_loss, ".4f"),
}
_REACHED = {
    **{f"steps to {loss:g}": _measure(_steps_to(loss), "g") for loss in TARGETS},
    **{f"seconds to {loss:g}": _measure(_seconds_to(loss), ".2f") for loss in TARGETS},
}
