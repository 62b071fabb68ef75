"""Products with ``A ⊗ G`` equal products with the matrix written out entry by entry."""

import numpy as np
import pytest

from kfac_engine.backend.numpy_backend import NumpyBackend
from kfac_engine.errors import ShapeError
from kfac_engine.linalg.kronecker import kron_matvec, kronecker_product, multiply_parts

# Sums of at most 600 products of order one, in float64.
ROUNDING = 1e-11

SHAPES = {
    "square": ((3, 3), (4, 4)),
    "one_input": ((1, 1), (4, 4)),
    "one_output": ((5, 5), (1, 1)),
    "cheaper_from_the_left": ((2, 30), (20, 20)),
    "cheaper_from_the_right": ((20, 20), (2, 30)),
    "widening_both": ((7, 3), (9, 2)),
}


def room(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


def entry_by_entry(A, G):
    (m, d_in), (p, d_out) = A.shape, G.shape
    found = np.zeros((m * p, d_in * d_out))
    for i, o, j, q in np.ndindex(m, p, d_in, d_out):
        found[i * p + o, j * d_out + q] = A[i, j] * G[o, q]
    return found


@pytest.mark.parametrize(("a", "g"), SHAPES.values(), ids=SHAPES)
def test_the_product_has_its_entries_in_row_major_order(a, g):
    A, G = room(a, 0), room(g, 1)
    np.testing.assert_array_equal(kronecker_product(A, G), entry_by_entry(A, G))


@pytest.mark.parametrize(("a", "g"), SHAPES.values(), ids=SHAPES)
def test_matvec_equals_the_written_out_matrix_times_the_row_major_vector(a, g):
    A, G = room(a, 0), room(g, 1)
    V = room((a[1], g[1]), 2)
    expected = (entry_by_entry(A, G) @ V.reshape(-1)).reshape(a[0], g[0])
    np.testing.assert_allclose(kron_matvec(A, G, V), expected, atol=ROUNDING)


class Counting(np.ndarray):
    """An array that counts the multiplications of matrix products."""

    spent = 0

    def __matmul__(self, other):
        Counting.spent += self.shape[0] * self.shape[1] * other.shape[1]
        return super().__matmul__(other)


@pytest.mark.parametrize(("a", "g"), SHAPES.values(), ids=SHAPES)
def test_matvec_takes_the_cheaper_order(a, g):
    A, G, V = (room(s, 0).view(Counting) for s in (a, g, (a[1], g[1])))
    Counting.spent = 0
    kron_matvec(A, G, V)
    left = a[0] * a[1] * g[1] + a[0] * g[1] * g[0]
    right = a[1] * g[1] * g[0] + a[0] * a[1] * g[0]
    assert Counting.spent == min(left, right)


def test_single_precision_stays():
    A, G, V = (np.ones((2, 2), np.float32) for _ in range(3))
    assert kron_matvec(A, G, V).dtype == kronecker_product(A, G).dtype == np.float32


@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (3, 4, 1), (12,)])
def test_gradients_of_other_sides_are_refused(shape):
    with pytest.raises(ShapeError, match="cannot multiply a gradient"):
        kron_matvec(np.eye(3), np.eye(4), np.ones(shape))


# Two sums of up to 700 products, of order one and of order 26, in float64.
SUMS = 1e-9
# Sides above which threads share a product, and below.
SIDES = {"small": (5, 4), "shared": (700, 300), "one_input": (1, 4), "one_output": (5, 1)}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("d_in", "d_out"), SIDES.values(), ids=SIDES)
def test_products_of_parts_are_those_of_the_whole(d_in, d_out, biased, turned, threads):
    A, G, V = room((d_in, d_in), 0), room((d_out, d_out), 1), room((d_in, d_out), 2)
    weights = np.asfortranarray(V[: d_in - biased]) if turned else V[: d_in - biased]
    parts = (weights, V[-1]) if biased else (weights,)
    out = tuple(np.full_like(part, np.nan) for part in parts)
    multiply_parts(A, G, parts, out, NumpyBackend(threads=threads), scale=0.25)
    expected = 0.25 * np.einsum("ij,jk,lk->il", A, V, G, optimize=True)
    np.testing.assert_allclose(np.vstack(out), expected, atol=SUMS)


def test_parts_of_other_sides_are_refused():
    V = (np.ones((4, 3)), np.ones(3))
    with pytest.raises(ShapeError, match=r"\(5, 3\)"):
        multiply_parts(np.eye(4), np.eye(3), V, V, NumpyBackend())
