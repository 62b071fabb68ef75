"""Bounds of values, held against what ONNX Runtime makes of many inputs."""

from math import inf

import numpy as np
import onnxruntime
import pytest

from kfac_engine.graph.analysis.interval_bounds import bounds
from kfac_engine.graph.load import load_graph
from tests import models

# Operators on x of shape (n, 3, 4), "_" being the result so far, and the bounds.
CASES = {
    "nothing known": ([("Identity", ["_"], {})], (-inf, inf)),
    "an unknown operator": ([("Sigmoid", ["_"], {}), ("Sin", ["_"], {})], (-inf, inf)),
    "sigmoid": ([("Sigmoid", ["_"], {})], (0, 1)),
    "softmax": ([("Softmax", ["_"], {})], (0, 1)),
    "hard sigmoid": ([("HardSigmoid", ["_"], {})], (0, 1)),
    "tanh": ([("Tanh", ["_"], {})], (-1, 1)),
    "erf": ([("Erf", ["_"], {})], (-1, 1)),
    "relu": ([("Relu", ["_"], {})], (0, inf)),
    "clip": ([("Clip", ["_", "-2", "3"], {})], (-2, 3)),
    "clip from below": ([("Clip", ["_", "-2"], {})], (-2, inf)),
    "clip beyond": ([("Sigmoid", ["_"], {}), ("Clip", ["_", "3"], {})], (3, 3)),
    "exponential of what is negative": (
        [("Relu", ["_"], {}), ("Neg", ["_"], {}), ("Exp", ["_"], {})], (0, 1)),
    "exponential": ([("Exp", ["_"], {})], (0, inf)),
    "sum": ([("Tanh", ["_"], {}), ("Add", ["_", "3"], {})], (2, 4)),
    "difference": ([("Tanh", ["_"], {}), ("Sub", ["3", "_"], {})], (2, 4)),
    "product": ([("Tanh", ["_"], {}), ("Mul", ["_", "-2"], {})], (-2, 2)),
    "product of nothing with anything": ([("Mul", ["_", "0"], {})], (-inf, inf)),
    "quotient": ([("Sigmoid", ["_"], {}), ("Div", ["_", "-2"], {})], (-0.5, 0)),
    "quotient through zero": ([("Tanh", ["_"], {}), ("Div", ["3", "_"], {})], (-inf, inf)),
    "larger": ([("Tanh", ["_"], {}), ("Max", ["_", "0"], {})], (0, 1)),
    "smaller": ([("Tanh", ["_"], {}), ("Min", ["_", "0"], {})], (-1, 0)),
    "chosen": ([("Tanh", ["_"], {}), ("Where", ["mask", "_", "3"], {})], (-1, 3)),
    "joined": ([("Tanh", ["_"], {}), ("Concat", ["_", "_"], {"axis": 1})], (-1, 1)),
    "joined with anything": ([("Tanh", ["_"], {}), ("Concat", ["_", "x"], {"axis": 1})], None),
    "mean": ([("Sigmoid", ["_"], {}), ("ReduceMean", ["_", "one"], {})], (0, 1)),
    "product of shares": ([("Sigmoid", ["_"], {}), ("ReduceProd", ["_", "one"], {})], (0, 1)),
    "product of others": ([("Tanh", ["_"], {}), ("ReduceProd", ["_", "one"], {})], (-inf, inf)),
    "sum of all": ([("Sigmoid", ["_"], {}), ("ReduceSum", ["_", "one"], {})], (-inf, inf)),
    "windows with padding": (
        [
            ("Sigmoid", ["_"], {}),
            ("Add", ["_", "3"], {}),
            ("AveragePool", ["_"], {"kernel_shape": [2], "pads": [1, 1], "count_include_pad": 1}),
        ],
        (0, 4),
    ),
    "largest of windows": (
        [("Tanh", ["_"], {}), ("MaxPool", ["_"], {"kernel_shape": [2], "pads": [1, 1]})], (-1, 1)),
    "moved about": (
        [("Sigmoid", ["_"], {}), ("Transpose", ["_"], {}), ("Expand", ["_", "one"], {})], (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("operators", "expected"), CASES.values(), ids=CASES)
def test_bounds_are_tight_and_valid(operators, expected):
    net = models.Net()
    for value in (-2, 0, 3):
        net.constant(f"{value}", np.float32(value))
    net.constant("one", np.array([1]))
    net.constant("mask", np.array([True, False, True, False]))
    y = "x"
    for index, (op, operands, attributes) in enumerate(operators):
        last = index == len(operators) - 1
        inputs = [y if name == "_" else name for name in operands]
        y = net.op(op, *inputs, to="output" if last else f"end{index}", **attributes)
    model = net.model({"x": ["batch", 3, 4]}, {"output": ["a", "b", "c"]})
    low, high = bounds(load_graph(model), "output")
    assert (low, high) == (expected or (-inf, inf))
    rng = np.random.default_rng(0)
    x = (30 ** rng.uniform(-2, 1, (50, 3, 4)) * rng.choice([-1, 1], (50, 3, 4))).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (value,) = session.run(["output"], {"x": x})
    assert low <= value.min() <= value.max() <= high
