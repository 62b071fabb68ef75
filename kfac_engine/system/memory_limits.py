"""Determines the memory and cores that machine, container and process limits allow."""

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kfac_engine.errors import MemoryLimitError

if sys.platform != "win32":
    import resource

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# The files with the limit and the use of a control group, and the prefix of the statistics that
# include nested groups.
_VERSION_2 = ("memory.max", "memory.current", "")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
# Statistics of cached files, which the kernel drops if memory is short. ``MemAvailable`` counts
# both.
_RECLAIMABLE = ("inactive_file", "active_file")
# Address space that a small model needs after the libraries are loaded, measured with one core and
# with two. More cores need more.
_ROOM_OF_ONE_CORE, _ROOM = 128 << 20, 384 << 20


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping.

    Without ``/proc/meminfo`` this is the physical memory of the machine.
    """
    return max(0, min(_of_the_machine(), *_of_control_groups(), *_of_the_process(), sys.maxsize))


def require_memory(need: float, what: str, cure: str) -> None:
    """Raise ``MemoryLimitError`` if ``need`` bytes are not available, before they are allocated.

    ``what`` needs them, as the subject of a sentence; ``cure`` says what to do.
    """
    free = available_memory()
    if need > free:
        raise MemoryLimitError(
            f"{what} needs {spelled(need)} and {spelled(free)} are free; {cure}."
        )


def spelled(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def return_freed_memory() -> None:
    """Return freed memory of the heap to the system, where the C library can (glibc).

    It keeps pages between blocks that are in use: 70 MB after an engine for a DistilBERT is built.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def require_room_for_threads() -> None:
    """Raise ``MemoryLimitError`` if ``ulimit -v`` leaves too little address space for threads.

    Without that memory OpenBLAS and ONNX Runtime end the process or wait forever. Success is
    remembered, because threads are created once.
    """
    need = _ROOM_OF_ONE_CORE if usable_cores() == 1 else _ROOM
    left = next(_of_the_process(), need)
    if left < need:
        raise MemoryLimitError(
            f"the limit of the address space (ulimit -v) leaves {max(0, left) / 1e6:.0f} MB, but "
            f"the threads of BLAS and ONNX Runtime reserve {need / 1e6:.0f} MB or more; raise the "
            f"limit."
        )


def _of_the_machine() -> int:
    free = _fields(_PROC / "meminfo").get("MemAvailable")
    if free is not None:
        return free * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def _of_control_groups() -> Iterator[int]:
    """Yield the free bytes of the control group of this process, and of its parent groups."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _CGROUPS, _VERSION_2
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", _VERSION_1
        else:
            continue
        # A container may see its own group as the root, although the path names it.
        group = root / path.strip("/")
        for folder in dict.fromkeys((group, *group.parents, root)):
            if folder.is_relative_to(root):
                yield from _left(folder, *names)


def _left(group: Path, limit: str, use: str, prefix: str) -> Iterator[int]:
    most, used = _text(group / limit).strip(), _text(group / use).strip()
    if most.isdigit() and used.isdigit():  # "max" is not a limit
        statistics = _fields(group / "memory.stat")
        reclaimable = sum(statistics.get(prefix + name, 0) for name in _RECLAIMABLE)
        yield int(most) - int(used) + reclaimable


def _of_the_process() -> Iterator[int]:
    """Yield the bytes below the limits of this process, ``ulimit -v`` and ``ulimit -d``."""
    if sys.platform == "win32":
        return
    status = _fields(_PROC / "self/status")
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        unlimited = most == resource.RLIM_INFINITY
        yield sys.maxsize if unlimited else most - status.get(field, 0) * 1024


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines ``MemFree:  123 kB`` or ``inactive_file 123``."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}


def _text(path: Path) -> str:
    """Return the text of a system file; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
