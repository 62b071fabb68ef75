"""The same threads for every contender: each runs in a process made for so many.

Libraries read these variables when they are loaded, so they are set before a process starts; those
that count cores instead find as many as they may have threads.
"""

import os
from collections.abc import Mapping

from kfac_engine.backend.threads import usable_cores
from kfac_engine.errors import InputError

# OpenMP (PyTorch), OpenBLAS (NumPy, SciPy; ours takes its count from there), MKL, and the pools of
# XLA (JAX).
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
_XLA, _XLA_ALONE = "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false"


def checked_threads(threads: int | None) -> int:
    """A number of threads that all contenders can have.

    Args:
        threads: What was asked for; None for one a usable core.

    Returns:
        At least one.

    Raises:
        InputError: There are fewer cores: threads that share one say nothing.
    """
    cores = usable_cores()
    if threads is not None and not 1 <= threads <= cores:
        raise InputError(
            f"threads must lie between 1 and {cores}, the cores to be used here, got {threads}."
        )
    return threads or cores


def environment(threads: int) -> Mapping[str, str]:
    """This process's environment, with so many threads in every library."""
    found = {**os.environ, **dict.fromkeys(_VARIABLES, str(threads))}
    if threads == 1:
        found[_XLA] = f"{found.get(_XLA, '')} {_XLA_ALONE}".strip()
    return found


def keep_to_cores(threads: int) -> None:
    """Have this process run on its first so many cores, where the system can say so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
