"""Random data of the jobs, equal in every process."""

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.jobs import DAMPING

# Number of examples of the factors that precondition.
_EXAMPLES = 8


def normal(*shape: int, seed: int = 0) -> Array:
    """Return standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def zeros(*shape: int) -> Array:
    """Return zeros whose memory is allocated at once, so that the first run does not count it."""
    return np.full(shape, 0.0, np.float32)


def factor(d: int, seed: int = 0) -> Array:
    """Return a second moment of full rank: the mean of ``2d`` outer products, condition near 30."""
    rows = normal(2 * d, d, seed=seed)
    moment: Array = rows.T @ rows / np.float32(len(rows))
    return moment


def batch(d_in: int, d_out: int) -> tuple[Array, Array]:
    """Return inputs of a dense layer, ``(8, d_in)``, and output gradients, ``(8, d_out)``."""
    return normal(_EXAMPLES, d_in), normal(_EXAMPLES, d_out, seed=1)


def gradients(d_in: int, d_out: int, count: int) -> list[Array]:
    """Return the gradients of ``count`` layers of equal sizes."""
    return [normal(d_in, d_out, seed=2 + i) for i in range(count)]


def layers(sizes: tuple[tuple[int, int, int], ...]) -> list[tuple[Array, Array, Array]]:
    """Return ``A⁻¹``, ``G⁻¹`` and ``V`` of each layer; equal layers have the same ``batch``.

    The damping is split as Martens & Grosse 2015, section 6.3, say.
    """
    triples = []
    for d_in, d_out, count in sizes:
        a, ds = batch(d_in, d_out)
        pi = np.sqrt(np.mean(a.astype(float) ** 2) / np.mean(ds.astype(float) ** 2))
        A = _damped_inverse(a, np.sqrt(DAMPING) * pi)
        G = _damped_inverse(ds, np.sqrt(DAMPING) / pi)
        triples += [(A, G, V) for V in gradients(d_in, d_out, count)]
    return triples


def _damped_inverse(rows: Array, damping: float) -> Array:
    """Return ``(rowsᵀ rows / n + damping·I)⁻¹`` by Woodbury's identity."""
    X = rows.astype(np.float64)
    n, d = X.shape
    small = np.linalg.solve(n * damping * np.eye(n) + X @ X.T, X)
    inverse = np.eye(d) - X.T @ small
    return (inverse / damping).astype(np.float32)
