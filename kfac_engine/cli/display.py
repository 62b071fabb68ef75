"""Output of the commands: lines and JSON on stdout, progress on stderr."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from kfac_engine.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

# Width of output that does not go to a terminal: wide enough for any name.
_FILE_WIDTH = 1000
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
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
def shown_warnings() -> Iterator[None]:
    """Print warnings as lines on stderr."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        tell("warning", printable(str(message)))

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


def show_shape(shape: Sequence[int]) -> str:
    """Return a shape such as ``32×16×3×3``, or ``scalar``."""
    return "×".join(str(side) for side in shape) or "scalar"


def show_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a binary unit."""
    return _scaled(count, 1024, _BYTES)


def show_flops(count: float) -> str:
    """Return a number of floating-point operations with three digits and a decimal unit."""
    return _scaled(count, 1000, _FLOPS)


def show_seconds(count: float) -> str:
    """Return a time with two digits, or ``less than 1 ms``."""
    for unit, length in _TIMES.items():
        if count >= length:
            return f"{float(f'{count / length:.2g}'):g} {unit}"
    return "less than 1 ms"


def _scaled(count: float, step: int, units: Sequence[str]) -> str:
    unit = 0
    # From 999.5 on, three digits are 1000.
    while count >= 999.5 and unit < len(units) - 1:
        count, unit = count / step, unit + 1
    return f"{count:.3g} {units[unit]}"
