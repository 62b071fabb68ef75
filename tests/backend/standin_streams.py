"""Streams of the stand-in for CuPy: work runs at once, but reading too early is an error.

Each piece of memory remembers which stream wrote it last, and when. Another stream may use it only
after it waited for an event recorded later, as on a device.
"""

from collections import Counter
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

COUNTS: Counter[str] = Counter()


class Event:
    """What had been done when it was recorded: stream to time."""

    def __init__(self, done: dict["Stream", int]) -> None:
        self.done = done


class Mark:
    """A time, of the host: work of the stand-in is done when it is asked for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = perf_counter()

    def synchronize(self) -> None:
        assert self.seconds


def elapsed_milliseconds(begun: Mark, ended: Mark) -> float:
    return 1e3 * (ended.seconds - begun.seconds)


class Stream:
    """A queue of work; the first one made is the current one to begin with."""

    clock = 0
    stack: ClassVar[list["Stream"]] = []

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.known: dict[Stream, int] = {}
        self.ptr = id(self)
        COUNTS["streams"] += 1

    def record(self) -> Event:
        return Event({**self.known, self: Stream.clock})

    def wait_event(self, event: Event) -> None:
        for stream, time in event.done.items():
            self.known[stream] = max(time, self.known.get(stream, 0))

    def synchronize(self) -> None:
        """Do nothing: each operation of the stand-in is complete when it returns."""

    def __enter__(self) -> "Stream":
        Stream.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert Stream.stack.pop() is self


MAIN = Stream(non_blocking=True)
Stream.stack.append(MAIN)
_WRITTEN: dict[int, tuple[Stream, int]] = {}


def current() -> Stream:
    return Stream.stack[-1]


def wrote(host: np.ndarray) -> None:
    """Note that the current stream writes this memory."""
    Stream.clock += 1
    _WRITTEN[_place(host)] = current(), Stream.clock


def reads(host: np.ndarray) -> None:
    """Check that the current stream may read this memory."""
    writer, time = _WRITTEN.get(_place(host), (current(), 0))
    known = current().known.get(writer, 0)
    assert writer is current() or known >= time, "memory of another stream is used unfinished"


def _place(host: np.ndarray) -> int:
    """Where the memory begins that an array is a view of."""
    while isinstance(host.base, np.ndarray):
        host = host.base
    address: Any = host.__array_interface__["data"][0]
    return int(address)
