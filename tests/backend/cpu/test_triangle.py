"""Matrices go to float64 and back unchanged, by their lower triangles alone."""

import numpy as np
import pytest

from kfac_engine.backend.cpu import inverse
from kfac_engine.backend.threads import Workers

SIDES = [1, 127, 128, 129, 700]
WORKERS = {"alone": Workers(1), "three": Workers(3)}


def symmetric(side, dtype):
    matrix = np.random.default_rng(side).standard_normal((side, side)).astype(dtype)
    return matrix + matrix.T


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
def test_symmetric_from_tril_restores_matrix(side, dtype, workers):
    matrix, work = symmetric(side, dtype), inverse.empty_float64(side)
    inverse.tril_to_float64(np.where(np.tri(side, dtype=bool), matrix, np.nan), work, workers)
    work[np.triu_indices(side, 1)] = np.nan
    found = inverse.symmetric_from_tril(work, np.dtype(dtype), workers)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, matrix, strict=True)


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("side", SIDES)
def test_tril_to_float64_returns_squared_norm(side, workers):
    matrix = symmetric(side, np.float32)
    squares = inverse.tril_to_float64(matrix, inverse.empty_float64(side), workers)
    # Sums of up to half a million squares, in whatever order.
    assert squares == pytest.approx(np.linalg.norm(matrix.astype(np.float64)) ** 2, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (599, 0), (599, 599), (300, 299)])
def test_tril_to_float64_returns_nonfinite_norm_for_nonfinite_entry(place, bad):
    matrix = symmetric(600, np.float32)
    matrix[place] = bad
    squares = inverse.tril_to_float64(matrix, inverse.empty_float64(600), Workers(2))
    assert not np.isfinite(squares)
