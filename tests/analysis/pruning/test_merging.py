"""Merged parameters are the means of the models, weighted entry by entry."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.analysis.pruning.linear import linear_curvature, linear_model, vector

# float64 means.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(scope="module")
def models():
    """Curvatures, weights as vectors, and dense matrices of two models."""
    return [linear_curvature(seed) for seed in (0, 1)]


@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_merge_weights_each_entry_by_its_curvature(models, weights):
    (first, a, F), (second, b, G) = models
    u, v = weights or (1.0, 1.0)
    diagonal, other = u * np.diag(F), v * np.diag(G)
    merged = ke.merge([first.parameters, second.model], [first, second], weights)
    expected = (diagonal * a + other * b) / (diagonal + other)
    np.testing.assert_allclose(vector(merged), expected, **CLOSE)


def test_entry_without_curvature_is_the_plain_mean():
    curvatures = []
    for seed in (0, 1):
        # The first input is always zero: its weights have no curvature.
        x = np.random.default_rng(seed).normal(size=(20, 4)) * [0, 1, 1, 1]
        model, _ = linear_model(seed)
        curvatures.append(ke.curvature(model, ({"x": x}, None), loss="categorical"))
    merged = vector(ke.merge([c.model for c in curvatures], curvatures))
    mean = np.mean([vector(c.parameters) for c in curvatures], axis=0)
    np.testing.assert_allclose(merged[:3], mean[:3], **CLOSE)
    assert not np.allclose(merged[3:12], mean[3:12])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, c: ([a], [c], None), "two or more models"),
        (lambda a, b, c: ([a, b], [c], None), "got 2 models and 1 curvatures"),
        (lambda a, b, c: ([a, b], [c, "kron"], None), r"merge needs .*\.curvature, got str"),
        (lambda a, b, c: ([a, b], [c, c], [1.0]), "1 weights are given for 2 models"),
        (lambda a, b, c: ([a, b], [c, c], [1.0, 0.0]), "weights must be positive"),
        (lambda a, b, c: ([a, {"W": b["W"]}], [c, c], None), "model 2 .* differ in .* b"),
        (lambda a, b, c: ([a, b | {"b": np.ones(4)}], [c, c], None), "'b' of model 2 has shape"),
        (lambda a, b, c: ([a, b | {"b": np.full(3, np.nan)}], [c, c], None), "NaN or infinity"),
    ],
)
def test_wrong_models_are_refused(models, change, message):
    (first, _, _), (second, _, _) = models
    arguments = change(first.parameters, second.parameters, first)
    with pytest.raises(ke.KfacError, match=message):
        ke.merge(*arguments)
