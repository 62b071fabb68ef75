"""The Markdown tables of the suite ``train``: losses within a time, and the time until a loss."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from scripts.markdown import table

RESULTS = [
    "task", "method", "rate, schedule", "budget, s", "steps", "ms a step", "loss", "all seeds",
    "accuracy", "runs that died",
]  # fmt: skip
COMPARISONS = [
    "task", "rival", "its loss", "K-FAC, s", "÷ rival's", "steps", "÷ rival's",
    "loss ÷ rival's, equal time", "accuracy, points",
]  # fmt: skip
# A field that only comparisons have.
RIVAL = "rival"


def result_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row of losses under ``RESULTS``."""
    accuracy = row["accuracy"]
    return [
        row["task"], row["method"], row["setting"], f"{row['seconds']:g}", f"{row['steps']:g}",
        f"{row['milliseconds']:.1f}", f"{row['loss']:.4g}",
        ", ".join(f"{loss:.4g}" for loss in row["losses"]),
        "" if accuracy is None else f"{accuracy:.2%}", str(row["died"] or ""),
    ]  # fmt: skip


def comparison_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a comparison under ``COMPARISONS``."""
    variant = "" if row["method"] == "kfac" else f" ({row['method']})"
    return [
        row["task"], f"{row['rival']}, {row['rival_seconds']:g} s{variant}", f"{row['level']:.4g}",
        _number(row["seconds"], ".1f", "not reached"), _number(row["seconds_ratio"], ".2f"),
        _number(row["steps"], ".0f"), _number(row["steps_ratio"], ".2f"),
        _number(row["loss_ratio"], ".3f"), _number(row["accuracy_gain"], "+.2f"),
    ]  # fmt: skip


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of comparisons; a task is named in its first row."""
    lines = []
    chosen = (comparison_cells(row) for row in rows if RIVAL in row)
    for _, cells_of_task in groupby(chosen, key=lambda cells: cells[0]):
        for number, (task, *cells) in enumerate(cells_of_task):
            lines.append(["" if number else task, *cells])
    return [*table(COMPARISONS, lines)]


def summary(rows: Sequence[Mapping[str, Any]], shown: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a short table of comparisons.

    Args:
        rows: Rows of the suite.
        shown: Label, task and rival of each line; the comparison with the rival's longest budget
            counts.

    Returns:
        The lines.
    """
    lines = []
    for label, task, rival in shown:
        row = max(
            (row for row in rows if (row["task"], row.get(RIVAL)) == (task, rival)),
            key=lambda row: float(row["rival_seconds"]),
        )
        needed = row["seconds"] / row["seconds_ratio"]
        times = f"{needed:.1f} s", f"{row['seconds']:.1f} s"
        lines.append((label, *times, f"{row['seconds_ratio']:.2f}"))
    return [*table(("task", "Adam", "K-FAC", "ratio"), lines)]


def _number(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)
