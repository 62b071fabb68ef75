"""The evaluation in float64, against ONNX Runtime in float32 and against definitions."""

import numpy as np
import pytest
from onnxruntime import InferenceSession
from scipy.special import erf

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.reference import ReferenceModel
from tests import models


def evaluated(op, x, *weights, **attributes):
    """The result of one operator, in float64 and from ONNX Runtime."""
    names = [f"w{index}" for index in range(len(weights))]
    inputs = {"x": f"float[{','.join(map(str, x.shape))}]"}
    feeds = dict(zip(names, weights, strict=True))
    model = models.one_operator(op, inputs, feeds, opsets='"": 20', **attributes)
    ours = ReferenceModel(load_graph(model), ["y"], names)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ours.run({"x": x, **feeds})["y"], session.run(None, {"x": x})[0]


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


CONVOLUTIONS = {
    "plain": (normal(2, 3, 5, 6), normal(4, 3, 3, 2), {}),
    "line": (normal(2, 3, 7), normal(4, 3, 3), {"pads": [2, 0]}),
    "volume": (normal(1, 2, 4, 5, 3), normal(3, 2, 2, 2, 2), {"strides": [1, 2, 1]}),
    "uneven": (
        normal(2, 3, 8, 9),
        normal(4, 3, 3, 2),
        {"pads": [1, 0, 2, 1], "dilations": [2, 3], "strides": [2, 1]},
    ),
    "groups": (normal(2, 6, 5, 5), normal(4, 3, 3, 3), {"group": 2, "pads": [1] * 4}),
    "depthwise": (normal(2, 4, 5, 5), normal(8, 1, 3, 3), {"group": 4}),
    "same": (normal(2, 3, 6, 6), normal(4, 3, 3, 3), {"auto_pad": "SAME_UPPER"}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_those_of_onnx_runtime(name):
    x, weight, attributes = CONVOLUTIONS[name]
    result, expected = evaluated("Conv", x, weight, normal(len(weight)), **attributes)
    assert result.dtype == np.float64
    # float32 sums of at most 27 products of normal numbers.
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_erf_and_gelu_have_the_accuracy_of_float64():
    x = normal(3, 4)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(evaluated("Erf", x)[0], erf(wide), rtol=1e-14)
    exact = 0.5 * wide * (1 + erf(wide / np.sqrt(2)))
    np.testing.assert_allclose(evaluated("Gelu", x)[0], exact, rtol=1e-13)
    tanh = evaluated("Gelu", x, approximate="tanh")
    np.testing.assert_allclose(*tanh, rtol=1e-4, atol=1e-6)


def test_casts_and_constants_of_a_graph_are_in_float64():
    nodes = "s = Mul (input, third)  c = Cast <to = 1> (s)  output = MatMul (c, w)"
    model = models.written("batch,3 -> batch,2", "w(3,2) third:0.333", nodes)
    inputs = models.random_inputs(model, 4)
    weight = np.random.default_rng(0).standard_normal((3, 2))
    reference = ReferenceModel(load_graph(model), ["output"], ["w"])
    result = reference.run({**inputs, "w": weight})["output"]
    expected = inputs["input"].astype(float) * float(np.float32(0.333)) @ weight
    np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-15)


def test_an_operator_without_reference_is_an_error():
    model = models.odd_ops()
    graph = load_graph(model)
    with pytest.raises(ke.ModelError, match="reference implementation of onnx"):
        ReferenceModel(graph, graph.outputs, []).run(models.random_inputs(model))
