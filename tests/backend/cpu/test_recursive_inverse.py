"""Inverses by halves against spectra known exactly and inverses in extended precision."""

import numpy as np
import pytest

from kfac_engine.backend.cpu import inverse, recursive_inverse
from kfac_engine.backend.threads import Workers

WORKERS = {"alone": Workers(1), "two": Workers(2), "five": Workers(5)}
EPS = np.finfo(np.float64).eps


def inverted(matrix, workers):
    """The inverse, from a matrix whose upper triangle must not be read."""
    work = inverse.empty_float64(len(matrix))
    work[...] = np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan)
    recursive_inverse.invert(work, workers)
    assert np.isnan(work[np.triu_indices(len(work), 1)]).all()
    return np.tril(work) + np.tril(work, -1).T


def with_spectrum(eigenvalues):
    side = len(eigenvalues)
    Q = np.linalg.qr(np.random.default_rng(side).standard_normal((side, side)))[0]
    return (Q * eigenvalues) @ Q.T, (Q / eigenvalues) @ Q.T


def extended_inverse(matrix):
    """By elimination in extended precision: 64 bits of mantissa where the processor has them."""
    A = matrix.astype(np.longdouble)
    for k in range(len(A)):
        pivot, row, column = A[k, k], A[k] / A[k, k], A[:, k].copy()
        A -= np.outer(column, row)
        A[k], A[:, k] = row, -column / pivot
        A[k, k] = 1 / pivot
    return A.astype(np.float64)


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("side", [1, 2, 160, 161, 255, 400, 1001])
def test_inverse_is_correct_for_all_sizes_and_threads(side, workers):
    matrix, expected = with_spectrum(np.linspace(1, 5, side))
    # A few sums of as many products as there are rows.
    assert relative_error(inverted(matrix, workers), expected) < 100 * EPS


def moment(rank):
    rows = np.random.default_rng(rank).standard_normal((rank, 300))
    return rows.T @ rows / rank


def smooth(length):
    place = np.arange(300.0)
    return np.exp(-(((place[:, None] - place) / length) ** 2))


BADLY_CONDITIONED = {
    "decades": lambda: with_spectrum(np.geomspace(1, 1e-7, 300))[0],
    "one_small_eigenvalue": lambda: with_spectrum(np.r_[1e-7, np.ones(299)])[0],
    "half_of_them_small": lambda: with_spectrum(np.r_[np.full(150, 1e-7), np.ones(150)])[0],
    "few_examples": lambda: moment(40),
    "as_many_examples_as_the_first_half": lambda: moment(152),
    "neighbours_alike": lambda: smooth(5.0),
    "all_alike": lambda: smooth(50.0),
}


@pytest.mark.rounding
@pytest.mark.skipif(np.finfo(np.longdouble).eps == EPS, reason="no extended precision here")
@pytest.mark.parametrize("name", BADLY_CONDITIONED)
def test_float32_factor_at_damping_floor_has_float32_accuracy(name):
    matrix = BADLY_CONDITIONED[name]()
    damped = matrix + np.finfo(np.float32).eps * np.linalg.norm(matrix) * np.eye(300)
    assert np.linalg.cond(damped) < 1e8
    # Rounding times condition is 1e-8.
    assert relative_error(inverted(damped, Workers(1)), extended_inverse(damped)) < 2e-8


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("place", [0, 300, 899])
def test_indefinite_matrix_raises_error_in_every_block(place, workers):
    eigenvalues = np.ones(900)
    eigenvalues[place] = -1.0
    with pytest.raises(np.linalg.LinAlgError, match="not positive"):
        inverted(np.diag(eigenvalues), workers)
