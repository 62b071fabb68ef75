"""Shows a run's progress on stderr: a bar on a terminal, and lines elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING

from kfac_engine.printable import printable
from kfac_engine.training.history import Record, metrics_in
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress as Bar

# Seconds between two lines: at the ends of epochs, and within an epoch.
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 30.0
# Stages of a step that optimizers without curvature have as well.
_PLAIN_STAGES = ("seconds/gradients", "seconds/update")
# Entries of records to their names on the display.
_SHOWN = {"learning_rate": "rate", "damping": "damping", "reduction_ratio": "ratio"}
# Significant digits. With three, the numbers of a step fit into 80 columns.
_LINE_DIGITS, _BAR_DIGITS = 4, 3


class Progress(Callback):
    """Shows the steps of a run.

    On a terminal, a bar shows the spent part of the budget and the numbers of the present step, and
    a line remains for each epoch. Elsewhere there are lines only: at the end of an epoch, but not
    more than one in a second; every 30 seconds within an epoch; and at the end of the run.

    Args:
        active: Whether anything is shown.
        epochs: Number of epochs of the budget; None for no bound.
        console: Where to write; the standard error by default.
        clock: Returns the time in seconds.
    """

    on_every_rank = False

    def __init__(
        self,
        active: bool,
        epochs: int | None = None,
        *,
        console: "Console | None" = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._epochs, self._clock = epochs, clock
        self._console = (console or _stderr()) if active else None
        self._live: Live | None = None
        self._bar: Bar | None = None
        self._numbers = _Numbers()
        self._shown = clock()
        # The line of the latest step, until it is printed.
        self._last, self._ends_epoch = "", False

    def on_run_start(self, optimizer: Optimizer, records: Sequence[Record]) -> None:
        """Show the bar."""
        del optimizer, records
        if self._console is not None and self._console.is_terminal:
            self._bar, self._live = _bar(self._console)
            # A line that is printed during the first drawing, or while the height changes, would
            # stand beside the bar: the thread of the display starts with the whole bar.
            self._live.start(refresh=True)

    def on_epoch_end(self, record: Record, optimizer: Optimizer) -> None:
        """Remember that the record ends an epoch."""
        del record, optimizer
        self._ends_epoch = True

    def on_record(self, record: Record, optimizer: Optimizer) -> None:
        """Show a step."""
        del optimizer
        if self._console is None:
            return
        self._numbers.add(record)
        self._last = self._line(record)
        if self._bar is not None and self._live is not None:
            self._refresh(record)
        if self._clock() - self._shown >= (_LEAST_SECONDS if self._ends_epoch else _MOST_SECONDS):
            self._print()
        if self._ends_epoch:
            self._numbers = _Numbers(self._numbers.curvature, self._numbers.seconds)
            self._ends_epoch = False

    def close(self) -> None:
        """Print the line of the last step, if it is not there yet, and remove the bar."""
        self._print()
        if self._live is not None:
            self._live.stop()

    def _print(self) -> None:
        if self._console is not None and self._last:
            self._console.print(self._last, markup=False, highlight=False, soft_wrap=True)
            self._shown, self._last = self._clock(), ""

    def _refresh(self, record: Record) -> None:
        from rich.console import Group
        from rich.text import Text

        assert self._bar is not None
        assert self._live is not None
        self._bar.update(
            self._bar.task_ids[0], completed=record["spent"], description=self._epoch(record)
        )
        numbers = {"loss": record["loss"], **self._numbers_of(record)}
        text = Text(_text(numbers, _BAR_DIGITS), no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._bar, text))

    def _line(self, record: Record) -> str:
        """Return the line of a step; the loss is the mean over the steps of the epoch."""
        loss = {"loss": self._numbers.mean_loss}
        entries = {**loss, **metrics_in(record), **self._numbers_of(record)}
        place = f"{self._epoch(record)} step {record['step']:.0f}"
        return printable(f"{place}: {_text(entries, _LINE_DIGITS)}, {_duration(record['seconds'])}")

    def _epoch(self, record: Record) -> str:
        of = "" if self._epochs is None else f"/{self._epochs}"
        return f"epoch {record['epoch'] + 1:.0f}{of}"

    def _numbers_of(self, record: Record) -> dict[str, float | str]:
        """Return the numbers of a step that are not metrics, under their names on the display."""
        shown: dict[str, float | str] = {
            name: record[entry] for entry, name in _SHOWN.items() if entry in record
        }
        if self._numbers.curvature:
            shown["curvature"] = f"{self._numbers.curvature / self._numbers.seconds:.0%}"
        return shown


@dataclass(slots=True)
class _Numbers:
    """Sums over the steps of a run and of an epoch."""

    curvature: float = 0.0  # seconds of the stages that curvature adds to a step
    seconds: float = 0.0  # seconds of all stages
    loss: float = 0.0  # sum of the finite losses of the epoch
    steps: int = 0  # number of the finite losses

    @property
    def mean_loss(self) -> float:
        """Mean of the finite losses of the epoch; NaN for none."""
        return self.loss / self.steps if self.steps else float("nan")

    def add(self, record: Record) -> None:
        """Add a step."""
        if isfinite(record["loss"]):
            self.loss += record["loss"]
            self.steps += 1
        for name, value in record.items():
            if name.startswith("seconds/"):
                self.seconds += value
                self.curvature += value if name not in _PLAIN_STAGES else 0.0


def _text(entries: Mapping[str, float | str], digits: int) -> str:
    values = (v if isinstance(v, str) else f"{v:.{digits}g}" for v in entries.values())
    return ", ".join(f"{name} {value}" for name, value in zip(entries, values, strict=True))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _bar(console: "Console") -> "tuple[Bar, Live]":
    """Return a bar of one task, and the display that it is a part of."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from kfac_engine.training.bars import bar

    display = bar(console)
    display.add_task("", total=1.0)
    both = Group(display, Text())
    return display, Live(both, console=console, refresh_per_second=4, transient=True)
