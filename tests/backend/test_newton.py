"""Newton's iteration gives the roots that eigenvectors give, and tells where it does not."""

import numpy as np
import pytest

from kfac_engine.backend.cuda import inverse_roots


def with_condition(decades, side=40, seed=0):
    """A matrix with eigenvalues from 1 down to ``10^-decades``, and its eigenvectors."""
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(side, side))).Q
    matrix = (Q * np.geomspace(1, 10.0**-decades, side)) @ Q.T
    return 0.5 * (matrix + matrix.T), Q


def bound(matrix):
    return abs(matrix).sum(axis=1).max(keepdims=True)


def rounding(side, decades):
    """What a product of float64 matrices loses: a sum of ``side`` terms, times the condition."""
    return side * np.finfo(np.float64).eps * 10.0**decades


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("decades", [0.1, 2, 5, 7])
@pytest.mark.parametrize("seed", range(8))
def test_newton_roots_equal_eigenvalue_roots(decades, degree, seed):
    A, Q = with_condition(decades, seed=seed)
    wanted = (Q * np.geomspace(1, 10.0**-decades, len(A)) ** (-1 / degree)) @ Q.T
    steps = inverse_roots.steps_for(float(bound(A)[0]) * 10**decades, degree)
    (found,) = inverse_roots.newton_roots(A[None], degree, bound(A), int(steps), np)
    np.testing.assert_array_equal(found, found.T)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < rounding(len(A), decades)
    # A residual takes as many products as the root has degrees, and sums side² entries of them.
    (residual,) = inverse_roots.residuals(found[None], A[None], degree, np)
    assert residual < degree * len(A) * rounding(len(A), decades)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("decades", [0.1, 2, 5, 7])
def test_residual_bounds_error_for_any_number_of_steps(decades, degree):
    for seed in range(8):
        A, Q = with_condition(decades, seed=seed)
        wanted = (Q * np.geomspace(1, 10.0**-decades, len(A)) ** (-1 / degree)) @ Q.T
        for steps in range(0, int(inverse_roots.steps_for(40 * 10**decades, degree)), 3):
            (found,) = inverse_roots.newton_roots(A[None], degree, bound(A), steps, np)
            (residual,) = inverse_roots.residuals(found[None], A[None], degree, np)
            error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            assert error < residual + rounding(len(A), decades)


def test_additional_newton_steps_do_not_change_root():
    A, _ = with_condition(4)
    few, many = (inverse_roots.newton_roots(A[None], 2, bound(A), n, np) for n in (25, 40))
    np.testing.assert_allclose(few, many, rtol=0, atol=1e-9 * abs(few).max())


def test_residual_is_large_for_few_steps_and_indefinite_matrices():
    A, Q = with_condition(6)
    few = inverse_roots.newton_roots(A[None], 2, bound(A), 12, np)
    assert inverse_roots.residuals(few, A[None], 2, np)[0] > 0.1
    indefinite = A - 2e-3 * np.outer(Q[:, -1], Q[:, -1])
    with np.errstate(over="ignore", invalid="ignore"):
        lost = inverse_roots.newton_roots(indefinite[None], 2, bound(indefinite), 30, np)
        assert not inverse_roots.residuals(lost, indefinite[None], 2, np)[0] < 0.1


def test_steps_for_singular_matrix_is_infinite():
    assert inverse_roots.steps_for(np.inf, 2) == inverse_roots.steps_for(np.nan, 2) == np.inf
    assert inverse_roots.steps_for(1e3, 2) < inverse_roots.steps_for(1e6, 2) < 30
