"""Contexts with other handlers of signals: the only place that sets handlers."""

import signal
from collections.abc import Callable, Sequence
from itertools import compress
from threading import current_thread, main_thread
from types import FrameType
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


class Handling:
    """A context with other handlers of signals: ``handler``, or the method of a subclass.

    The context has no effect outside the main thread, where Python receives no signals. Signals
    that the program ignores, such as in the background of a shell, stay ignored.
    """

    # Whether only handlers of Python are replaced, not the default action of the system.
    only_python = False

    def __init__(self, numbers: Sequence[int] = SIGNALS, handler: Any = None) -> None:
        self._numbers = numbers
        self._handler = self._received if handler is None else handler
        self._older: dict[int, Any] = {}
        self._over = False

    def __enter__(self) -> Self:
        if self._numbers and current_thread() is main_thread():
            try:
                # In C, because most of the 64 signals have no handler of Python.
                handled = compress(self._numbers, map(callable, map(_handler_of, self._numbers)))
                for number in handled if self.only_python else self._numbers:
                    older = _handler_of(number)
                    if callable(older) or (not self.only_python and older == signal.SIG_DFL):
                        self._older[number] = older
                        _set_handler(number, self._handler)
            except BaseException:  # a signal that is not replaced yet
                self._restore()
                raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._restore()

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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the context."""
        raise NotImplementedError


class DeferredSignals(Handling):
    """A context in which the first signal that ends the program waits for the end of the context.

    A second signal has its usual effect at once. If an error ends the context, the signal follows
    it. Without ``active`` the context has no effect. ``received`` is the number of the signal that
    waits, or None.
    """

    def __init__(self, active: bool = True) -> None:
        super().__init__(SIGNALS if active else ())
        self.received: int | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._restore()
        if self.received is not None:
            signal.raise_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            return
        self._restore()
        self.received = None
        signal.raise_signal(number)


class HeldInterrupts(Handling):
    """A context that raises the exception of a signal handler at its end.

    Ctrl-C raises ``KeyboardInterrupt`` between any two instructions, also between two changes that
    belong together. In the context, Python's handlers run at once, but the first exception of a
    handler waits for the end of the context. The second exception is raised at once, so that a user
    can end changes that take too long; these may then be incomplete. A nested context has no
    effect.
    """

    only_python = True

    def __init__(self) -> None:
        around = getattr(_handler_of(signal.SIGINT), "__self__", None)
        nested = type(around) is HeldInterrupts and not around._over
        super().__init__(() if nested else _ALL)
        self._held: BaseException | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._restore()
        if self._held is not None and error is not self._held:
            raise self._held

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._older[number](number, frame)
        except BaseException as error:
            if self._held is not None:
                raise
            self._held = error
