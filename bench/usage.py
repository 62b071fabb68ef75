"""What a run used of the machine, and what others used meanwhile."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from kfac_engine.profiling import forget_peak, peak_bytes, resident_bytes

_STAT = Path("/proc/stat")
# Of a line of /proc/stat: time that nothing ran, and waiting for disks.
_IDLE_COLUMNS = (3, 4)


@dataclass(frozen=True, slots=True)
class Usage:
    """One run.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Of this process, all threads.
        others_seconds: CPU time of everything else on the machine; 0 where nobody tells.
        switches: How often this process had to yield a core.
        peak_bytes: Resident memory at its highest above that at the start; 0 where nobody tells.
    """

    seconds: float
    cpu_seconds: float
    others_seconds: float
    switches: int
    peak_bytes: int


class Meter:
    """Measures one run: ``Meter()`` before, ``usage()`` after."""

    def __init__(self) -> None:
        self._resident = resident_bytes()
        forget_peak()
        self._busy = _busy_seconds()
        self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self._cpu = process_time()
        self._start = perf_counter()

    def usage(self) -> Usage:
        """What was used since."""
        seconds, cpu = perf_counter() - self._start, process_time() - self._cpu
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self._switches
        others = max(0.0, _busy_seconds() - self._busy - cpu)
        return Usage(seconds, cpu, others, switches, max(0, peak_bytes() - self._resident))


def _busy_seconds() -> float:
    """CPU time that the whole machine has spent."""
    if not _STAT.is_file():
        return 0.0
    ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(t for i, t in enumerate(ticks) if i not in _IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")
