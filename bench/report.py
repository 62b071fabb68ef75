"""Output of measurements: tables on the terminal, JSON in files."""

import json
from collections.abc import Iterable, Mapping, Sequence
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
# Columns from the one that a narrow terminal needs most to the one that it needs least.
_IMPORTANCE = (
    "ms", "ours ÷ this", "others", "error", "of ceiling", "peak MB", "GFLOP/s", "quartiles",
    "cpu ms", "runs",
)  # fmt: skip
# Characters for the name of a case, for the blanks between columns, and for any column of text.
_CASE_WIDTH, _GAP, _LEAST_WIDTH = 22, 3, 10
# Facts that must be equal for measurements in one file.
_SAME = ("processor", "packages", "blas", "threads")
# Marks a share of other processes that disturbs the measurement.
_MARK = " !"


def print_suite(console: Console, name: str, rows: Sequence[Row]) -> None:
    """Print the table of one suite, with as many columns as fit into the width.

    Args:
        console: Console to print on.
        name: Name of the suite.
        rows: Rows of its jobs; the rows of one job are adjacent.
    """
    columns = [column for column in zip(_HEADS, *map(cells, rows), strict=True) if any(column[1:])]
    shown = _fitting(columns, console.width - _widest(row.contender for row in rows))
    table = new_table(name, ("case", "contender"), [head for head, *_ in shown])
    last = ""
    for row, *numbers in zip(rows, *(column[1:] for column in shown), strict=True):
        table.add_row(row.case if row.case != last else "", row.contender, *numbers)
        last = row.case
    console.print(table)
    if left_out := [head for head, *_ in columns if head not in {head for head, *_ in shown}]:
        console.print(f"left out, for a wider terminal or --json: {', '.join(left_out)}")
    parts = next((tuple(row.errors) for row in rows if len(row.errors) > 1), ())
    if parts:
        console.print(f"error: of the {', of the '.join(parts)}")
    if any(row.disturbed for row in rows):
        console.print(f"{_MARK.strip()}: other processes ran; the times of these rows are too long")


def _fitting(columns: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Return the columns that fit next to the case, the most important ones first to stay."""
    free = width - _CASE_WIDTH - 3 * _GAP
    chosen = set()
    for head in sorted((head for head, *_ in columns), key=_IMPORTANCE.index):
        column = next(column for column in columns if column[0] == head)
        free -= _widest(column) + _GAP
        if free < 0:
            break
        chosen.add(head)
    return [column for column in columns if column[0] in chosen]


def _widest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def new_table(name: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table of a suite.

    Args:
        name: Name of the suite.
        texts: Heads of the columns of text.
        numbers: Heads of the columns of numbers, which follow.

    Returns:
        The table.
    """
    table = Table(title=f"Suite {name}", title_justify="left", box=box.SIMPLE_HEAD)
    for head in texts:
        table.add_column(head, overflow="fold", min_width=_LEAST_WIDTH)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row under ``_HEADS``."""
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
        report: ``machine``: facts. ``course`` and ``suites``: name of a suite to the record of its
            run and to its rows.
    """
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_file(path, [text.encode()])


def read_report(path: Path, machine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the complete suites that an earlier run on the same machine has written.

    Args:
        path: A file of ``write_json``; it need not exist.
        machine: Facts about this machine.

    Returns:
        ``course`` and ``suites``, as in ``write_json``.

    Raises:
        InputError: The file comes of other hardware, libraries or threads, or is no report.
    """
    if not path.is_file():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        before = report["machine"]
        whole = [name for name, course in report["course"].items() if not course["missing"]]
        entries = {part: {n: report[part][n] for n in whole} for part in ("course", "suites")}
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
    return entries


def _told(fact: Any) -> str:
    """Return a fact about a machine as text."""
    if isinstance(fact, dict):
        return " ".join(f"{name} {value}" for name, value in fact.items())
    return ", ".join(map(_told, fact)) if isinstance(fact, list) else str(fact)


def restored(kind: type[Kind], rows: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """Return rows of a file as instances of the dataclass ``kind``, which has ``seconds``."""
    return [kind(**{**row, "seconds": Spread(**row["seconds"])}) for row in rows]
