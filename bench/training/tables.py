"""The tables of the suite ``train`` on the terminal."""

from collections.abc import Sequence

from rich.console import Console

from kfac_engine.bench.report import new_table
from kfac_engine.bench.training.summary import Comparison, GroupRow

_RESULTS = ("budget, s", "steps", "ms a step", "loss", "losses of all seeds", "accuracy", "died")
_COMPARISONS = (
    "loss", "seconds", "÷ rival's", "steps", "÷ rival's", "loss ÷ rival's", "accuracy, points",
)  # fmt: skip


def print_results(console: Console, rows: Sequence[GroupRow]) -> None:
    """Print the losses of all groups.

    Args:
        console: Console to print on.
        rows: Rows; those of one task are adjacent.
    """
    table = new_table("train: lowest validation losses, medians over the seeds",
                      ("task", "method"), _RESULTS)  # fmt: skip
    last = ""
    for row in rows:
        table.add_row(
            row.task if row.task != last else "", f"{row.method} {row.setting}",
            f"{row.seconds:g}", f"{row.steps:g}", f"{row.milliseconds:.1f}", f"{row.loss:.4g}",
            " ".join(f"{loss:.4g}" for loss in row.losses),
            "" if row.accuracy is None else f"{row.accuracy:.2%}", str(row.died or ""),
        )  # fmt: skip
        last = row.task
    console.print(table)


def print_comparisons(console: Console, rows: Sequence[Comparison]) -> None:
    """Print the time in which K-FAC reaches the losses of other methods.

    Args:
        console: Console to print on.
        rows: Rows; those of one task are adjacent.
    """
    table = new_table("train: K-FAC until it reaches the loss of a rival",
                      ("task", "rival", "method"), _COMPARISONS)  # fmt: skip
    last = ""
    for row in rows:
        table.add_row(
            row.task if row.task != last else "", f"{row.rival}, {row.rival_seconds:g} s",
            f"{row.method}, {row.budget:g} s", f"{row.level:.4g}",
            _number(row.seconds, ".2f", "not reached"), _number(row.seconds_ratio, ".2f"),
            _number(row.steps, ".0f"), _number(row.steps_ratio, ".2f"),
            _number(row.loss_ratio, ".3f"), _number(row.accuracy_gain, "+.2f"),
        )  # fmt: skip
        last = row.task
    console.print(table)


def _number(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)
