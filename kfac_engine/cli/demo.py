"""``demo``: curvature, natural gradients and training of a small network on real data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from kfac_engine.cli.display import print_table, progress, working
from kfac_engine.cli.inspect import print_layers
from kfac_engine.cli.options import debug_option, file_path
from kfac_engine.cli.precondition import norm_rows, print_norms

if TYPE_CHECKING:
    from kfac_engine.cli.comparison import Digits, Run, Setting

PICTURE = "demo.png"
TARGET_LOSS = 0.1


@click.command
@click.option(
    "--steps",
    type=click.IntRange(12, 1000),
    default=60,
    show_default=True,
    help="Number of training steps of each run.",
)
@click.option(
    "--out",
    type=file_path,
    default=Path("demo-output"),
    show_default=True,
    help="Folder of the picture.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the batches and of the sampled targets.",
)
@debug_option
def demo(steps: int, out: Path, seed: int) -> None:
    """Train a small CNN on digits with SGD, Adam and K-FAC."""
    from kfac_engine.cli.comparison import BATCH_SIZE, Digits, build_engine
    from kfac_engine.data import demo_model, digits
    from kfac_engine.errors import InputError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder '{out}': {error.strerror}.") from error
    model = demo_model("cnn")
    data = Digits.draw(*digits(), steps, seed)
    images, labels = data.batches[0]
    with working("preparing the model"):
        engine = build_engine(model, seed)
        result = engine.step({"image": images}, labels)
    click.echo(f"a CNN and {BATCH_SIZE} of 1,797 handwritten digits (8×8 pixels)\n")
    print_layers(engine)
    click.echo(f"loss of the batch: {result.loss:.4f}\n")
    print_norms(norm_rows(result.gradients, result.natural_gradients))
    winners = _compare(model, data, seed)
    _print_comparison(winners, steps)
    _draw(winners, out / PICTURE)


def _compare(model: bytes, data: "Digits", seed: int) -> "dict[str, Run]":
    from kfac_engine.cli.comparison import METHODS, best, runs

    winners, grids = {}, []
    with progress() as bar:
        task = bar.add_task("", total=sum(len(method.grid) for method in METHODS.values()))
        for name, method in METHODS.items():
            bar.update(task, description=name)
            records = []
            for run in runs(model, method, data, seed):
                records.append(run)
                bar.advance(task)
            winners[name] = best(records)
            grids.append((name, ", ".join(records[0].setting), _show_grid(records)))
    print_table("all runs: training loss over the last epoch", ("method", "setting", "loss"), grids)
    return winners


def _show_grid(records: "Sequence[Run]") -> list[str]:
    cells = [
        f"{', '.join(f'{value:g}' for value in run.setting.values())}: {run.final_loss:.3g}"
        for run in records
    ]
    return ["   ".join(cells[start : start + 3]) for start in range(0, len(cells), 3)]


def _show_setting(setting: "Setting") -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def _print_comparison(winners: "Mapping[str, Run]", steps: int) -> None:
    rows = [
        (
            name,
            _show_setting(run.setting),
            f"{run.final_loss:.4f}",
            f"{run.held_out_loss:.4f}",
            "never" if (reached := run.steps_to(TARGET_LOSS)) is None else reached,
            f"{1000 * median(run.seconds):.1f}",
            f"{sum(run.seconds):.2f}",
        )
        for name, run in winners.items()
    ]
    header = (
        "method", "best setting", " training loss", " held-out loss",
        f" steps to {TARGET_LOSS:g}", " ms/step", " seconds",
    )  # fmt: skip
    print_table(f"the best setting of each: {steps} steps, one thread", header, rows)


def _draw(winners: "Mapping[str, Run]", path: Path) -> None:
    from kfac_engine.cli.loss_curves import draw

    if draw(winners, path):
        click.echo(f"loss curves: {path}")
    else:
        click.echo("no picture: pip install 'kfac-engine[plot]' brings matplotlib")
