"""The table of a comparison, whose rows are printed as they are measured.

A case has a line of its own, and its contenders follow below. Widths of columns are fixed before
the first measurement, so that a row needs no later row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.console import Console

from kfac_engine.bench.measure import Row
from kfac_engine.bench.report import milliseconds

_EDGE, _GAP = "  ", "  "
_CONTENDER = "contender"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers; a cell that is longer than its width moves the rest of its line.

    ``rank`` is the place in the order in which columns are left out, the largest first.
    """

    head: str
    width: int
    cell: Callable[[Row], str]
    meaning: str
    rank: int


def _errors(row: Row) -> str:
    return " / ".join(f"{error:.0e}" for error in row.errors.values())


COLUMNS = (
    Column("ms", 8, lambda row: milliseconds(row.seconds.median), "median of the wall time", 0),
    Column(
        "quartiles", 15,
        lambda row: f"{milliseconds(row.seconds.low)} – {milliseconds(row.seconds.high)}",
        "a quarter of the runs is faster, and a quarter slower", 6),
    Column("runs", 4, lambda row: str(row.runs), "number of timed runs", 8),
    Column("cpu ms", 8, lambda row: milliseconds(row.cpu_seconds), "CPU time of all threads", 7),
    Column(
        "ours ÷ this", 11, lambda row: f"{row.ratio:.2f}",
        "time of this package divided by that of the contender; above 1 the contender is faster",
        1),
    Column(
        "GFLOP/s", 7, lambda row: f"{2e-9 * row.rate:.0f}" if row.rate else "",
        "operations of the definition in a second", 5),
    Column(
        "of ceiling", 10, lambda row: f"{row.fraction:.0%}" if row.rate else "",
        "least time at the rates of this machine, divided by the time; above 100 % if the "
        "algorithm needs fewer operations than the definition", 3,
    ),
    Column(
        "peak MB", 7, lambda row: f"{row.peak_bytes / 1e6:.0f}", "largest increase of the memory",
        4),
    Column(
        "error", 13, _errors,
        "largest difference from the definition, relative to its largest entry", 2),
)  # fmt: skip
# Follows the numbers of a row during which other processes ran.
_DISTURBED = "! others {:.0%}"
_DISTURBED_MEANING = (
    "others: CPU time of other processes, as a share of the wall time; times are too long"
)


class SuiteTable:
    """Prints the table of one suite row by row, with the columns that fit."""

    def __init__(self, console: Console, name: str, contenders: Iterable[str]) -> None:
        self._console, self._name = console, name
        self._first = max(map(len, (_CONTENDER, *contenders))) + len(_EDGE)
        self._columns = self._fitting(COLUMNS)
        self._left_out = [column.head for column in COLUMNS if column not in self._columns]
        self._parts: tuple[str, ...] = ()
        self._disturbed = False

    def start(self) -> None:
        """Print the title and the heads."""
        heads = [f"{_EDGE}{_CONTENDER}".ljust(self._first + len(_EDGE))]
        heads += [column.head.rjust(column.width) for column in self._columns]
        line = _GAP.join(heads)
        self._print(f"Suite {self._name}", line, "─" * len(line))

    def case(self, name: str) -> None:
        """Print the name of the next case."""
        self._print(*(wrap(name, self._console.width - len(_EDGE), initial_indent=_EDGE,
                           subsequent_indent=2 * _EDGE, break_long_words=False)))  # fmt: skip

    def rows(self, rows: Sequence[Row]) -> None:
        """Print the rows of the present case."""
        for row in rows:
            cells = [f"{2 * _EDGE}{row.contender}".ljust(self._first + len(_EDGE))]
            cells += [column.cell(row).rjust(column.width) for column in self._columns]
            if row.disturbed:
                cells.append(_DISTURBED.format(row.others))
            self._print(_GAP.join(cells).rstrip())
            self._disturbed |= row.disturbed
            if len(row.errors) > 1:
                self._parts = tuple(row.errors)

    def end(self) -> None:
        """Print the meaning of the columns."""
        notes = [f"{column.head}: {column.meaning}" for column in self._columns]
        if self._parts and any(column.head == "error" for column in self._columns):
            notes.append(f"errors are those of the {', of the '.join(self._parts)}")
        if self._disturbed:
            notes.append(_DISTURBED_MEANING)
        if self._left_out:
            notes.append(f"left out, for a wider terminal or --json: {', '.join(self._left_out)}")
        for note in notes:
            self._print(*wrap(note, self._console.width, subsequent_indent=_EDGE))

    def _fitting(self, columns: Sequence[Column]) -> list[Column]:
        """Return the columns that fit into the width, the least important ones left out first."""
        free = self._console.width - self._first - len(_EDGE) - len(_GAP) - len(_DISTURBED)
        chosen = []
        for column in sorted(columns, key=lambda column: column.rank):
            free -= len(_GAP) + column.width
            if free < 0:
                break
            chosen.append(column)
        return [column for column in columns if column in chosen]

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, soft_wrap=True)
