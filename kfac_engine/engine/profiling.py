"""Measurement of the parts of a step: wall time and increase of the resident memory."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter

from kfac_engine.engine.result import Stage

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Written to clear_refs: forget the peak of resident memory; see proc(5) of Linux.
_FORGET_PEAK = "5"


class Recorder:
    """Measures stages: ``with recorder("forward"): …``; does nothing unless it is active.

    Args:
        active: Whether it measures.
    """

    def __init__(self, active: bool = False) -> None:
        self._active = active
        self._stages: dict[str, Stage] = {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order in which they first ended; equal names are summed."""
        return tuple(self._stages.values())

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that adds its time and memory to the named stage."""
        return self._measured(name) if self._active else nullcontext()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        before = resident_bytes()
        forget_peak()
        start = perf_counter()
        yield
        seconds, increase = perf_counter() - start, max(0, peak_bytes() - before)
        stage = self._stages.get(name, Stage(name, 0.0, 0))
        self._stages[name] = Stage(name, stage.seconds + seconds, max(stage.nbytes, increase))


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
