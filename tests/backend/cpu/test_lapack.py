"""Triangles in place on views equal their definitions, and nothing else is touched."""

import numpy as np
import pytest

from kfac_engine.backend.cpu import blas

SIDE = 40
# Sums of 40 products of numbers of order one, of a condition below 100.
TOLERANCE = 1e-13

# Matrices (40, 40) with adjacent elements in each row.
VIEWS = {
    "whole": lambda: np.empty((SIDE, SIDE)),
    "part_of_a_wider_matrix": lambda: np.empty((60, 70))[5 : 5 + SIDE, 7 : 7 + SIDE],
}


def positive():
    rows = np.random.default_rng(0).standard_normal((3 * SIDE, SIDE))
    return rows.T @ rows / len(rows)


def lower_of(matrix):
    return np.linalg.cholesky(matrix)


DEFINITIONS = {
    "potrf": (positive, lower_of),
    "trtri": (lambda: lower_of(positive()), np.linalg.inv),
    "lauum": (lambda: lower_of(positive()), lambda lower: lower.T @ lower),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    ("routine", "make", "define"), [(n, *d) for n, d in DEFINITIONS.items()], ids=DEFINITIONS
)
def test_routines_change_only_lower_triangle(routine, make, define, view):
    out, original = view(), make()
    whole = out if out.base is None else out.base
    whole[...] = 7.0
    below = np.tril_indices(SIDE)
    out[below] = original[below]
    before = whole.copy()

    assert blas.lapack(out, routine) == 0

    np.testing.assert_allclose(np.tril(out), np.tril(define(original)), atol=TOLERANCE)
    out[below] = original[below]
    np.testing.assert_array_equal(whole, before)


def test_potrf_returns_order_of_first_nonpositive_minor():
    assert blas.lapack(np.diag([1.0, 2.0, -1.0, 3.0]), "potrf", "trtri") == 3


def test_trtri_returns_index_of_zero_on_diagonal():
    assert blas.lapack(np.diag([1.0, 0.0, 2.0]), "trtri", "lauum") == 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
def test_trmm_ignores_upper_triangle(right, transposed):
    draw = np.random.default_rng(1).standard_normal
    lower, whole = draw((9, 12))[1:7, 2:8], draw((15, 17))
    out, before = (whole[2:13, 3:9] if right else whole[2:8, 3:14]), whole.copy()
    L = np.tril(lower).T if transposed else np.tril(lower)
    expected = -0.5 * (out @ L if right else L @ out)

    blas.trmm(lower, out, right=right, transposed=transposed, alpha=-0.5)

    np.testing.assert_allclose(out, expected, atol=TOLERANCE)
    rows, columns = (slice(2, 13), slice(3, 9)) if right else (slice(2, 8), slice(3, 14))
    before[rows, columns] = out
    np.testing.assert_array_equal(whole, before)
