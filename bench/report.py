"""How measurements look: a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kfac_engine.bench.ceiling import Ceiling
from kfac_engine.bench.measure import Row

_HEADS = (
    "ms", "quartiles", "cpu ms", "ours ÷ this", "GFLOP/s", "of ceiling", "peak MB", "error",
    "others",
)  # fmt: skip
# Appended to the share of the machine that others took, where it is felt.
_MARK = " !"


def print_suite(console: Console, name: str, rows: Sequence[Row]) -> None:
    """Print the table of one suite.

    Args:
        console: Where to.
        name: Of the suite.
        rows: Of its jobs, those of one job side by side.
    """
    table = new_table(name, ("case", "contender"), _HEADS)
    last = ""
    for row in rows:
        table.add_row(row.case if row.case != last else "", row.contender, *cells(row))
        last = row.case
    console.print(table)
    if any(row.disturbed for row in rows):
        console.print(f"{_MARK.strip()}: other processes ran; the times of these rows are too long")


def new_table(name: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table of a suite.

    Args:
        name: Of the suite.
        texts: Heads of columns of words.
        numbers: Heads of columns of numbers, which follow.

    Returns:
        The table.
    """
    table = Table(title=f"Suite {name}", title_justify="left", box=box.SIMPLE_HEAD)
    for head in texts:
        table.add_column(head)
    for head in numbers:
        table.add_column(head, justify="right")
    return table


def cells(row: Row) -> tuple[str, ...]:
    """What stands under ``_HEADS``."""
    times = row.seconds
    counted = row.rate > 0
    return (
        f"{1e3 * times.median:.2f}",
        f"{1e3 * times.low:.2f} – {1e3 * times.high:.2f}",
        f"{1e3 * row.cpu_seconds:.2f}",
        f"{row.ratio:.2f}",
        f"{2e-9 * row.rate:.0f}" if counted else "",
        f"{row.fraction:.0%}" if counted else "",
        f"{row.peak_bytes / 1e6:.0f}",
        f"{row.error:.0e}",
        f"{row.others:.0%}{_MARK if row.disturbed else ''}",
    )


def write_json(
    path: Path,
    found: Mapping[str, object],
    ceiling: Ceiling,
    suites: Mapping[str, Sequence[Any]],
) -> None:
    """Write machine and measurements; times are in seconds, rates in multiplications a second.

    Args:
        path: The file.
        found: The machine.
        ceiling: Its best rates.
        suites: Name to rows, which are dataclasses.
    """
    report = {
        "machine": {**found, "ceiling": asdict(ceiling)},
        "suites": {name: [asdict(row) for row in rows] for name, rows in suites.items()},
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
