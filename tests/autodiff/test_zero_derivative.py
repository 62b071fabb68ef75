"""Operators that stop the reverse sweep give the same result at near operands."""

import numpy as np
import pytest
from onnx import defs

from kfac_engine.autodiff.rules import ZERO_DERIVATIVE
from kfac_engine.graph.structure import Graph, Node
from tests.autodiff.harness import compiled

# ONNX Runtime 1.31 draws in none newer.
OPSET = 21

# Moves no operand below over a jump.
NEAR = 1e-3

_NUMBERS = np.array([[0.3, -1.2, 2.7], [-0.4, 0.9, 1.8]], "float32")
_SHARES = np.array([[0.2, 0.7, 0.4], [0.9, 0.1, 0.6]], "float32")
# Operator to floating-point operands, other operands in front of them, and attributes.
_STEPS = {
    **{op: ([_NUMBERS], [], {}) for op in ("Ceil", "Floor", "Round", "Sign")},
    "Hardmax": ([_NUMBERS], [], {}),
    "EyeLike": ([_NUMBERS], [], {}),
    "Bernoulli": ([_SHARES], [], {"seed": 1.0}),
    "MelWeightMatrix": (
        [np.float32(1.3), np.float32(901.7)], [np.int64(4), np.int64(64), np.int64(2000)], {}),
    "RandomNormalLike": ([_NUMBERS], [], {"seed": 1.0}),
    "RandomUniformLike": ([_NUMBERS], [], {"seed": 1.0}),
}  # fmt: skip
# No operand is a number that could be moved.
_WITHOUT_OPERANDS = {"Constant", "ConstantOfShape", "RandomNormal", "RandomUniform"}


def evaluate(op, operands, attributes):
    names = tuple(f"x{i}" for i in range(len(operands)))
    fed = dict(zip(names, map(np.asarray, operands), strict=True))
    tested = Node(op, names, ("y",), attributes, name="tested")
    graph = Graph((tested,), (), ("y",), {}, OPSET)
    return compiled("ort", graph, graph.nodes, {}, fed, ["y"])(fed)["y"]


def gives_floats(op):
    (result,) = defs.get_schema(op, OPSET).outputs[:1]
    return "tensor(float)" in result.types


@pytest.mark.parametrize("op", _STEPS)
def test_result_is_constant_near_operand(op):
    numbers, others, attributes = _STEPS[op]
    near = [np.asarray(array + NEAR, "float32") for array in numbers]
    found = [evaluate(op, [*others, *arrays], attributes) for arrays in (numbers, near)]
    np.testing.assert_array_equal(*found)


def test_all_zero_derivative_operators_have_cases():
    standard = {op for op in ZERO_DERIVATIVE if "::" not in op}
    assert {op for op in standard if gives_floats(op)} == {*_STEPS, *_WITHOUT_OPERANDS}
