"""Metrics against their definitions in NumPy, over batches of different sizes."""

from functools import partial

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# Sums of float32 numbers of order one in another order differ by a few units of 1e-7.
CLOSE = {"rel": 2e-6}
SHARE = {"rel": 1e-12}  # ratios of integers


def pairs(inputs, targets, cuts):
    parts = zip(np.split(inputs["input"], cuts), np.split(targets, cuts), strict=True)
    return [({"input": x}, t) for x, t in parts]


@pytest.fixture(scope="module")
def classifier():
    """A model with three positions and four classes, and its logits."""
    net = models.Net()
    net.conv("output", "input", 3, 4, 1)
    model = net.model({"input": ["batch", 3, 1, 3]}, {"output": ["batch", 4, 1, 3]})
    inputs = models.random_inputs(model, batch=11)
    (z,) = oracle.evaluate(model, inputs, "output")
    targets = np.random.default_rng(0).integers(0, 4, (11, 1, 3))
    return ke.Engine.from_onnx(model, loss="categorical", class_axis=1), inputs, targets, z


def share_among_the_most_probable(z, targets, count):
    best = np.argsort(-z, axis=1, kind="stable")[:, :count]
    return (best == targets[:, None]).any(1).mean()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("cuts", [[], [1, 6]])
def test_top_k_counts_targets_among_the_most_probable_classes(classifier, count, cuts):
    engine, inputs, targets, z = classifier
    values = engine.evaluate(pairs(inputs, targets, cuts), metrics=[f"top{count}", "accuracy"])
    expected = share_among_the_most_probable(z, targets, count)
    assert values[f"top{count}"] == pytest.approx(expected, **SHARE)
    assert (values["accuracy"] == pytest.approx(expected, **SHARE)) == (count == 1)
    assert 0.1 < expected < 1 or count == 4


def test_equal_logits_rank_in_the_order_of_their_classes():
    loss = ke.CategoricalLogitsNegativeLogProbLoss("z")
    z = np.array([[1.0, 1.0, 0.0, 1.0]] * 4)
    assert loss.ranks({"z": z}, np.arange(4)).tolist() == [0, 1, 3, 2]
    assert loss.hits({"z": z}, np.arange(4)).tolist() == [True, False, False, False]


def test_top_k_of_one_hot_targets_is_that_of_their_classes():
    net = models.Net()
    net.dense("output", "input", 6, 4)
    model = net.model({"input": ["batch", 6]}, {"output": ["batch", 4]})
    inputs = models.random_inputs(model, batch=9)
    (z,) = oracle.evaluate(model, inputs, "output")
    ids = np.random.default_rng(1).integers(0, 4, 9)
    loss = ke.OnehotCategoricalLogitsNegativeLogProbLoss("output", "labels")
    engine = ke.Engine.from_onnx(model, loss=loss)
    found = engine.evaluate((inputs, np.eye(4, dtype=np.float32)[ids]), metrics=["top2"])
    assert found["top2"] == pytest.approx(share_among_the_most_probable(z, ids, 2), **SHARE)


@pytest.fixture(scope="module")
def regression():
    model = models.mlp()
    inputs = models.random_inputs(model, batch=10)
    (z,) = oracle.evaluate(model, inputs, "output")
    targets = np.random.default_rng(2).standard_normal(z.shape).astype(np.float32)
    return ke.Engine.from_onnx(model, loss="normal"), inputs, targets, (z - targets).astype("f8")


ERRORS = {
    "mean_absolute_error": lambda e: np.abs(e).mean(),
    "mean_squared_error": lambda e: (e**2).mean(),
    "root_mean_squared_error": lambda e: np.sqrt((e**2).mean()),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("cuts", [[], [1, 3]])
def test_mean_errors_are_their_definitions(regression, name, cuts):
    engine, inputs, targets, errors = regression
    values = engine.evaluate(pairs(inputs, targets, cuts), metrics=[name])
    assert values == {name: pytest.approx(ERRORS[name](errors), **CLOSE)}


def test_mean_errors_of_a_predicted_variance_are_those_of_the_mean():
    model = models.two_outputs()
    (mean, variance) = (entry.name for entry in model.graph.output)
    loss = ke.NormalMeanVarianceNegativeLogProbLoss(mean, variance)
    z = np.array([[1.0, 2.0], [3.0, 4.0]])
    errors = loss.errors({mean: z, variance: np.ones((2, 2))}, np.ones((2, 2)))
    assert errors.tolist() == [[0, 1], [2, 3]]


def test_a_function_receives_the_outputs_and_targets_by_name():
    model = models.two_outputs()
    engine = ke.Engine.from_onnx(
        model, loss=["categorical", "normal"], output=[o.name for o in model.graph.output]
    )
    inputs = models.random_inputs(model, batch=4)
    outputs = engine.predict(inputs)
    first, second = outputs
    targets = {first: np.arange(4) % 2, second: np.zeros_like(outputs[second])}

    def scores(outputs, targets):
        assert list(outputs) == [first, second]
        return outputs[first].sum(1) + 10 * targets[first]

    value = engine.evaluate((inputs, targets), metrics=[scores])["scores"]
    expected = (outputs[first].sum(1) + 10 * targets[first]).mean()
    assert value == pytest.approx(expected, **CLOSE)


def test_wrong_metrics_are_refused(regression, classifier):
    engine, inputs, targets, _ = regression

    def mean(outputs, targets):
        return np.mean(outputs)

    def accuracy(outputs, targets):
        return outputs

    cases = [
        (["accuracy"], ke.UnsupportedError, "has no accuracy"),
        (["top3"], ke.UnsupportedError, "has no ranks"),
        (
            ["top0"],
            ke.UnknownNameError,
            "unknown metric 'top0' .* choose one of: accuracy, label_er",
        ),
        (["loss", "loss"], ke.InputError, "'loss' is named twice"),
        ("loss", ke.InputError, "metrics must be a list"),
        ([3], ke.InputError, "or a function with a name"),
        ([lambda outputs, targets: 0], ke.InputError, "or a function with a name, made by def"),
        ([partial(mean)], ke.InputError, "or a function with a name"),
        ([accuracy], ke.InputError, "the metric 'accuracy' exists already"),
        ([mean], ke.ShapeError, r"returns an array of shape \(\) for a batch of 10 examples"),
    ]
    for metrics, kind, message in cases:
        with pytest.raises(kind, match=message):
            engine.evaluate((inputs, targets), metrics=metrics)
    engine, inputs, targets, _ = classifier
    with pytest.raises(ke.UnsupportedError, match="predicts no means"):
        engine.evaluate((inputs, targets), metrics=["mean_squared_error"])
