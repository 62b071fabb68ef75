"""LayerNormalization in float32, where the way back reads what the forward pass had at hand."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

# Sums of some dozens of float32 numbers against float64, relative to the largest.
SINGLE = 2e-6

SHAPES = {
    "last axis": ((5,), (5,), -1),
    "two axes": ((3, 5), (3, 5), 1),
    "stretched scale": ((5,), (1,), 1),
    "one scale": ((1,), (5,), -1),
    "no shift": ((5,), (), -1),
}


def normalising(dtype, scale, shift, axis):
    net = models.Net(dtype=dtype)
    names = [
        net.weight("scale", *scale, mean=1.0),
        *([net.weight("shift", *shift)] if shift else ()),
    ]
    x = net.op("MatMul", "input", net.weight("weight", 5, 5), to="x")
    y = net.op("LayerNormalization", x, *names, to="y", axis=axis, epsilon=0.01)
    net.op("Tanh", y, to="output")
    return net.model({"input": ["batch", 3, 5]}, {"output": ["batch", 3, 5]})


def derivatives(dtype, *case):
    """First and second ones, at a batch with one row far from zero."""
    model = ke.load_model(normalising(dtype, *case))
    x, c, v = np.random.default_rng(0).standard_normal((3, 4, 3, 5)).astype(dtype)
    x[0, 0] += 3
    trace = model.run({"input": x})
    names = [*model.parameters, "input"]
    first = trace.vjp({"output": c}, names)
    moved, second = trace.second_derivative({"output": c}, {"input": v})
    return [*(first[name] for name in names), moved["output"], second["input"]]


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_float32_derivatives_equal_float64_derivatives(case):
    for found, expected in zip(
        derivatives("float32", *case), derivatives("float64", *case), strict=True
    ):
        atol = SINGLE * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_scale_layer_and_gradient_share_one_normalization():
    engine = ke.Engine.from_onnx(normalising("float32", *SHAPES["last axis"]), loss="squared_error")
    x, targets = np.random.default_rng(0).standard_normal((2, 4, 3, 5), dtype=np.float32)
    engine.step({"input": x}, targets)
    nodes = engine._model.extended_graph().nodes
    assert sum(node.op == "LayerNormalization" for node in nodes) == 2
