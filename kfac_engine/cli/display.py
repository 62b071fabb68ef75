"""Writes lines, JSON and tables to stdout, and progress to stderr."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from kfac_engine.errors import InferenceFormWarning
from kfac_engine.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

# Width of output that does not go to a terminal: wide enough for any name.
_FILE_WIDTH = 1000
# Kinds of messages on stderr.
Label: TypeAlias = Literal["error", "warning", "note"]
_COLOURS: dict[Label, str] = {"error": "red", "warning": "yellow", "note": "cyan"}


def console(*, stderr: bool = False) -> "Console":
    """Return a console of the terminal's width, or a wide one for a file or a pipe."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def working(task: str) -> AbstractContextManager[object]:
    """Return a spinner on stderr with the time of a task; silent if stderr is not a terminal."""
    from kfac_engine.training.bars import spinner

    display = spinner(console(stderr=True))
    display.add_task(f"{task} …", total=None)
    return display


def progress() -> "Progress":
    """Return a bar on stderr with elapsed and remaining time; silent without a terminal."""
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
    # A progress bar replaces sys.stderr to write lines above itself; click.echo would bypass it.
    print(f"{shown} {text}", file=sys.stderr, flush=True)


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print warnings as lines on stderr; the form of inference is a note."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        label: Label = "note" if isinstance(message, InferenceFormWarning) else "warning"
        tell(label, printable(str(message)))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


def say(text: str) -> None:
    """Print a line that may contain names of a model; it wraps at spaces in a terminal."""
    text, target = printable(text), console()
    print_lines((target.is_terminal and wrapped(text, target.width)) or [text])


def print_lines(lines: "Iterable[str | Text]") -> None:
    """Print lines as they are; the terminal breaks wider lines."""
    from rich.text import Text

    target = console()
    for line in lines:
        text = Text(line) if isinstance(line, str) else line
        text.highlight_regex("^warning:", _COLOURS["warning"])
        target.print(text, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text; a word that is wider than the lines has a line of its own."""
    return wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)


def print_json(report: Mapping[str, object]) -> None:
    """Print a report as JSON."""
    click.echo(json.dumps(report, indent=2, allow_nan=False))


# Least width of a column of sentences, if they are longer.
_SENTENCE = 24


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]], *, sentences: str = ""
) -> None:
    """Print a table, or a list of its rows in a terminal that is too narrow for it.

    Names and numbers stay whole, so that they can be copied.

    Args:
        title: Title of the table.
        header: Heads of the columns; those that start with a blank are numbers, set flush right.
        rows: Cells. A cell that is a list has an entry on each line.
        sentences: Head of the column whose cells may wrap at spaces.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    target = console()
    print_lines([*(Text(line, style="bold") for line in wrapped(title, target.width)), ""])
    cells = [[_lines(cell) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="")
    least = len(header) - 1
    for index, head in enumerate(header):
        words = head.split() if target.is_terminal else [head.strip()]
        lines = [line for row in cells for line in row[index]]
        width = _widest(lines)
        if head == sentences:
            words += (word for line in lines for word in line.split())
            width = min(width, _SENTENCE)
        width = max(width, _widest(words))
        table.add_column(
            Text(head.strip()),
            justify="right" if head.startswith(" ") else "left",
            width=None if head == sentences else width,
            min_width=width,
        )
        least += width
    for row in cells:
        table.add_row(*(Text("\n".join(cell)) for cell in row))
    table.padding = (0, 0, 0, 2 if least + 2 * len(header) <= target.width else 0)
    if least <= target.width:
        with target.capture() as captured:
            target.print(table)
        print_lines(line.rstrip() for line in captured.get().splitlines())
    else:
        print_lines(_listed(header, cells, target.width))
    print_lines([""])


def _lines(cell: object) -> list[str]:
    return [printable(str(entry)) for entry in (cell if isinstance(cell, list) else [cell])]


def _listed(
    header: Sequence[str], rows: Sequence[Sequence[list[str]]], width: int
) -> Iterator[str]:
    """Yield for each row the lines of its first cell, and below them a line for each other cell."""
    heads = [head.strip() for head in header[1:]]
    margin = _widest(heads)
    for names, *cells in rows:
        yield from (f"  {name}" for name in names)
        for head, cell in zip(heads, cells, strict=True):
            start = f"      {head:<{margin}}   "
            for part in wrapped(", ".join(filter(None, cell)), width - len(start)):
                yield start + part
                start = " " * len(start)


def _widest(lines: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, lines), default=0)
