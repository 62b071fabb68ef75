"""Delays signals until a step ends, or until a run has stored its state."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any, Self

# Signals that end a program, where the system has them.
SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_ALL = tuple(int(number) for number in signal.Signals)
# Without the conversion to enumerations, which takes most of the time of a context.
_calls = getattr(signal, "_signal", signal)
_handler_of: Callable[[int], Any] = _calls.getsignal
_set_handler: Callable[[int, Any], Any] = _calls.signal


class _Handling(ABC):
    """A context with other handlers of signals.

    The context has no effect outside the main thread, where Python receives no signals.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = numbers
        self._older: dict[int, Any] = {}
        self._over = False

    def __enter__(self) -> Self:
        if self._numbers and current_thread() is main_thread():
            try:
                for number, older in self._replaced():
                    self._older[number] = older
                    _set_handler(number, self._received)
            except BaseException:  # a signal that is not replaced yet
                self._restore()
                raise
        return self

    def _restore(self) -> None:
        try:
            self._put_back()
        except BaseException:  # of a handler that a signal has called meanwhile
            self._put_back()
            raise

    def _put_back(self) -> None:
        self._over = True  # handlers that another signal leaves do what the older ones do
        for number, older in self._older.items():
            _set_handler(number, older)

    def _received(self, number: int, frame: FrameType | None) -> None:
        older = self._older[number]
        if not self._over:
            self._handle(number, frame)
        elif callable(older):
            older(number, frame)
        else:
            _set_handler(number, older)
            signal.raise_signal(number)

    @abstractmethod
    def _replaced(self) -> list[tuple[int, Any]]:
        """Return the signals whose handlers the context replaces, with the handlers."""

    @abstractmethod
    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the context."""


class DeferredSignals(_Handling):
    """A context in which the first signal that ends the program waits for the end of the context.

    A second signal has its usual effect at once. Signals that the program ignores stay ignored. If
    an error ends the context, the signal follows it. Without ``active`` the context has no effect.
    ``received`` is the number of the signal that waits, or None.
    """

    def __init__(self, active: bool = True) -> None:
        super().__init__(SIGNALS if active else ())
        self.received: int | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        if self.received is not None:
            signal.raise_signal(self.received)

    def _replaced(self) -> list[tuple[int, Any]]:
        unchanged = {signal.SIG_IGN, None}
        return [(n, older) for n in self._numbers if (older := _handler_of(n)) not in unchanged]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            return
        self._restore()
        self.received = None
        signal.raise_signal(number)


class HeldInterrupts(_Handling):
    """A context at whose end the exception of a signal handler is raised.

    Ctrl-C raises ``KeyboardInterrupt`` between any two instructions, also between two changes that
    belong together. In the context, handlers of Python run at once, but the first exception that
    one of them raises waits for the end of the context. A second one is raised at once: it ends
    changes that take too long, and only a part of them may then be done. A context in such a
    context has no effect.
    """

    def __init__(self) -> None:
        around = getattr(_handler_of(signal.SIGINT), "__self__", None)
        nested = type(around) is HeldInterrupts and not around._over
        super().__init__(() if nested else _ALL)
        self._held: BaseException | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        if self._held is not None and error is not self._held:
            raise self._held

    def _replaced(self) -> list[tuple[int, Any]]:
        return [(n, older) for n in self._numbers if callable(older := _handler_of(n))]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._older[number](number, frame)
        except BaseException as error:
            if self._held is not None:
                raise
            self._held = error
