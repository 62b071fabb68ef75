"""How measurements look: a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from kfac_engine.bench.measure import Row
from kfac_engine.bench.timing import Spread, milliseconds
from kfac_engine.errors import InputError
from kfac_engine.system.writing import write_file

Kind = TypeVar("Kind")

_HEADS = (
    "ms", "quartiles", "runs", "cpu ms", "ours ÷ this", "GFLOP/s", "of ceiling", "peak MB", "error",
    "others",
)  # fmt: skip
# What must be alike for measurements to stand side by side.
_SAME = ("processor", "packages", "blas", "threads")
# Appended to the share of the machine that others took, where it is felt.
_MARK = " !"


def print_suite(console: Console, name: str, rows: Sequence[Row]) -> None:
    """Print the table of one suite.

    Args:
        console: Where to.
        name: Of the suite.
        rows: Of its jobs, those of one job side by side.
    """
    columns = zip(_HEADS, *map(cells, rows), strict=True)
    # Nobody counts the multiplications of some suites.
    told = [column for column in columns if any(column[1:])]
    table = new_table(name, ("case", "contender"), [head for head, *_ in told])
    last = ""
    for row, *own in zip(rows, *(column[1:] for column in told), strict=True):
        table.add_row(row.case if row.case != last else "", row.contender, *own)
        last = row.case
    console.print(table)
    parts = next((tuple(row.errors) for row in rows if len(row.errors) > 1), ())
    if parts:
        console.print(f"error: of the {', of the '.join(parts)}")
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
        table.add_column(head, overflow="fold")
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def cells(row: Row) -> tuple[str, ...]:
    """What stands under ``_HEADS``."""
    times = row.seconds
    counted = row.rate > 0
    return (
        milliseconds(times.median),
        f"{milliseconds(times.low)} – {milliseconds(times.high)}",
        str(row.runs),
        milliseconds(row.cpu_seconds),
        f"{row.ratio:.2f}",
        f"{2e-9 * row.rate:.0f}" if counted else "",
        f"{row.fraction:.0%}" if counted else "",
        f"{row.peak_bytes / 1e6:.0f}",
        " / ".join(f"{error:.0e}" for error in row.errors.values()),
        f"{row.others:.0%}{_MARK if row.disturbed else ''}",
    )


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write machine and measurements; times are in seconds, rates in multiplications a second.

    Args:
        path: The file.
        report: ``machine``; ``course`` and ``suites``: name of a suite to how it went, and to its
            rows, which are mappings.
    """
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_file(path, [text.encode()])


def read_report(path: Path, machine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier run on the same machine has written, suites with gaps left out.

    Args:
        path: A file of ``write_json``, or none yet.
        machine: What this machine is.

    Returns:
        ``course`` and ``suites`` as ``write_json`` has them.

    Raises:
        InputError: The file comes of other hardware, libraries or threads, or is no report.
    """
    if not path.is_file():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        before = report["machine"]
        whole = [name for name, course in report["course"].items() if not course["missing"]]
        kept = {part: {n: report[part][n] for n in whole} for part in ("course", "suites")}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is no report of bench --json: name another file, or leave out --resume."
        ) from error
    now = json.loads(json.dumps(machine))
    for fact in _SAME:
        if before.get(fact) != now.get(fact):
            raise InputError(
                f"{path} was measured with {fact} {_told(before.get(fact))}, here it is "
                f"{_told(now.get(fact))}: name another file, or leave out --resume."
            )
    return kept


def _told(fact: Any) -> str:
    """A fact about a machine."""
    if isinstance(fact, dict):
        return " ".join(f"{name} {value}" for name, value in fact.items())
    return ", ".join(map(_told, fact)) if isinstance(fact, list) else str(fact)


def restored(kind: type[Kind], rows: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """Rows as a file has them, as the dataclass that they were: one with ``seconds``."""
    return [kind(**{**row, "seconds": Spread(**row["seconds"])}) for row in rows]
