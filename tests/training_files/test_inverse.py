"""Inverses by halves against those in double precision, at the conditions that damping allows."""

import numpy as np
import pytest

from kfac_engine.training_files.curvature import damped_inverses

ROOT = 0.1**0.5  # of the default relative damping


def matrix(eigenvalues, rng):
    d = len(eigenvalues)
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    product = (basis * eigenvalues) @ basis.T
    return ((product + product.T) / 2).astype(np.float32)


SPECTRA = {
    "one large": lambda d: np.r_[1.0, np.full(d - 1, 1e-9)],  # the largest condition number
    "two large": lambda d: np.r_[1.0, 1.0, np.full(d - 2, 1e-9)],
    "logarithmic": lambda d: np.logspace(0, -6, d),
    "equal": np.ones,
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("d", [3, 64, 100, 101, 145, 257, 385])
def test_residuals_are_small(d, spectrum):
    rng = np.random.default_rng(d)
    stack = np.stack([matrix(SPECTRA[spectrum](d), rng) * scale for scale in (1e-4, 1e3)])
    traces = np.trace(stack, axis1=1, axis2=2)[:, None, None]
    levels = (ROOT * traces / d).astype(np.float32)
    found = damped_inverses(stack, levels, traces + levels, ROOT / (d + ROOT))
    assert found.dtype == np.float32
    damped = stack.astype(np.float64) + levels * np.eye(d)
    residuals = np.linalg.norm(damped @ found - np.eye(d), axis=(1, 2)) / np.sqrt(d)
    assert (residuals < 2e-3).all()
    condition = np.linalg.cond(damped[0])
    assert condition < d / ROOT + 1.1
    assert spectrum != "one large" or condition > 0.9 * d / ROOT


ROWS = {
    "mean": lambda d, rng: 1 / (1 + np.exp(-0.3 * rng.standard_normal((64, d)))),
    "one row": lambda d, rng: 1e-6 * rng.standard_normal((1, d)),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("d", [1, 2, 60, 150, 294])
def test_one_large_eigenvalue_costs_no_digits(d, kind):
    """Its eigenvector has the smallest product with the inverse; LAPACK's float32 has 2e-5."""
    rng = np.random.default_rng(d)
    rows = ROWS[kind](d, rng)
    A = (rows.T @ rows / len(rows)).astype(np.float32)
    level = np.full((1, 1, 1), ROOT * np.trace(A) / d, np.float32)
    found = damped_inverses(A[None], level, np.trace(A) + level, float(ROOT / (d + ROOT)))[0]
    truth = np.linalg.inv(A.astype(np.float64) + level[0] * np.eye(d))
    mean = np.linalg.eigh(A.astype(np.float64))[1][:, -1]
    assert np.linalg.norm((found - truth) @ mean) < 3e-4 * np.linalg.norm(truth @ mean)
    np.testing.assert_allclose(found, truth, atol=1e-5 * np.abs(truth).max())


def test_inverses_are_symmetric():
    stack = matrix(np.logspace(0, -3, 130), np.random.default_rng(0))[None]
    traces = np.trace(stack, axis1=1, axis2=2)[:, None, None]
    found = damped_inverses(stack, 0.01 * traces, 1.01 * traces, 0.01)
    np.testing.assert_allclose(found, found.swapaxes(1, 2), atol=1e-4 * abs(found).max())


def test_a_bound_that_does_not_hold_gives_no_inverse():
    """The residual tells an inverse from another matrix."""
    d = 64
    stack = matrix(np.logspace(0, -5, d), np.random.default_rng(0))[None]
    norms, level = np.ones((1, 1, 1), np.float32), np.full((1, 1, 1), 1e-5, np.float32)
    found = damped_inverses(stack, level, norms, 0.5)
    residual = np.linalg.norm(stack[0] @ found[0] - np.eye(d)) / np.sqrt(d)
    assert residual > 2e-3
