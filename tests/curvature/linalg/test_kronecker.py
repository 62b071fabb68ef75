"""Products with a symmetric matrix are sums of products."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.curvature.linalg.kronecker import symmetric_product


def room(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


# Sums of up to 300 products, of order one, in float64.
SUMS = 1e-11


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("columns", [8, 100])
@pytest.mark.parametrize("side", [5, 300])
@pytest.mark.parametrize("stack", [(), (3,)], ids=["matrix", "stack"])
def test_symmetric_products_are_sums_of_products(stack, side, columns, turned):
    matrix, x = room((*stack, side, side), 0), room((*stack, side, columns), 1)
    matrix = matrix + matrix.swapaxes(-2, -1)
    x = np.ascontiguousarray(x.swapaxes(-2, -1)).swapaxes(-2, -1) if turned else x
    product = symmetric_product(matrix, x, NumpyBackend(threads=1))
    expected = np.einsum("...ij,...jk->...ik", matrix, x)
    np.testing.assert_allclose(product, expected, atol=SUMS)
