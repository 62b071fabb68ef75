"""Shows bars and spinners in a terminal, with the elapsed and the remaining time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

# Name, bar and times of a run of 1000 epochs fit into 80 columns.
_BAR_WIDTH = 20


class _Labelled(ProgressColumn):
    """A column of a bar: a label and a time; empty where the time is unknown."""

    max_refresh = 0.5  # seconds, so that the remaining time does not flicker

    def __init__(self, name: str, time: ProgressColumn) -> None:
        super().__init__()
        self._name, self._time = name, time

    def render(self, task: Task) -> Text:
        text = self._time(task)
        assert isinstance(text, Text), "columns of times are texts"
        return Text.assemble(f"{self._name} ", text) if text.plain else Text()


def bar(console: Console) -> Progress:
    """Return a display of tasks with a bar, the elapsed and the remaining time.

    Args:
        console: Where to write; nothing is written if it is not a terminal.

    Returns:
        The display, which disappears at its end.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(_BAR_WIDTH),
        TaskProgressColumn(),
        _Labelled("elapsed", TimeElapsedColumn()),
        _Labelled("remaining", TimeRemainingColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def spinner(console: Console) -> Progress:
    """Return a display like ``bar`` for tasks of unknown length: with the elapsed time only."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        _Labelled("elapsed", TimeElapsedColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def stages(active: bool, total: int) -> Iterator[Callable[[str], None]]:
    """Return a context with a bar on stderr; silent if stderr is not a terminal.

    Args:
        active: Whether there is a bar.
        total: Number of stages.

    Yields:
        A function to call at the beginning of each stage, with its name.
    """
    display = bar(Console(stderr=True))
    display.disable |= not active
    with display:
        task = display.add_task("", total=total)
        begun = 0

        def begin(name: str) -> None:
            nonlocal begun
            display.update(task, completed=begun, description=name)
            begun += 1

        yield begin
