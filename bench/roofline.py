"""What this machine can do at best, measured: products of matrices and copies of memory.

    python -m kfac_engine.bench.roofline 2

Runs in a process of its own, whose BLAS was given so many threads when it was loaded.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np

from kfac_engine.bench.environment import environment, keep_to_cores
from kfac_engine.errors import BackendError

_SIDE = 2048
_BYTES = 256 << 20
_ROUNDS = 5
# Below this share of the best rate, times are not those of the machine at its best.
_SLOWED = 0.8


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best of a few runs.

    Attributes:
        threads: How many computed, and copied.
        multiplications: A second, of a product of two square float32 matrices by NumPy's BLAS.
        copied_bytes: A second, read and written alike counted once.
    """

    threads: int
    multiplications: float
    copied_bytes: float

    def least_seconds(self, multiplications: float, traffic: float) -> float:
        """The time of a job that does nothing but multiply, or nothing but move its data.

        Args:
            multiplications: In full, as the definition does them.
            traffic: Bytes that must be read or written at least once.

        Returns:
            The longer of the two; 0 for neither.
        """
        # Every copied byte is read and written.
        return max(multiplications / self.multiplications, traffic / (2 * self.copied_bytes))

    def __str__(self) -> str:
        """As it is told to people."""
        return (
            f"{2e-9 * self.multiplications:.0f} GFLOP/s (sgemm), "
            f"{1e-9 * self.copied_bytes:.1f} GB/s (copy)"
        )


@dataclass(frozen=True, slots=True)
class Course:
    """How a suite went: hosts of virtual machines give more at one time than at another.

    Attributes:
        seconds: It took.
        before: Ceiling when it began.
        after: Ceiling when it ended.
        best: Of all ceilings until then.
        missing: What could not be measured.
    """

    seconds: float
    before: Ceiling
    after: Ceiling
    best: Ceiling
    missing: tuple[str, ...] = ()

    @property
    def slowed(self) -> bool:
        """Whether the machine multiplied more slowly at one end than it has before."""
        least = min(self.before.multiplications, self.after.multiplications)
        return least < _SLOWED * self.best.multiplications


def higher(one: Ceiling, other: Ceiling) -> Ceiling:
    """The better rates of two measurements of the same threads."""
    return Ceiling(
        one.threads,
        max(one.multiplications, other.multiplications),
        max(one.copied_bytes, other.copied_bytes),
    )


def ceilings(threads: int) -> list[Ceiling]:
    """Ceilings of one thread, two, four, …, in processes of their own.

    Args:
        threads: The most, which come last.

    Returns:
        One for each count.
    """
    counts = [*(2**k for k in range(threads.bit_length()) if 2**k < threads), threads]
    return [ceiling(count) for count in counts]


def ceiling(threads: int) -> Ceiling:
    """The ceiling of so many threads, in a process of its own.

    Args:
        threads: How many.

    Returns:
        The rates.

    Raises:
        BackendError: The process failed.
    """
    command = [sys.executable, "-m", "kfac_engine.bench.roofline", str(threads)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(threads)
    )
    if done.returncode:
        raise BackendError(f"measuring the machine's ceiling failed: {done.stderr.strip()}")
    return Ceiling(**json.loads(done.stdout))


def measure_ceiling(threads: int, side: int = _SIDE, nbytes: int = _BYTES) -> Ceiling:
    """Measure both in this process.

    Args:
        threads: That copy; those of BLAS are as this process has them.
        side: Of the matrices.
        nbytes: To copy.

    Returns:
        The rates.
    """
    a, b, c = (np.ones((side, side), np.float32) for _ in range(3))
    product = min(_seconds(lambda: np.matmul(a, b, out=c)) for _ in range(_ROUNDS))
    sources = np.array_split(np.ones(nbytes, np.uint8), threads)
    targets = np.array_split(np.ones(nbytes, np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:
        copy = min(
            _seconds(lambda: list(pool.map(np.copyto, targets, sources))) for _ in range(_ROUNDS)
        )
    return Ceiling(threads, float(side) ** 3 / product, nbytes / copy)


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


if __name__ == "__main__":
    _count = int(sys.argv[1])
    keep_to_cores(_count)
    print(json.dumps(asdict(measure_ceiling(_count))))
