"""What this machine can do at best, measured: products of matrices and copies of memory."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

_SIDE = 2048
_BYTES = 256 << 20
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best of a few runs.

    Attributes:
        multiplications: A second, of a product of two square float32 matrices by NumPy's BLAS.
        copied_bytes: A second, read and written alike counted once.
    """

    multiplications: float
    copied_bytes: float


def measure_ceiling(side: int = _SIDE, nbytes: int = _BYTES) -> Ceiling:
    """Measure both.

    Args:
        side: Of the matrices.
        nbytes: To copy.

    Returns:
        The rates.
    """
    a, b, c = (np.ones((side, side), np.float32) for _ in range(3))
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    product = min(_seconds(lambda: np.matmul(a, b, out=c)) for _ in range(_ROUNDS))
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(_ROUNDS))
    return Ceiling(float(side) ** 3 / product, nbytes / copy)


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
