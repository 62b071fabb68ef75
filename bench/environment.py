"""Processes with the same number of threads for every contender.

Libraries read these variables when they are loaded: they are set before a process starts. Libraries
that count cores instead find as many cores as threads.

    python -m kfac_engine.bench.environment memory step_peak '["mlp", 512, "exact"]'

calls a function of a module with arguments in JSON, and prints what it returns.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

from kfac_engine.errors import BackendError, InputError
from kfac_engine.system.memory_limits import usable_cores

# OpenMP (PyTorch), OpenBLAS (NumPy, SciPy and this package), MKL, and the pools of XLA (JAX).
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
_XLA, _XLA_ALONE = "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false"


def checked_threads(threads: int | None) -> int:
    """Return the requested number of threads, or the number of usable cores.

    ``InputError`` is raised for more: times of threads that share a core mean nothing.
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


def answer_of(module: str, function: str, *arguments: object, threads: int | None = None) -> Any:
    """Return what a function of a module of this package returns, in a process of its own.

    Arguments and result are values of JSON; a dataclass becomes a dictionary. The process has as
    many cores as threads; None for the cores and threads of this process.
    """
    words = [module, function, json.dumps(arguments)]
    done = subprocess.run(
        [sys.executable, "-m", "kfac_engine.bench.environment", *words, str(threads or "")],
        capture_output=True, text=True, check=False,
        env=None if threads is None else environment(threads),
    )  # fmt: skip
    if done.returncode:
        raise BackendError(f"bench.{' '.join(words)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def keep_to_cores(threads: int, first: int = 0) -> None:
    """Restrict this process to some of its cores, if the system supports it.

    The position of the first core wraps around at the number of cores.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(threads)})


def _call(module: str, function: str, arguments: str, threads: str = "") -> None:
    if threads:
        keep_to_cores(int(threads))
    called: Callable[..., Any] = getattr(import_module(f"kfac_engine.bench.{module}"), function)
    print(json.dumps(called(*json.loads(arguments)), default=asdict))


if __name__ == "__main__":
    _call(*sys.argv[1:])
