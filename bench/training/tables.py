"""The tables of the suite ``train`` on the terminal."""

from collections.abc import Sequence

from rich.console import Console

from kfac_engine.bench.report import print_table
from kfac_engine.bench.training.run import budget_text
from kfac_engine.bench.training.summary import Comparison, GroupRow

_RESULTS = ("budget", "steps", "ms a step", "loss", "losses of all seeds", "last ÷ lowest",
            "accuracy", "died")  # fmt: skip
_COMPARISONS = (
    "loss", "seconds", "÷ rival's", "steps", "÷ rival's", "loss ÷ rival's", "accuracy, points",
)  # fmt: skip


def print_results(console: Console, rows: Sequence[GroupRow]) -> None:
    """Print the losses of all groups.

    Args:
        console: Console to print on.
        rows: Rows; those of one task are adjacent.
    """
    cells = [
        (
            task, f"{row.method} {row.setting}",
            budget_text(row.seconds, row.budget_steps), f"{row.steps:g}",
            f"{row.milliseconds:.1f}", f"{row.loss:.4g}",
            " ".join(f"{loss:.4g}" for loss in row.losses), f"{row.rise:.2f}",
            "" if row.accuracy is None else f"{row.accuracy:.2%}", str(row.died or ""),
        )
        for task, row in zip(_new_tasks(rows), rows, strict=True)
    ]  # fmt: skip
    title = "Suite train: validation losses, medians over the seeds"
    print_table(console, title, (("task", "method"), _RESULTS), cells)


def print_comparisons(console: Console, rows: Sequence[Comparison]) -> None:
    """Print the time in which K-FAC reaches the losses of other methods.

    Args:
        console: Console to print on.
        rows: Rows; those of one task are adjacent.
    """
    cells = [
        (
            task, f"{row.rival}, {budget_text(row.rival_seconds, row.rival_steps)}",
            f"{row.method}, {budget_text(row.budget, row.rival_steps)}", f"{row.level:.4g}",
            _number(row.seconds, ".2f", "not reached"), _number(row.seconds_ratio, ".2f"),
            _number(row.steps, ".0f"), _number(row.steps_ratio, ".2f"),
            _number(row.loss_ratio, ".3f"), _number(row.accuracy_gain, "+.2f"),
        )
        for task, row in zip(_new_tasks(rows), rows, strict=True)
    ]  # fmt: skip
    title = "Suite train: K-FAC until it reaches the loss of a rival"
    print_table(console, title, (("task", "rival", "method"), _COMPARISONS), cells)


def _new_tasks(rows: Sequence[GroupRow | Comparison]) -> list[str]:
    """Return the task of each row; blank where the row before has the same task."""
    tasks = [row.task for row in rows]
    return [
        "" if task == last else task for task, last in zip(tasks, ["", *tasks[:-1]], strict=True)
    ]


def _number(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)
