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


def dense_sum(seed, weights, symmetric, size=0.8):
    """``Σ_d weights[|d|] · A_d ⊗ G_d``, both signs of the lag."""
    total = 0
    (_, root_a, psi_a), (_, root_g, psi_g) = sides(seed, size)
    if symmetric:
        psi_a, psi_g = (absolute((psi + psi.T) / 2) for psi in (psi_a, psi_g))
    for d, weight in enumerate(weights):
        A = root_a @ np.linalg.matrix_power(psi_a, d) @ root_a
        G = root_g @ np.linalg.matrix_power(psi_g, d) @ root_g
        total = total + weight * np.kron(A, G)
        if d:
            total = total + weight * np.kron(A.T, G.T)
    return total


def absolute(matrix):
    values, Q = np.linalg.eigh(matrix)
    return (Q * abs(values)) @ Q.T


def as_dense(product):
    basis = np.eye(D_IN * D_OUT).reshape(-1, D_IN, D_OUT)
    return np.stack([product(V).ravel() for V in basis], axis=1)


@pytest.mark.parametrize("uses", [1, 2, 3, 7])
def test_lag_weights_are_their_sum(uses):
    x = np.array([0.0, 0.1, 0.5, 0.999999999, 1.0, 1.2])
    expected = [sum((uses - abs(d)) * v ** abs(d) for d in range(1 - uses, uses)) for v in x]
    np.testing.assert_allclose(lags.lag_weights(x, uses), expected, rtol=1e-14)


def test_lag_weights_are_the_inverse_of_the_papers_factor():
    x, uses = np.linspace(0, 0.9, 10), 5
    factor = (1 - x) ** 2 / (uses * (1 - x**2) - 2 * x * (1 - x**uses))
    np.testing.assert_allclose(1 / lags.lag_weights(x, uses), factor, rtol=1e-12)
    assert lags.lag_weights(np.ones(1), uses) == uses**2


@pytest.mark.parametrize("uses", [1, 2, 6])
def test_option_1_is_the_dense_sum_over_lags_and_its_inverse(uses):
    (A, *_), (G, *_) = sides()
    F = dense_sum(0, [uses - d for d in range(uses)], symmetric=True)
    found = as_dense(lambda V: lags.multiply_symmetric(V, A, G, uses, BACKEND))
    np.testing.assert_allclose(found, F, atol=EXACT)
    a, g = lags.symmetric(A, BACKEND), lags.symmetric(G, BACKEND)
    found = as_dense(lambda V: lags.solve_symmetric(V, a, g, uses))
    expected = np.linalg.inv(F)
    np.testing.assert_allclose(found, expected, atol=EXACT * abs(expected).max())


@pytest.mark.parametrize("uses", [1, 5])
@pytest.mark.parametrize("size", [0.3, 0.95])
def test_option_2_is_the_dense_sum_over_infinitely_many_lags_and_its_inverse(uses, size):
    (A, *_), (G, *_) = sides(seed=3, size=size)
    # 0.95² to the power 800 is 1e-36: what is left out is nothing.
    F = dense_sum(3, [uses] * 800, symmetric=False, size=size)
    found = as_dense(lambda V: lags.multiply_infinite(V, A, G, uses, BACKEND))
    np.testing.assert_allclose(found, F, atol=EXACT * abs(F).max())
    a, g = lags.infinite(A, BACKEND), lags.infinite(G, BACKEND)
    found = as_dense(lambda V: lags.solve_infinite(V, a, g, uses))
    expected = np.linalg.inv(F)
    np.testing.assert_allclose(found, expected, atol=EXACT * abs(expected).max())


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
