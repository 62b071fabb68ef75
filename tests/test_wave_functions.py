"""Natural gradients of the energy of a wave function, whose Fisher matrix is centred."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

N = 40
DAMPING = 1e-3
# The brute force is right to 1e-10, and matrices with this damping have a condition below 1e4.
EXACT = 1e-6


@pytest.fixture(scope="module")
def wave():
    """A network for log ψ, walkers, local energies, and the slopes of log ψ by brute force."""
    model, rng = models.mlp((2, 4, 1), dtype="float64"), np.random.default_rng(0)
    x, energies = rng.standard_normal((N, 2)), rng.standard_normal((N, 1))
    names = ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]
    slopes = oracle.jacobian(model, {"input": x}, "output", names)[:, 0, 0]
    return model, x, energies, slopes, oracle.parameter_slices(model, names)


def engine_of(model, **options):
    return ke.Engine.from_onnx(model, loss=ke.Normal(var=1), **options)


def targets_of(engine, x, energies):
    return engine.predict(x) - 2 * (energies - energies.mean())


def flat(arrays, places):
    return np.concatenate([arrays[name].ravel() for name in places])


def test_targets_give_the_gradient_of_the_mean_energy(wave):
    model, x, energies, slopes, places = wave
    engine = engine_of(model)
    found = engine.gradients(x, targets_of(engine, x, energies)).gradients
    covariances = np.cov(slopes.T, energies[:, 0], bias=True)[:-1, -1]
    np.testing.assert_allclose(flat(found, places), 2 * covariances, rtol=EXACT, atol=1e-9)


def test_output_with_a_bias_centres_the_fisher_matrix(wave):
    model, x, energies, slopes, places = wave
    engine = engine_of(model)
    gradient = flat(engine.gradients(x, targets_of(engine, x, energies)).gradients, places)
    products = engine.curvature_products(engine.trace(x))
    rows = []
    for unit in np.eye(len(gradient)):
        vector = {
            name: unit[place].reshape(engine.parameters[name].shape)
            for name, place in places.items()
        }
        rows.append(flat(products.multiply_fisher(vector), places))
    others = slice(0, -1)  # the bias of the output is the last entry
    assert places["fc1.bias"] == slice(len(gradient) - 1, len(gradient))
    damping = DAMPING * np.eye(len(gradient))
    damping[-1, -1] = 0  # of the bias, whose curvature is 1
    centred = np.cov(slopes[:, others].T, bias=True) + damping[others, others]
    expected = np.linalg.solve(centred, gradient[others])
    found = np.linalg.solve(np.array(rows) + damping, gradient)
    np.testing.assert_allclose(found[others], expected, rtol=EXACT, atol=EXACT)
    uncentred = slopes[:, others].T @ slopes[:, others] / N + damping[others, others]
    assert abs(np.linalg.solve(uncentred, gradient[others]) - expected).max() > 0.1
    # The bias keeps the mean of log ψ, as a first-order change.
    assert slopes.mean(axis=0) @ found == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("damping", [1e-2, 1e-8])
def test_a_gauss_newton_step_is_centred(wave, damping):
    model, x, energies, slopes, places = wave
    engine = engine_of(model)
    names, before = list(places), {n: v.copy() for n, v in engine.parameters.items()}
    optimizer = ke.GaussNewton(engine, 0.1, damping, momentum=0.0, adapt_damping=False)
    optimizer.step(x, targets_of(engine, x, energies))
    found = flat(before, names) - flat(engine.parameters, names)
    weights, mean = slopes[:, :-1], slopes[:, :-1].mean(axis=0)
    gradient = 2 * np.cov(weights.T, energies[:, 0], bias=True)[:-1, -1]
    # The damping of the bias, whose curvature is 1, leaves a small part of the mean.
    fisher = np.cov(weights.T, bias=True) + damping / (1 + damping) * np.outer(mean, mean)
    expected = 0.1 * np.linalg.solve(fisher + damping * np.eye(len(gradient)), gradient)
    np.testing.assert_allclose(found[:-1], expected, rtol=EXACT, atol=EXACT)


def test_block_of_the_last_layer_is_centred(wave):
    model, x, energies, slopes, places = wave
    engine = engine_of(model, estimation_mode="exact", damping=1e-22)  # 1e-11 in each factor
    result = engine.step(x, targets_of(engine, x, energies))
    weight = slopes[:, places["fc1.weight"]]
    gradient = result.gradients["fc1.weight"].ravel()
    expected = np.linalg.solve(np.cov(weight.T, bias=True), gradient)
    found = result.natural_gradients["fc1.weight"].ravel()
    np.testing.assert_allclose(found, expected, rtol=EXACT, atol=EXACT)
