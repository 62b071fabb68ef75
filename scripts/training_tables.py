"""The Markdown tables of the suite ``train``: losses within a time, and the time until a loss."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import exp, log
from typing import Any

from kfac_engine.bench.training.run import budget_text
from kfac_engine.bench.training.summary import COMPARISONS, formatted
from scripts.markdown import table

# A field that only comparisons have.
RIVAL = "rival"


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of comparisons; a task is named in its first row."""
    lines = []
    chosen = (COMPARISONS.cells(row) for row in rows if RIVAL in row)
    for _, cells_of_task in groupby(chosen, key=lambda cells: cells[0]):
        for number, (task, *cells) in enumerate(cells_of_task):
            lines.append(["" if number else task, *cells])
    return [*table((*COMPARISONS.texts, *COMPARISONS.numbers), lines)]


def quotients(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of K-FAC's losses divided by those of the other methods.

    The rows are those of a collection of tasks. The last line has the geometric means.
    """
    ours = {(row["task"], row["budget_steps"]): row for row in rows if row.get("method") == "kfac"
            and "losses" in row}  # fmt: skip
    compared = {
        (row["task"], row["rival_steps"], row["rival"]): row["loss_ratio"]
        for row in rows
        if RIVAL in row and row["loss_ratio"] is not None
    }
    columns = list(dict.fromkeys((steps, rival) for _, steps, rival in compared))
    heads = [f"÷ {rival}, {budget_text(0, steps) if steps else 'equal time'}"
             for steps, rival in columns]  # fmt: skip
    budgets = list(dict.fromkeys(steps for _, steps in ours))
    rises = [f"last ÷ lowest, {budget_text(0, s) if s else 'equal time'}" for s in budgets]
    head = ["task", "steps", "loss", *heads, *rises]
    lines = []
    for task in dict.fromkeys(task for task, _ in ours):
        row = ours[task, 0]
        cells = [task, f"{row['steps']:g}", f"{row['loss']:.4g}"]
        cells += [formatted(compared.get((task, *column)), ".3f") for column in columns]
        cells += [f"{ours[task, steps]['rise']:.2f}" for steps in budgets]
        lines.append(cells)
    means = []
    for column in columns:
        values = [value for (_, *key), value in compared.items() if tuple(key) == column]
        means.append(f"{exp(sum(map(log, values)) / len(values)):.3f}")
    lines.append(["geometric mean", "", "", *means, *[""] * len(rises)])
    return [*table(head, lines)]


def summary(rows: Sequence[Mapping[str, Any]], shown: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a short table of comparisons.

    ``shown`` has the label, task and rival of each line; the comparison with the rival's longest
    budget counts.
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
