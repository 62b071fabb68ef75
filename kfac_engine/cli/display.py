"""Output of the commands: lines, JSON and tables on stdout, progress on stderr."""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from kfac_engine.errors import InferenceFormWarning
from kfac_engine.printable import printable
from kfac_engine.summary import scaled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

# Width of output that does not go to a terminal: wide enough for any name.
_FILE_WIDTH = 1000
_TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
# Kinds of messages on stderr.
Label: TypeAlias = Literal["error", "warning", "note"]
_COLOURS: dict[Label, str] = {"error": "red", "warning": "yellow", "note": "cyan"}
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def console(*, stderr: bool = False) -> "Console":
    """Return a console of the terminal's width, or a wide one for a file or a pipe."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, width=_FILE_WIDTH, highlight=False)
    )


def working(task: str) -> AbstractContextManager[object]:
    """Return a spinner on stderr with the time of a task; silent if stderr is not a terminal."""
    from kfac_engine.training.bars import spinner

    display = spinner(console(stderr=True))
    display.add_task(f"{task} …", total=None)
    return display


def progress() -> "Progress":
    """Return a bar on stderr with elapsed and remaining time; silent if stderr is no terminal."""
    from kfac_engine.training.bars import bar

    return bar(console(stderr=True))


def tell(label: Label, text: str) -> None:
    """Print a message on stderr.

    The label has a colour if stderr is a terminal that shows colours, and the user does not refuse
    them by ``NO_COLOR`` (https://no-color.org).
    """
    from rich.console import Console

    console = Console(stderr=True)
    plain = console.no_color or console.color_system is None
    shown = f"{label}:" if plain else click.style(f"{label}:", fg=_COLOURS[label])
    # A bar that is shown replaces sys.stderr, and writes lines above itself; click.echo passes by.
    print(f"{shown} {text}", file=sys.stderr, flush=True)


@contextmanager
def shown_warnings(spell: Callable[[str], str] = str) -> Iterator[None]:
    """Print warnings as lines on stderr, after ``spell``; the form of inference is a note."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        label: Label = "note" if isinstance(message, InferenceFormWarning) else "warning"
        tell(label, printable(spell(str(message))))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


@contextmanager
def report_beside(path: Path) -> Iterator[None]:
    """Return a context that prints on stderr if ``path`` is the standard output."""
    from kfac_engine.system.writing import is_stdout

    with redirect_stdout(sys.stderr) if is_stdout(path) else nullcontext():
        yield


def say(text: str) -> None:
    """Print a line that may contain names of a model; it wraps at spaces in a terminal."""
    print_lines(_fitted(text))


def warn(text: str) -> None:
    """Print a warning in the way of ``say``."""
    from rich.text import Text

    first, *others = _fitted(f"warning: {text}")
    label, blank, start = first.partition(" ")
    print_lines([Text.assemble((label, "yellow"), blank, start), *others])


def print_lines(lines: "Iterable[str | Text]") -> None:
    """Print lines as they are; the terminal breaks wider lines."""
    from rich.text import Text

    target = console()
    for line in lines:
        target.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text; a word that is wider than the lines has a line of its own."""
    return wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)


def _fitted(text: str) -> list[str]:
    text, target = printable(text), console()
    return (target.is_terminal and wrapped(text, target.width)) or [text]


def print_json(report: Mapping[str, object]) -> None:
    """Print a report as JSON."""
    click.echo(json.dumps(report, indent=2, allow_nan=False))


def show_flops(count: float) -> str:
    """Return a number of floating-point operations with three digits and a decimal unit."""
    return scaled(count, 1000, _FLOPS)


_EDGE, _GAP = "  ", "   "
# The same for cells below a name on a line of its own.
_EDGE_BELOW, _GAP_BELOW = "      ", "  "
# Least width of a column of sentences, if they are longer.
_SENTENCE = 24


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table.

    Attributes:
        head: Its head.
        is_number: Whether its cells are set flush right.
        wraps: Whether its cells are sentences, which wrap at spaces.
        cells: Lines of the cell of each row.
    """

    head: str
    is_number: bool
    wraps: bool
    cells: Sequence[Sequence[str]]

    def heads(self, *, stacked: bool) -> list[str]:
        """Return the lines of the head: one, or if stacked two lines as narrow as possible."""
        if not stacked:
            return [self.head]
        least = max(_widest(self._lines()), _widest(self.head.split()))
        attempts = (wrapped(self.head, width) for width in range(least, len(self.head)))
        return next((lines for lines in attempts if len(lines) <= 2), [self.head])

    def width(self, *, stacked: bool) -> int:
        """Return the width without wrapped cells."""
        return _widest([*self.heads(stacked=stacked), *self._lines()])

    def least(self, *, stacked: bool) -> int:
        """Return the least width, with wrapped cells."""
        width = self.width(stacked=stacked)
        if not self.wraps:
            return width
        words = (word for line in self._lines() for word in line.split())
        return min(width, max(_SENTENCE, _widest(words)))

    def _lines(self) -> Iterator[str]:
        return (line for cell in self.cells for line in cell)


@dataclass(frozen=True, slots=True)
class _Layout:
    """An arrangement of a table.

    Attributes:
        columns: The columns that are shown.
        stacked: Whether heads wrap at spaces.
        below: Whether the first cell of a row has lines of its own, above the other cells.
    """

    columns: Sequence[_Column]
    stacked: bool = False
    below: bool = False

    def widths(self, available: int) -> list[int] | None:
        """Return the width of each column in a terminal; None if the columns do not fit."""
        least = [column.least(stacked=self.stacked) for column in self._beside]
        spare = available - len(self._indent) - len(self._gap) * (len(least) - 1) - sum(least)
        if spare < 0:
            return None
        widths = []
        for column, width in zip(self._beside, least, strict=True):
            widths.append(min(column.width(stacked=self.stacked), width + spare))
            spare -= widths[-1] - width
        return widths

    def lines(self, widths: Sequence[int], rule: str) -> Iterator[str]:
        """Yield the lines of the table, without line breaks.

        ``rule`` is the character of the line below the heads.
        """
        if self.below:
            yield _EDGE + self.columns[0].head
        yield from self._row([c.heads(stacked=self.stacked) for c in self._beside], widths)
        length = len(self._indent) + sum(widths) + len(self._gap) * (len(widths) - 1)
        yield " " + rule * (length - 1)
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            if self.below:
                yield from (_EDGE + name for name in cells[0])
            yield from self._row(cells[self.below :], widths)

    @property
    def _beside(self) -> Sequence[_Column]:
        return self.columns[self.below :]

    @property
    def _indent(self) -> str:
        return _EDGE_BELOW if self.below else _EDGE

    @property
    def _gap(self) -> str:
        return _GAP_BELOW if self.below else _GAP

    def _row(self, cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
        from rich.cells import cell_len

        folded = (
            [part for line in cell for part in (wrapped(line, width) if column.wraps else [line])]
            for column, cell, width in zip(self._beside, cells, widths, strict=True)
        )
        for parts in zip_longest(*folded, fillvalue=""):
            filled = [
                " " * (width - cell_len(part)) + part
                if column.is_number
                else part + " " * (width - cell_len(part))
                for column, part, width in zip(self._beside, parts, widths, strict=True)
            ]
            yield (self._indent + self._gap.join(filled)).rstrip()


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    sentences: str = "",
    optional: str = "",
) -> bool:
    """Print a table in the first layout that fits the terminal.

    Return whether all columns are shown. The layouts are a table; a table without the optional
    column; the first cell of each row on lines of its own, with the other cells in a table below; a
    line for each cell.

    Args:
        title: Title of the table.
        header: Heads of the columns; those that start with a blank are numbers, set flush right.
        rows: Cells. A cell that is a list has an entry on each line.
        sentences: Head of the column whose cells may wrap at spaces.
        optional: Head of the column that a narrow terminal does not show.
    """
    from rich.text import Text

    target = console()
    columns = [
        _Column(head.strip(), head.startswith(" "), head == sentences, cells)
        for head, cells in zip(header, _transposed(rows, len(header)), strict=True)
    ]
    print_lines(Text(line, style="bold") for line in wrapped(title, target.width))
    for layout in _layouts(columns, optional):
        widths = layout.widths(target.width)
        if widths is not None:
            rule = "-" if target.options.ascii_only else "─"
            print_lines(["", *layout.lines(widths, rule), ""])
            return len(layout.columns) == len(columns)
    print_lines(_listed(columns, target.width))
    return True


def _transposed(rows: Sequence[Sequence[object]], count: int) -> list[list[list[str]]]:
    """Return the lines of the cells of each column."""
    return [[_lines(row[index]) for row in rows] for index in range(count)]


def _lines(cell: object) -> list[str]:
    return [printable(str(entry)) for entry in (cell if isinstance(cell, list) else [cell])]


def _layouts(columns: Sequence[_Column], optional: str) -> Iterator[_Layout]:
    """Yield layouts, the best one first."""
    fewer = [column for column in columns if column.head != optional.strip()]
    yield _Layout(columns)
    yield _Layout(columns, stacked=True)
    yield _Layout(fewer, stacked=True)
    yield _Layout(columns, stacked=True, below=True)
    yield _Layout(fewer, stacked=True, below=True)


def _listed(columns: Sequence[_Column], width: int) -> Iterator[str]:
    """Yield for each row the lines of its first cell, and below them a line for each other cell."""
    names, *others = columns
    margin = _widest(column.head for column in others)
    for index, cell in enumerate(names.cells):
        yield from (_EDGE + name for name in cell)
        for column in others:
            text = ", ".join(filter(None, column.cells[index]))
            start = f"{_EDGE_BELOW}{column.head:<{margin}}{_GAP}"
            for part in wrapped(text, width - len(start)):
                yield start + part
                start = " " * len(start)
    yield ""


def _widest(lines: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, lines), default=0)
