"""Signals that end a program, deferred until the present task has stored its state."""

import signal
from contextlib import ExitStack
from threading import current_thread, main_thread
from types import FrameType, TracebackType

# Signals that end a program, where the system has them.
SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class DeferredSignals:
    """A context in which the first signal that ends the program waits for the end of the context.

    A second signal has its usual effect at once. Signals that the program ignores stay ignored. The
    context has no effect outside the main thread, where Python receives no signals.

    Args:
        active: Whether the context has an effect.

    Attributes:
        received: Number of the signal that waits; None for none.
    """

    def __init__(self, active: bool = True) -> None:
        self._active = active
        self.received: int | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> "DeferredSignals":
        if self._active and current_thread() is main_thread():
            for number in SIGNALS:
                older = signal.getsignal(number)
                if older not in {signal.SIG_IGN, None}:
                    self._handlers.callback(signal.signal, number, older)
                    signal.signal(number, self._defer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handlers.close()
        if self.received is not None and error is None:
            signal.raise_signal(self.received)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            return
        self._handlers.close()
        signal.raise_signal(number)
