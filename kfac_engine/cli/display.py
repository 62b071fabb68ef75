"""Output of the commands: tables and JSON on stdout, progress on stderr."""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kfac_engine.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Width of output that does not go to a terminal: wide enough for any name.
_FILE_WIDTH = 1000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
    """Return a spinner on stderr for the time of a task; silent if stderr is not a terminal."""
    return console(stderr=True).status(f"{task} …")


def progress() -> "Progress":
    """Return a progress bar on stderr with the remaining time; silent if stderr is no terminal."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    target = console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print warnings as lines on stderr."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        click.echo(f"warning: {printable(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


@contextmanager
def report_beside(path: Path) -> Iterator[None]:
    """Print on stderr if the content of a file is written to the standard output."""
    from kfac_engine.system.writing import is_stdout

    with redirect_stdout(sys.stderr) if is_stdout(path) else nullcontext():
        yield


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, or a block of lines for each row if the terminal is too narrow for the table.

    Args:
        title: Title of the table.
        header: Heads of the columns; those that start with a blank are numbers, set flush right.
        rows: Cells. A cell that is a list has an entry on each line.
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
    target = console()
    if (
        target.measure(table, options=target.options.update(width=_FILE_WIDTH)).maximum
        > target.width
    ):
        _print_blocks(title, header, rows)
    else:
        target.print(table)


def _print_blocks(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print the first cell of each row on lines of its own, and the others below it."""
    from rich.padding import Padding
    from rich.text import Text

    target = console()
    target.print(Text(title, style="bold"))
    for first, *others in rows:
        # A name must stay whole, so that it can be copied: the terminal breaks it if it must.
        target.print(Text(f"  {_lines(first)}".replace("\n", "\n  ")), soft_wrap=True)
        pairs = [
            f"{head.strip()}\u00a0{cell}".replace(" ", "\u00a0")
            for head, cell in zip(header[1:], map(_flat, others), strict=True)
            if cell
        ]
        target.print(Padding(Text("  ".join(pairs)), (0, 0, 0, 6)))
    target.print()


def _flat(cell: object) -> str:
    return _lines(cell).replace("\n", ", ")


def _lines(cell: object) -> str:
    entries = cell if isinstance(cell, list) else [cell]
    return "\n".join(printable(str(entry)) for entry in entries)


def say(text: str) -> None:
    """Print a line that may contain names of a model."""
    click.echo(printable(text))


def print_json(report: Mapping[str, object]) -> None:
    """Print a report as JSON."""
    click.echo(json.dumps(report, indent=2, allow_nan=False))


def show_shape(shape: Sequence[int]) -> str:
    """Return a shape such as ``32×16×3×3``, or ``scalar``."""
    return "×".join(str(side) for side in shape) or "scalar"


def show_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a binary unit."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"
