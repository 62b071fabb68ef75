"""What parts of a step take: wall time, and memory beyond what the process held."""

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
    """Measures stages, or does nothing: ``with recorder("forward"): …``.

    Args:
        active: Whether it measures.

    Attributes:
        stages: In the order in which they ended; a name that comes again is summed up.
    """

    def __init__(self, active: bool = False) -> None:
        self._active = active
        self._found: dict[str, Stage] = {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._found.values())

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context whose time and memory count as those of the stage."""
        return self._measured(name) if self._active else nullcontext()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        held = resident_bytes()
        forget_peak()
        start = perf_counter()
        yield
        seconds, more = perf_counter() - start, max(0, peak_bytes() - held)
        before = self._found.get(name, Stage(name, 0.0, 0))
        self._found[name] = Stage(name, before.seconds + seconds, max(before.nbytes, more))


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not tell."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most it has held since ``forget_peak``; 0 where the system does not tell."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let ``peak_bytes`` start anew, where the system can."""
    if os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text(_FORGET_PEAK, encoding="ascii")


def _status(field: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.is_file() else []
    values = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(next(values, 0)) * 1024
