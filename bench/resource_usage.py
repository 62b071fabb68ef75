"""What runs used of the machine, and what others used meanwhile."""

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
# Of a line of /proc/stat: time that nothing ran, and waiting for disks.
_IDLE_COLUMNS = (3, 4)


@dataclass(frozen=True, slots=True)
class Usage:
    """Some runs, one right after the other.

    Attributes:
        times: Wall time of each run, in seconds.
        cpu_times: Time on processors of each run, all threads of this process together.
        others_seconds: CPU time of everything else on the machine; 0 where nobody tells. The system
            counts in hundredths of a second: it may fall below 0, so add up before you judge.
        switches: How often this process had to yield a core; 0 where unknown.
        peak_bytes: Resident memory at its highest above that at the start; 0 where nobody tells.
    """

    times: tuple[float, ...]
    cpu_times: tuple[float, ...]
    others_seconds: float
    switches: int
    peak_bytes: int


def used(run: Callable[[], object], runs: int = 1) -> Usage:
    """Run something and say what it took.

    Args:
        run: The something.
        runs: How often.

    Returns:
        What all of the runs took.
    """
    resident, times, cpu = resident_bytes(), [], []
    forget_peak()
    busy, switches, cpu_start = _busy_seconds(), _switches(), process_time()
    for _ in range(runs):
        start, cpu_before = perf_counter(), process_time()
        run()
        times.append(perf_counter() - start)
        cpu.append(process_time() - cpu_before)
    own = process_time() - cpu_start
    others = _busy_seconds() - busy - own if _STAT.is_file() else 0.0
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
    """CPU time that the whole machine has spent."""
    if not _STAT.is_file():
        return 0.0
    ticks = [int(word) for word in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    busy = sum(t for i, t in enumerate(ticks) if i not in _IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")
