"""Pruned weights are zero, the choice is that of the saliencies, and other weights make up."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from tests.pruning.linear import linear_curvature, vector

DAMPING = 0.05


def zeros(parameters):
    return np.flatnonzero(vector(parameters) == 0)


@pytest.mark.parametrize("method", ["obd", "magnitude", "obs"])
def test_weights_with_the_smallest_saliencies_become_zero(method):
    curvature, _, _ = linear_curvature()
    scores = vector(ke.saliency(curvature, method, DAMPING))[:12]  # b has one axis
    pruned = ke.prune(curvature, count=5, method=method, damping=DAMPING)
    assert set(zeros(pruned)) == set(np.argsort(scores)[:5])


@pytest.mark.parametrize("method", ["obd", "magnitude"])
def test_other_weights_remain(method):
    curvature, theta, _ = linear_curvature()
    pruned = vector(ke.prune(curvature, sparsity=0.25, method=method))
    assert np.count_nonzero(pruned == 0) == 3
    np.testing.assert_array_equal(pruned[pruned != 0], theta[pruned != 0])


@pytest.mark.parametrize("count", [1, 5, 11])
def test_brain_surgeon_moves_the_other_weights_to_the_minimum(count):
    curvature, theta, F = linear_curvature()
    damped = F + DAMPING * np.eye(len(F))
    pruned = vector(ke.prune(curvature, count=count, method="obs", damping=DAMPING))
    zero = pruned == 0
    assert zero.sum() == count
    # The equations of the minimum: the gradient of the quadratic model vanishes elsewhere.
    free = ~zero
    step = np.where(zero, -theta, 0.0)
    step[free] = np.linalg.solve(
        damped[np.ix_(free, free)], damped[np.ix_(free, zero)] @ theta[zero]
    )
    # The relative residual of conjugate gradients is 1e-8, times the condition of about 50.
    np.testing.assert_allclose(pruned, theta + step, atol=1e-6)


def test_brain_surgeon_with_one_zero_is_the_formula_of_hassibi_and_stork():
    curvature, theta, F = linear_curvature()
    inverse = np.linalg.inv(F + DAMPING * np.eye(len(F)))
    pruned = vector(ke.prune(curvature, count=1, method="obs", damping=DAMPING))
    (i,) = np.flatnonzero(pruned == 0)
    np.testing.assert_allclose(pruned, theta - theta[i] / inverse[i, i] * inverse[i], atol=1e-6)


def test_pattern_keeps_two_of_four_inputs_of_each_output():
    curvature, theta, _ = linear_curvature()
    pruned = ke.prune(curvature, pattern="2:4")
    scores = ke.saliency(curvature)["W"]
    for output in range(3):
        kept = np.flatnonzero(pruned["W"][:, output])
        assert set(kept) == set(np.argsort(scores[:, output])[2:])
    np.testing.assert_array_equal(pruned["b"], theta[12:])


def test_pattern_of_a_convolution_has_channels_of_one_pixel():
    images, labels = digits()
    curvature = ke.curvature(
        demo_model("cnn"), ({"image": images[:20]}, labels[:20]), loss="categorical",
        fisher="sampled",
    )  # fmt: skip
    pruned = ke.prune(curvature, pattern="2:4", parameters=["conv2.weight"])
    filters = pruned["conv2.weight"]  # (32, 16, 3, 3)
    of_pixels = filters.transpose(0, 2, 3, 1).reshape(-1, 4)
    assert np.all(np.count_nonzero(of_pixels, axis=1) == 2)
    assert np.all(pruned["conv3.weight"])


def test_parameters_are_pruned_by_pattern_of_names():
    curvature, theta, _ = linear_curvature()
    pruned = ke.prune(curvature, count=2, parameters=["b"])
    np.testing.assert_array_equal(pruned["W"].ravel(), theta[:12])
    assert np.count_nonzero(pruned["b"] == 0) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass one of sparsity, count, pattern"),
        ({"sparsity": 0.5, "count": 3}, "pass one of"),
        ({"sparsity": 1.0}, r"sparsity must be in \[0, 1\)"),
        ({"sparsity": float("nan")}, "sparsity must be a finite number"),
        ({"count": 13}, "have 12 weights"),
        ({"count": -1}, "count must be a whole number"),
        ({"pattern": "4:2"}, "pattern must be a text such as '2:4'"),
        ({"pattern": "3:3"}, "pattern must be"),
        ({"pattern": "1:3"}, "W has 4 inputs for each output"),
        ({"count": 1, "parameters": "W"}, "parameters must be a list"),
        ({"count": 1, "parameters": ["V"]}, "no parameter matches 'V'"),
        ({"count": 1, "method": "obs"}, "damping"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    curvature, _, _ = linear_curvature()
    with pytest.raises(ke.KfacError, match=message):
        ke.prune(curvature, **options)


def test_all_weights_of_a_block_can_be_pruned():
    curvature, _, _ = linear_curvature()
    pruned = ke.prune(curvature, count=15, method="obs", damping=DAMPING, parameters=["W", "b"])
    assert not vector(pruned).any()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["obd", "obs"])
def test_pruning_by_curvature_keeps_the_accuracy_that_magnitude_loses(method, tmp_path):
    images, labels = digits()
    train, held_out = slice(0, 1400), ({"image": images[1400:]}, labels[1400:])
    history = ke.fit(demo_model("cnn"), (images[train], labels[train]), steps=60)
    engine = history.engine
    engine.export(tmp_path / "trained.onnx")
    batches = [({"image": images[i : i + 200]}, None) for i in range(0, 1400, 200)]
    curvature = ke.curvature(tmp_path / "trained.onnx", batches, loss="categorical")

    def accuracy(pruned):
        engine.set_parameters(pruned)
        return engine.evaluate(held_out)["accuracy"]

    by_curvature = accuracy(ke.prune(curvature, sparsity=0.7, method=method, damping=1e-3))
    by_magnitude = accuracy(ke.prune(curvature, sparsity=0.7, method="magnitude"))
    assert by_curvature > 0.85
    assert by_magnitude < by_curvature - 0.02
