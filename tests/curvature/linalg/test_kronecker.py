"""Products with ``A ⊗ G`` equal ``A V G``, summed by einsum."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.curvature.linalg.kronecker import multiply_parts, symmetric_product
from kfac_engine.errors import ShapeError


def room(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


# Two sums of up to 700 products, of order one and of order 26, in float64.
SUMS = 1e-9
# Sides above which threads share a product, and below.
SIDES = {
    "small": (5, 4), "shared": (700, 300), "few_columns": (300, 8), "few_rows": (8, 300),
    "one_input": (1, 4), "one_output": (5, 1),
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("d_in", "d_out"), SIDES.values(), ids=SIDES)
def test_products_of_parts_are_those_of_the_whole(d_in, d_out, biased, turned, threads):
    A, G, V = room((d_in, d_in), 0), room((d_out, d_out), 1), room((d_in, d_out), 2)
    A, G = A + A.T, G + G.T
    weights = np.asfortranarray(V[: d_in - biased]) if turned else V[: d_in - biased]
    parts = (weights, V[-1]) if biased else (weights,)
    out = tuple(np.full_like(part, np.nan) for part in parts)
    multiply_parts(A, G, parts, out, NumpyBackend(threads=threads), scale=0.25)
    expected = 0.25 * np.einsum("ij,jk,kl->il", A, V, G, optimize=True)
    np.testing.assert_allclose(np.vstack(out), expected, atol=SUMS)


@pytest.mark.parametrize("columns", [8, 100])
@pytest.mark.parametrize("side", [5, 300])
@pytest.mark.parametrize("stack", [(), (3,)], ids=["matrix", "stack"])
def test_symmetric_products_are_sums_of_products(stack, side, columns):
    matrix, x = room((*stack, side, side), 0), room((*stack, side, columns), 1)
    matrix = matrix + matrix.swapaxes(-2, -1)
    product = symmetric_product(matrix, x, NumpyBackend(threads=1))
    expected = np.einsum("...ij,...jk->...ik", matrix, x)
    np.testing.assert_allclose(product, expected, atol=SUMS)


def test_parts_of_other_sides_are_refused():
    V = (np.ones((4, 3)), np.ones(3))
    with pytest.raises(ShapeError, match=r"\(5, 3\)"):
        multiply_parts(np.eye(4), np.eye(3), V, V, NumpyBackend())
