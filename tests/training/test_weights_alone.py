"""Natural gradients of weights whose biases have no vector: those with zeros for the biases."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.approximations import accepted
from kfac_engine.training.kfac_updates import natural_gradients
from tests import models

# Rounding of float32 (6e-8) times condition numbers of some hundreds.
ROUNDING = 2e-5


def used_twice():
    """A dense layer with a bias, used twice."""
    net = models.Net()
    weight, bias = net.weight("w", 4, 4), net.weight("b", 4)
    first = net.op("Gemm", "input", weight, bias, to="first")
    net.op("Gemm", net.op("Tanh", first, to="act"), weight, bias, to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 4]})


MODELS = {
    "fully_connected": (models.mlp(), "categorical"),
    "conv2d": (models.cnn(), "categorical"),
    "fully_connected_multi": (used_twice(), "normal"),
}
CASES = [(kind, approximation) for kind in MODELS for approximation in accepted(kind)]


@pytest.mark.parametrize(("kind", "approximation"), CASES)
def test_a_weight_alone_moves_as_with_a_bias_of_zeros(kind, approximation):
    model, loss = MODELS[kind]
    approximations = {"fully_connected": "diagonal", kind: approximation}
    engine = ke.Engine.from_onnx(model, loss=loss, approximations=approximations)
    inputs = models.random_inputs(model, 8, 1)
    outputs = engine.trace(inputs)[model.graph.output[0].name]
    targets = outputs.argmax(axis=1) if loss == "categorical" else outputs + 1
    gradients = engine.step(inputs, targets).gradients
    weights = {name: array for name, array in gradients.items() if array.ndim > 1}
    assert len(weights) < len(gradients)
    found = natural_gradients(engine, weights)
    zeros = {name: np.zeros_like(array) for name, array in gradients.items()}
    expected = engine.precondition(zeros | weights)
    assert found.keys() == weights.keys()
    other = engine.precondition(gradients)
    equal = all(np.allclose(array, other[name], rtol=0.01) for name, array in found.items())
    assert equal == approximation.endswith(("in_diag", "both_diag", "diagonal"))
    for name, array in found.items():
        scale = abs(expected[name]).max()
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=ROUNDING * scale)


def test_a_bias_alone_is_refused():
    model, loss = MODELS["fully_connected"]
    engine = ke.Engine.from_onnx(model, loss=loss)
    gradients = engine.step(models.random_inputs(model, 8, 1), np.zeros(8, int)).gradients
    with pytest.raises(ke.InputError, match="form one block"):
        natural_gradients(engine, {"fc0.bias": gradients["fc0.bias"]})
