"""Time and memory of runs, and the CPU time of other processes meanwhile."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes

if sys.platform != "win32":
    import resource

_STAT = Path("/proc/stat")
# Columns of /proc/stat with idle time: idle and waiting for disks.
_IDLE_COLUMNS = (3, 4)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of consecutive runs; 0 for what the system does not count.

    There are the wall time and the CPU time of each run. ``others_seconds`` is the CPU time of all
    other processes in the unit of the system, a hundredth of a second, so that single values may be
    negative. ``switches`` are involuntary context switches, ``peak_bytes`` the largest increase of
    the resident memory.
    """

    times: tuple[float, ...]
    cpu_times: tuple[float, ...]
    others_seconds: float
    switches: int
    peak_bytes: int


def used(run: Callable[[], object], runs: int = 1) -> Usage:
    """Call a function and measure its resources."""
    resident, times, cpu = resident_bytes(), [], []
    forget_peak()
    busy, switches, cpu_start = _busy_seconds(), _switches(), process_time()
    for _ in range(runs):
        start, cpu_before = perf_counter(), process_time()
        run()
        times.append(perf_counter() - start)
        cpu.append(process_time() - cpu_before)
    cpu_seconds = process_time() - cpu_start
    others = _busy_seconds() - busy - cpu_seconds if _STAT.is_file() else 0.0
    return Usage(
        times=tuple(times),
        cpu_times=tuple(cpu),
        others_seconds=others,
        switches=_switches() - switches,
        peak_bytes=max(0, peak_bytes() - resident),
    )


def _switches() -> int:
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _busy_seconds() -> float:
    """Return the CPU time of all processes since the start of the machine."""
    if not _STAT.is_file():
        return 0.0
    ticks = [int(word) for word in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    busy = sum(t for i, t in enumerate(ticks) if i not in _IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")
