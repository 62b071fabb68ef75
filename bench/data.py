"""Data of the jobs: every process makes the same."""

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.jobs import DAMPING

# Examples behind the factors of layers that are preconditioned.
_EXAMPLES = 8


def normal(*shape: int, seed: int = 0) -> Array:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def zeros(*shape: int) -> Array:
    """Zeros whose memory is taken at once, so that it does not count as that of the first run."""
    return np.full(shape, 0.0, np.float32)


def factor(d: int, seed: int = 0) -> Array:
    """A second moment of full rank: the mean of ``2d`` outer products, with condition near 30."""
    rows = normal(2 * d, d, seed=seed)
    moment: Array = rows.T @ rows / np.float32(len(rows))
    return moment


def batch(d_in: int, d_out: int) -> tuple[Array, Array]:
    """Inputs of a dense layer, ``(8, d_in)``, and gradients of its outputs, ``(8, d_out)``."""
    return normal(_EXAMPLES, d_in), normal(_EXAMPLES, d_out, seed=1)


def gradients(d_in: int, d_out: int, count: int) -> list[Array]:
    """Of so many layers of equal sizes."""
    return [normal(d_in, d_out, seed=2 + i) for i in range(count)]


def layers(sizes: tuple[tuple[int, int, int], ...]) -> list[tuple[Array, Array, Array]]:
    """``A⁻¹``, ``G⁻¹`` and ``V`` of each layer; layers of equal sizes share what ``batch`` gives.

    The damping is split as Martens & Grosse 2015, section 6.3, say.
    """
    made = []
    for d_in, d_out, count in sizes:
        a, ds = batch(d_in, d_out)
        pi = np.sqrt(np.mean(a.astype(float) ** 2) / np.mean(ds.astype(float) ** 2))
        A = _damped_inverse(a, np.sqrt(DAMPING) * pi)
        G = _damped_inverse(ds, np.sqrt(DAMPING) / pi)
        made += [(A, G, V) for V in gradients(d_in, d_out, count)]
    return made


def _damped_inverse(rows: Array, damping: float) -> Array:
    """``(rowsᵀ rows / n + damping·I)⁻¹`` by Woodbury's identity."""
    X = rows.astype(np.float64)
    n, d = X.shape
    small = np.linalg.solve(n * damping * np.eye(n) + X @ X.T, X)
    inverse = np.eye(d) - X.T @ small
    return (inverse / damping).astype(np.float32)
