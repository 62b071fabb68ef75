"""Processes with the same number of threads for every contender.

Libraries read these variables when they are loaded: they are set before a process starts. Libraries
that count cores instead find as many cores as threads.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from kfac_engine.backend.threads import usable_cores
from kfac_engine.errors import BackendError, InputError

# OpenMP (PyTorch), OpenBLAS (NumPy, SciPy and this package), MKL, and the pools of XLA (JAX).
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
_XLA, _XLA_ALONE = "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false"


def checked_threads(threads: int | None) -> int:
    """Return a number of threads that all contenders can use.

    Args:
        threads: Requested number; None for the number of usable cores.

    Returns:
        At least one.

    Raises:
        InputError: There are fewer cores; times of threads that share a core mean nothing.
    """
    cores = usable_cores()
    if threads is not None and not 1 <= threads <= cores:
        raise InputError(
            f"threads must lie between 1 and {cores}, the number of usable cores, got {threads}."
        )
    return threads or cores


def environment(threads: int) -> Mapping[str, str]:
    """Return the environment of this process with a number of threads for every library."""
    variables = {**os.environ, **dict.fromkeys(_VARIABLES, str(threads))}
    if threads == 1:
        variables[_XLA] = f"{variables.get(_XLA, '')} {_XLA_ALONE}".strip()
    return variables


def answer_of(module: str, *arguments: object, threads: int | None = None) -> Any:
    """Return what a module of this package prints as JSON, in a process of its own.

    Args:
        module: Name of the module.
        arguments: Arguments of its command line.
        threads: Number of threads of every library; None for those of this process.

    Returns:
        The answer.

    Raises:
        BackendError: The process failed.
    """
    words = [*map(str, arguments)]
    done = subprocess.run(
        [sys.executable, "-m", f"kfac_engine.bench.{module}", *words],
        capture_output=True, text=True, check=False,
        env=None if threads is None else environment(threads),
    )  # fmt: skip
    if done.returncode:
        raise BackendError(f"bench.{module} {' '.join(words)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def keep_to_cores(threads: int, first: int = 0) -> None:
    """Restrict this process to some of its cores, if the system supports it.

    Args:
        threads: Number of cores.
        first: Position of the first of them; it wraps around at the number of cores.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(threads)})
