"""Sums over lags against the dense sum, term by term."""

import numpy as np
import pytest

from kfac_engine.backend.select import select
from kfac_engine.curvature.linalg import lags
from kfac_engine.errors import UnsupportedError

BACKEND = select("numpy")
EXACT = 1e-11  # float64; inverse roots of condition number about a hundred
D_IN, D_OUT = 3, 2


def stationary(d, seed, size=0.8):
    """A moment and a lag moment whose whitened lag has this spectral norm."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(d, 2 * d))
    c0 = half @ half.T / (2 * d)
    psi = rng.normal(size=(d, d))
    psi *= size / np.linalg.norm(psi, 2)
    values, Q = np.linalg.eigh(c0)
    S = (Q * np.sqrt(values)) @ Q.T
    return c0, S @ psi @ S, S, psi


def sides(seed=0, size=0.8):
    found = []
    for d, s in ((D_IN, seed), (D_OUT, seed + 1)):
        c0, c1, S, psi = stationary(d, s, size)
        found.append((lags.whiten(*np.linalg.eigh(c0), c1, 0.0), S, psi))
    return found


def test_lag_weights_are_the_inverse_of_the_papers_factor():
    x, uses = np.linspace(0, 0.9, 10), 5
    factor = (1 - x) ** 2 / (uses * (1 - x**2) - 2 * x * (1 - x**uses))
    np.testing.assert_allclose(1 / lags.lag_weights(x, uses), factor, rtol=1e-12)
    assert lags.lag_weights(np.ones(1), uses) == uses**2


def test_a_sum_over_lags_that_grows_is_refused():
    (A, *_), (G, *_) = sides(seed=4, size=3.0)
    with pytest.raises(UnsupportedError, match="does not converge"):
        lags.multiply_infinite(np.ones((D_IN, D_OUT)), A, G, 2, BACKEND)


def test_a_sequence_that_repeats_itself_divides_by_one():
    """μ = 1 on both sides: the denominator 0 becomes 1, as the specification has it."""
    side = lags.whiten(np.ones(1), np.eye(1), np.ones((1, 1)), 0.0)
    infinite = lags.infinite(side, BACKEND)
    # Z − Ψ Z Ψᵀ is zero: the product is zero, not NaN.
    np.testing.assert_array_equal(lags.solve_infinite(np.ones((1, 1)), infinite, infinite, 3), 0.0)


def test_values_above_one_count_as_one():
    side = lags.whiten(np.ones(1), np.eye(1), np.full((1, 1), 1.5), 0.0)
    assert lags.infinite(side, BACKEND).values == 1.0


def test_without_damping_directions_without_moment_stay_out():
    c0, c1, *_ = stationary(2, seed=5)
    wide0, wide1 = (np.zeros((3, 3)) for _ in range(2))
    wide0[:2, :2], wide1[:2, :2] = c0, c1
    whitened = lags.whiten_undamped(*np.linalg.eigh(wide0), wide1, 1e-12)
    expected = lags.whiten(*np.linalg.eigh(c0), c1, 0.0)
    np.testing.assert_allclose(whitened.lag[:2, :2], expected.lag, atol=EXACT)
    np.testing.assert_allclose(whitened.lag[2], 0.0, atol=EXACT)
