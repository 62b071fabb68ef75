"""A small dense layer for tests of its blocks, and their dense counterparts."""

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power

import kfac_engine as ke
from tests.lifecycle import second_moment

DOUBLE = 1e-10  # relative: float64 through a condition number of a hundred
SINGLE = 1e-4  # relative: float32 products of float32 powers, the same

N, D_IN, D_OUT = 8, 4, 3
DAMPING = 0.3
PARAMS = {True: ("w", "b"), False: "w"}
SHAPES = {True: [(D_IN, D_OUT), (D_OUT,)], False: [(D_IN, D_OUT)]}

either_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def batch(seed=0, dtype=np.float64, between=(), n=N):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, *between, D_IN)) + 0.3
    ds = rng.normal(size=(n, *between, D_OUT)) * [1.0, 2.0, 0.5]
    return {"x": x.astype(dtype), "ds": ds.astype(dtype)}


def registered(bias=True, *, approx="kron", config=None, **options):
    collection = ke.LayerCollection(config=config)
    collection.register_fully_connected(PARAMS[bias], "x", "s", approx=approx, **options)
    return collection


def sides(values, bias):
    """``A`` and ``G`` of one batch, the mean over every row."""
    x, ds = values["x"], values["ds"]
    A = second_moment(x.reshape(-1, x.shape[-1]), bias)
    return A, second_moment(ds.reshape(-1, ds.shape[-1]))


def dampings(A, G, damping):
    """How a damping is split: in the ratio of the mean traces, the bias's one included."""
    pi = np.sqrt((np.trace(A) * len(G)) / (np.trace(G) * len(A)))
    return np.sqrt(damping) * pi, np.sqrt(damping) / pi


def damped(matrix, damping):
    return matrix + damping * np.eye(len(matrix))


def block_power(A, G, exp, damping=DAMPING, c=1):
    """``(c · (A + λ_A) ⊗ (G + λ_G)) ** exp`` with ``λ_A·λ_G = λ/c``, by dense powers."""
    a, g = dampings(A, G, damping / c)
    return fractional_matrix_power(c * np.kron(damped(A, a), damped(G, g)), exp)
