"""Measures the wall time and the added memory of each stage of a step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from kfac_engine.engine.result import Stage

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Written to clear_refs: forget the peak of resident memory; see proc(5) of Linux.
_FORGET_PEAK = "5"


class StageClock:
    """Measures the stages of a step: ``with clock("gradients"): …``.

    Args:
        memory: Whether memory is measured as well.

    Attributes:
        seconds: Wall times by stage, without the stages inside; the times of equal stages are
            added.
    """

    def __init__(self, *, memory: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._memory, self._bytes = memory, dict[str, int]()
        self._inside = 0.0  # time of the stages that have ended inside the present one

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order in which they first ended."""
        return tuple(Stage(name, s, self._bytes.get(name, 0)) for name, s in self.seconds.items())

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Return a context whose wall time is added to the stage."""
        before = resident_bytes() if self._memory else 0
        if self._memory:
            forget_peak()
        start, outer, self._inside = perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            elapsed = perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed - self._inside
            self._inside = outer + elapsed
            if self._memory:
                increase = max(0, peak_bytes() - before)
                self._bytes[stage] = max(self._bytes.get(stage, 0), increase)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident memory since ``forget_peak``; 0 if it is not reported."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Reset the maximum that ``peak_bytes`` returns, if the system supports it."""
    if os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text(_FORGET_PEAK, encoding="ascii")


def _status(field: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.is_file() else []
    values = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(next(values, 0)) * 1024
