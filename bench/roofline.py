"""Best rates of this machine, measured: matrix products and memory copies.

The measurement runs in a process of its own, whose BLAS loads with this number of threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kfac_engine.bench.environment import answer_of

_SIDE = 2048
_BYTES = 256 << 20
_ROUNDS = 5
# Below this share of the best rate, the machine counts as slower than at its best.
_SLOWED = 0.8


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best rates of a few runs: multiplications and copied bytes a second.

    The multiplications are in a product of two square float32 matrices by NumPy's BLAS. A byte that
    is read and written counts once.
    """

    threads: int
    multiplications: float
    copied_bytes: float

    def least_seconds(self, multiplications: float, traffic: float) -> float:
        """Return the longer of the times to multiply, and to read or write the bytes once."""
        # Every copied byte is read and written.
        return max(multiplications / self.multiplications, traffic / (2 * self.copied_bytes))

    def __str__(self) -> str:
        """Return the rates as text."""
        return (
            f"{2e-9 * self.multiplications:.0f} GFLOP/s (sgemm), "
            f"{1e-9 * self.copied_bytes:.1f} GB/s (copy)"
        )


@dataclass(frozen=True, slots=True)
class SuiteConditions:
    """Conditions of the run of a suite: the rates of a virtual machine change with time.

    ``best`` has the best rates so far, ``missing`` the jobs that could not be measured.
    """

    seconds: float
    before: Roofline
    after: Roofline
    best: Roofline
    missing: tuple[str, ...] = ()

    @property
    def slowed(self) -> bool:
        """Whether the machine multiplied more slowly before or after the suite than at its best."""
        least = min(self.before.multiplications, self.after.multiplications)
        return least < _SLOWED * self.best.multiplications


def higher(one: Roofline, other: Roofline) -> Roofline:
    """Return the better rates of two measurements with the same number of threads."""
    return Roofline(
        one.threads,
        max(one.multiplications, other.multiplications),
        max(one.copied_bytes, other.copied_bytes),
    )


def ceilings(threads: int) -> list[Roofline]:
    """Measure the rates of 1, 2, 4, … threads, the largest number last, in a process each."""
    counts = [*(2**k for k in range(threads.bit_length()) if 2**k < threads), threads]
    return [ceiling(count) for count in counts]


def ceiling(threads: int) -> Roofline:
    """Measure the rates of a number of threads, in a process of its own."""
    return Roofline(**answer_of("roofline", "measure_ceiling", threads, threads=threads))


def measure_ceiling(threads: int, side: int = _SIDE, nbytes: int = _BYTES) -> Roofline:
    """Measure the rates in this process; BLAS uses the threads that it was loaded with."""
    a, b, c = (np.ones((side, side), np.float32) for _ in range(3))
    product = min(_seconds(lambda: np.matmul(a, b, out=c)) for _ in range(_ROUNDS))
    sources = np.array_split(np.ones(nbytes, np.uint8), threads)
    targets = np.array_split(np.ones(nbytes, np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:
        copy = min(
            _seconds(lambda: list(pool.map(np.copyto, targets, sources))) for _ in range(_ROUNDS)
        )
    return Roofline(threads, float(side) ** 3 / product, nbytes / copy)


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
