"""How results look: tables on stdout, progress on stderr, JSON for programs."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kfac_engine.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Of output that does not go to a terminal: wide enough for any name.
_FILE_WIDTH = 1000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def console(*, stderr: bool = False) -> "Console":
    """A console that wraps at the terminal's width, or late where there is none."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, width=_FILE_WIDTH, highlight=False)


def working(what: str) -> AbstractContextManager[object]:
    """A spinner on stderr while something takes its time; silent where stderr is no terminal."""
    return console(stderr=True).status(f"{what} …")


def progress() -> "Progress":
    """A progress bar on stderr that goes when it is done; silent where stderr is no terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    target = console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )


@contextmanager
def report_beside(path: Path) -> Iterator[None]:
    """Print on stderr if the content of a file is written to the standard output."""
    from kfac_engine.system.writing import is_stdout

    with redirect_stdout(sys.stderr) if is_stdout(path) else nullcontext():
        yield


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns whose heads start with a blank are numbers, set flush right.

    A cell that is a list has an entry on each line.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for head in header:
        side: Literal["left", "right"] = "right" if head.startswith(" ") else "left"
        table.add_column(head.strip(), justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_lines(cell)) for cell in row))
    console().print(table)


def _lines(cell: object) -> str:
    entries = cell if isinstance(cell, list) else [cell]
    return "\n".join(printable(str(entry)) for entry in entries)


def say(text: str) -> None:
    """Print a line that may hold names of a model."""
    click.echo(printable(text))


def print_json(report: Mapping[str, object]) -> None:
    """Print a report as JSON."""
    click.echo(json.dumps(report, indent=2, allow_nan=False))


def show_shape(shape: Sequence[int]) -> str:
    """``32×16×3×3``; a scalar's shape is ``scalar``."""
    return "×".join(str(side) for side in shape) or "scalar"


def show_bytes(count: float) -> str:
    """A number of bytes with three digits and a binary unit."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"
