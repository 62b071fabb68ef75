"""Data of the jobs: every process makes the same."""

import numpy as np

from kfac_engine._types import Array


def normal(*shape: int, seed: int = 0) -> Array:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def factor(d: int, seed: int = 0) -> Array:
    """A second moment of full rank: the mean of ``2d`` outer products, with condition near 30."""
    rows = normal(2 * d, d, seed=seed)
    moment: Array = rows.T @ rows / np.float32(len(rows))
    return moment


def layers(sizes: tuple[tuple[int, int, int], ...]) -> list[tuple[Array, Array, Array]]:
    """``A``, ``G`` and ``V`` of each layer; layers of equal sizes share factors, not gradients."""
    made = []
    for d_in, d_out, count in sizes:
        A, G = normal(d_in, d_in) / d_in, normal(d_out, d_out, seed=1) / d_out
        made += [(A, G, normal(d_in, d_out, seed=2 + i)) for i in range(count)]
    return made
