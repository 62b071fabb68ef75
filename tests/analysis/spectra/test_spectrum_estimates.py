"""Estimates of spectra against matrices with known eigenvalues."""

import numpy as np
import pytest
from scipy.stats import norm

import kfac_engine as ke
from tests import models, oracle

SIZE = 60


def matrix(values, seed=0):
    """A symmetric matrix with these eigenvalues."""
    Q = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values),) * 2))[0]
    return (Q * values) @ Q.T


VALUES = np.linspace(0.1, 5.0, SIZE) ** 2
A = matrix(VALUES)


def test_all_steps_give_the_exact_quadratic_form_of_each_vector():
    """With as many steps as rows, zᵀ f(A) z has no error but the rounding of the eigenvalues."""
    estimate = ke.estimate_spectrum(A, vectors=3, steps=SIZE, seed=4)
    generator = np.random.default_rng(4)
    values, vectors = np.linalg.eigh(A)
    for nodes, weights in zip(estimate.nodes, estimate.weights, strict=True):
        z = generator.choice([-1.0, 1.0], SIZE)
        for function in (np.log, np.sqrt, lambda s: 1 / (s + 0.3)):
            expected = z @ (vectors * function(values)) @ vectors.T @ z
            assert SIZE * weights @ function(nodes) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("steps", [15, SIZE])
def test_sums_over_eigenvalues_are_within_their_errors(steps):
    estimate = ke.estimate_spectrum(A, vectors=60, steps=steps, seed=1)
    expected = {
        "trace": (estimate.trace(), VALUES.sum()),
        "log determinant": (estimate.log_determinant(0.5), np.log(VALUES + 0.5).sum()),
        "dimension": (estimate.effective_dimension(0.5), (VALUES / (VALUES + 0.5)).sum()),
    }
    for result, value in expected.values():
        assert abs(result.value - value) < 4 * result.standard_error
        assert result.standard_error < 0.1 * value


def test_standard_error_is_that_of_the_mean():
    many = [ke.estimate_spectrum(A, vectors=8, steps=20, seed=s).trace() for s in range(200)]
    spread = np.std([estimate.value for estimate in many], ddof=1)
    # The standard deviation of 200 numbers has a relative error of 5 %.
    root = np.sqrt(np.mean([estimate.standard_error**2 for estimate in many]))
    assert root == pytest.approx(spread, rel=0.2)
    assert np.mean([e.value for e in many]) == pytest.approx(
        VALUES.sum(), abs=4 * spread / 200**0.5
    )


def test_density_is_that_of_the_eigenvalues():
    estimate = ke.estimate_spectrum(A, vectors=40, steps=SIZE, seed=2)
    points = np.linspace(-10, 35, 500)
    density = estimate.density(points, width=1.0)
    expected = norm.pdf(points[:, None], VALUES, 1.0).mean(axis=1)
    assert abs(density - expected).max() < 0.1 * expected.max()
    assert density.sum() * (points[1] - points[0]) == pytest.approx(1.0, abs=1e-3)


def test_bounds_of_the_spectrum_are_those_of_the_matrix():
    estimate = ke.estimate_spectrum(A, vectors=2, steps=SIZE)
    assert estimate.smallest == pytest.approx(VALUES.min(), rel=1e-8)
    assert estimate.largest == pytest.approx(VALUES.max(), rel=1e-10)


def test_few_different_eigenvalues_end_the_process_early():
    estimate = ke.estimate_spectrum(matrix(np.repeat([1.0, 4.0], 30)), vectors=2, steps=50)
    for nodes in estimate.nodes:
        np.testing.assert_allclose(nodes, [1.0, 4.0], rtol=1e-10)
    zero = ke.estimate_spectrum(np.zeros((5, 5)), vectors=1)
    assert zero.trace().value == 0.0
    assert zero.trace().standard_error == np.inf


def test_indefinite_matrix_has_no_log_determinant_without_enough_damping():
    estimate = ke.estimate_spectrum(matrix(VALUES - 1.0), steps=SIZE)
    for function in (estimate.log_determinant, estimate.effective_dimension):
        with pytest.raises(ke.InputError, match=r"eigenvalues down to -0.99.*raise the damping"):
            function(0.5)
        assert np.isfinite(function(1.5).value)


def test_hessian_of_a_network_has_negative_eigenvalues():
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=6)
    options = {"loss": "categorical", "threads": 1, "backend": "numpy"}
    data = (inputs, np.arange(6) % 3)
    hessian = ke.curvature_operator(model, data, "hessian", **options)
    dense = hessian @ np.eye(hessian.shape[0])
    estimate = ke.estimate_spectrum(hessian, vectors=20, steps=hessian.shape[0])
    values = np.linalg.eigvalsh(dense)
    assert estimate.smallest == pytest.approx(values[0], rel=1e-6)
    assert estimate.largest == pytest.approx(values[-1], rel=1e-6)
    ggn = ke.curvature_operator(model, data, **options)
    F = oracle.dense_fisher(model, inputs, "output", list(ggn.vector.shapes), "categorical")
    trace = ke.estimate_spectrum(ggn, vectors=60).trace()
    assert abs(trace.value - np.trace(F)) < 4 * trace.standard_error
