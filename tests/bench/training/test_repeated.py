"""The tasks whose data come again: equations against differences, and what the suite trains."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training.methods import METHODS
from kfac_engine.bench.training.plan import COLLECTIONS
from kfac_engine.bench.training.repeated import EQUATIONS
from kfac_engine.bench.training.tasks import REPEATED, TASKS


def differences(function, points, step):
    """Value, first and second derivatives of a function of points by central differences."""
    value, shifts = function(points), step * np.eye(2)
    ahead = [function(points + shift) for shift in shifts]
    behind = [function(points - shift) for shift in shifts]
    pairs = list(zip(ahead, behind, strict=True))
    first = [(a - b) / (2 * step) for a, b in pairs]
    return value, first, [(a - 2 * value + b) / step**2 for a, b in pairs]


def operator(equation, value, first, second):
    terms = [equation.value * value]
    terms += [b * derivative for b, derivative in zip(equation.first, first, strict=True)]
    terms += [w * derivative for w, derivative in zip(equation.second, second, strict=True)]
    return sum(terms)


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_network_of_an_equation_has_its_residual(name):
    equation = EQUATIONS[name]
    model = equation.model((8, 7), seed=3)
    points = np.random.default_rng(0).random((20, 2))

    def network(x):
        h = x
        for layer in range(3):
            h = h @ model.weights[f"W{layer}"].astype(float) + model.weights[f"b{layer}"]
            h = np.tanh(h) if layer < 2 else h
        return h

    trained = tuple(model.weights)
    engine = ke.Engine.from_onnx(model.data, loss="normal", trainable=trained, threads=1)
    for flag, expected in {
        0: network(points),
        1: operator(equation, *differences(network, points, 1e-4)),
    }.items():
        x = np.concatenate([points, np.full((20, 1), flag)], axis=1).astype(np.float32)
        np.testing.assert_allclose(engine.predict(x), expected, rtol=1e-4, atol=1e-4)
    # Each weight is one layer that is used for the value and its derivatives.
    kinds = {layer.parameters[0]: layer.kind for layer in engine.layers}
    assert {kinds[f"W{i}"] for i in range(3)} == {"fully_connected_multi"}


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_source_of_an_equation_belongs_to_its_solution(name):
    equation = EQUATIONS[name]
    points = np.random.default_rng(0).random((20, 2))
    expected = operator(equation, *differences(equation.solution, points, 1e-4))
    np.testing.assert_allclose(equation.source(points), expected, atol=1e-5)


@pytest.mark.parametrize("name", REPEATED)
def test_a_step_of_each_task_has_all_its_examples(name):
    task = TASKS[name]
    data = task.data(None)
    inputs, targets = next(data.batches(task.batch, 0))
    assert len(targets) == len(data.x) <= task.batch
    engine = ke.Engine.from_onnx(task.model(8, 0).data, loss=task.loss, threads=1)
    assert np.isfinite(engine.loss(inputs, targets))


def test_each_step_of_lbfgs_lowers_the_loss():
    (method,) = COLLECTIONS["exact"].settings["lbfgs"]
    data = REPEATED["surface"].data(None)
    model = REPEATED["surface"].model(8, 0)
    engine = ke.Engine.from_onnx(model.data, loss="normal", threads=1)
    step = METHODS[method].factory(engine, None, {"maxiter": 10})
    losses = [step({"x": data.x}, data.y, 1.0) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] > engine.loss({"x": data.x}, data.y)
