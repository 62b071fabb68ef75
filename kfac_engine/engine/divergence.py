"""Losses of the latest calls, which distinguish a diverging run from a faulty batch."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kfac_engine.distributed.agreement import raised_by_all_ranks
from kfac_engine.errors import DivergenceWarning, NonFiniteError

CURES = (
    "take smaller steps (Result.clipped_rate bounds them), raise the damping, "
    "or refresh the inverses more often (Schedule.refresh_every)"
)
LATEST = 5  # losses that an error lists
EXPLODED = 1000  # times the first loss


class LossHistory:
    """The losses of an engine's latest calls.

    Args:
        warns: Whether a diverging run is a warning.
    """

    def __init__(self, *, warns: bool = True) -> None:
        self._warns = warns
        self.restart()

    def restart(self) -> None:
        """Remove all losses, because another run begins."""
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._first: float | None = None
        self._parameters_moved = False
        self._warned = False

    def parameters_moved(self) -> None:
        """Record that parameters were replaced: the calls are those of a training run."""
        self._parameters_moved = True

    def add(self, loss: float) -> None:
        """Record the loss of a call; warn once if it is a large multiple of the first loss."""
        self._latest.append(loss)
        if self._first is None:
            self._first = loss
        exploded = loss > EXPLODED * abs(self._first)
        if exploded and self._parameters_moved and self._warns and not self._warned:
            self._warned = True
            warnings.warn(
                f"the run diverges: the loss rose from {self._first:.3g} to {loss:.3g}; {CURES}.",
                DivergenceWarning,
                stacklevel=4,
            )

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Add the latest losses and the remedies to a ``NonFiniteError`` of a run.

        Raises:
            NonFiniteError: The error of the block, with the losses where parameters have moved.
        """
        try:
            yield
        except NonFiniteError as error:
            agreed = raised_by_all_ranks(error)
            if agreed or not (self._latest and self._parameters_moved):
                raise
            losses = ", ".join(f"{loss:.3g}" for loss in self._latest)
            longer = NonFiniteError(
                f"{error} The latest losses were {losses}. If the run diverges: {CURES}."
            )
            longer.place = error.place
            raise longer from error
