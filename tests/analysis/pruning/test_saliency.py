"""Saliencies equal the rise of the quadratic model of the loss, by dense algebra."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.analysis.fisher_matrix.dense import dense, measured
from tests.analysis.pruning.linear import linear_curvature, vector

DAMPING = 0.05
# float64; the condition of the damped matrix is below 1e3.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def rise(F, step):
    return step @ F @ step / 2


def test_brain_damage_is_the_rise_without_one_weight():
    curvature, theta, F = linear_curvature()
    scores = vector(ke.saliency(curvature))
    steps = np.diag(-theta)
    np.testing.assert_allclose(scores, [rise(F, step) for step in steps], **CLOSE)


def test_brain_surgeon_is_the_least_rise_without_one_weight():
    curvature, theta, F = linear_curvature()
    scores = vector(ke.saliency(curvature, "obs", damping=DAMPING))
    damped = F + DAMPING * np.eye(len(F))
    for i, score in enumerate(scores):
        others = np.arange(len(F)) != i
        step = np.zeros(len(F))
        step[i] = -theta[i]
        step[others] = np.linalg.solve(damped[np.ix_(others, others)], damped[others, i] * theta[i])
        np.testing.assert_allclose(score, rise(damped, step), **CLOSE)
    assert np.all(scores < vector(ke.saliency(curvature, damping=DAMPING)))


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac"])
@pytest.mark.parametrize("blocks", ["measured", "layer"])
def test_weights_of_the_same_layer_or_block_make_up_for_a_zero(structure, blocks):
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=9)
    curvature = measured(model, (inputs, None), structure=structure)
    damped = dense(curvature, damping=DAMPING)
    theta = np.concatenate([array.ravel() for array in curvature.parameters.values()])
    layer = np.concatenate(
        [np.full(a.size, name.split(".")[0]) for name, a in curvature.parameters.items()]
    )
    if blocks == "layer":
        damped = np.where(layer[:, None] == layer, damped, 0.0)
    expected = theta**2 / (2 * np.diag(np.linalg.inv(damped)))
    found = ke.saliency(curvature, "obs", damping=DAMPING, blocks=blocks)
    found = np.concatenate([array.ravel() for array in found.values()])
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)
    if structure == "full":  # weights of the other layers make up for a part
        other = ke.saliency(curvature, "obs", DAMPING, blocks="layer")
        every = ke.saliency(curvature, "obs", DAMPING)
        assert all(np.all(other[n] >= every[n] * (1 - 1e-9)) for n in every)
        assert any(np.any(other[n] > every[n] * 1.01) for n in every)


def test_magnitude_ignores_the_curvature():
    curvature, theta, _ = linear_curvature()
    np.testing.assert_array_equal(vector(ke.saliency(curvature, "magnitude")), theta**2 / 2)
