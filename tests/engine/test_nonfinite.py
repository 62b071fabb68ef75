"""Errors of gradients that are not finite name the node and the remedy."""

import re

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke

# Nodes from h to y, and the operator of the node to name. h is (0, 1, …) in the first example.
DERIVATIVES = {
    "root": ("y = Sqrt (h)", "Sqrt"),
    "root behind a choice": (
        "s = Sqrt (h)  some = Greater (h, zero)  y = Where (some, s, zero)", "Sqrt"),
    "root of a product": ("d = Mul (h, x)  s = Sqrt (d)  t = Mul (s, h)  y = Add (t, h)", "Sqrt"),
    "power": ("y = Pow (h, third)", "Pow"),
    "angle": (
        "q = Div (one, h)  a = Atan (q)  some = Greater (h, zero)  y = Where (some, a, zero)",
        "Div"),
}  # fmt: skip
RESULTS = {
    "logarithm": ("k = Log (h)  y = Mul (h, k)", "Mul"),
    "entropy": ("k = Log (h)  p = Mul (h, k)  r = Relu (h)  y = Add (p, r)", "Mul"),
    "division": ("y = Div (h, h)", "Div"),
    "root below zero": ("n = Neg (h)  y = Sqrt (n)", "Sqrt"),
}  # fmt: skip
LATER = [
    "v = MatMul (y, w)  output = Tanh (v)",
    "v = MatMul (y, w)  u = Exp (y)  output = Add (v, u)",
]


def engine_of(body, later):
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> m (float[n,2] x) => (float[n,2] output)
        <float[2] b = {{0, 0}}, float[2,2] w = {{1, 2, 3, 4}}, float zero = {{0}},
         float one = {{1}}, float third = {{0.33}}> {{ h = Add (x, b)  {body}  {later} }}"""
    )
    return ke.Engine.from_onnx(model, loss="normal")


X, T = np.float32([[0, 1], [2, 3]]), np.zeros((2, 2))


@pytest.mark.parametrize("later", LATER, ids=["product", "sum"])
@pytest.mark.parametrize(("body", "op"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_first_derivative_that_is_not_finite_is_named(body, op, later):
    engine = engine_of(body, later)
    message = rf"gradient of 'b' holds NaN.* first derivative .* {op} node '\w+' with respect to"
    for call in (engine.gradients, engine.step):
        with pytest.raises(ke.NonFiniteError, match=message + ".*add a small number"):
            call({"x": X}, T)
    fetched = engine.gradients({"x": X + 1}, T)
    assert np.isfinite(fetched.gradients["b"]).all()


@pytest.mark.parametrize(("body", "op"), RESULTS.values(), ids=RESULTS)
def test_first_result_that_is_not_a_number_is_named(body, op):
    engine = engine_of(body, LATER[0])
    message = rf"first value that is not a number is a result of {op} node '\w+'"
    with pytest.raises(ke.NonFiniteError, match=message):
        engine.gradients({"x": X}, T)


def test_masked_scores_are_not_named():
    """Minus infinity before Softmax is no fault: the root after it is."""
    body = (
        "some = Greater (h, one)  low = Log (zero)  s = Where (some, h, low)"
        "  m = Softmax <axis = -1> (s)  k = Concat <axis = 0> (h, m)"
        "  a, c = Split <axis = 0, num_outputs = 2> (k)  y = Sqrt (a)"
    )
    with pytest.raises(ke.NonFiniteError) as caught:
        engine_of(body, LATER[0]).gradients({"x": np.float32([[0, 2], [2, 3]])}, T)
    assert re.search(r"derivative .* Sqrt node", str(caught.value))


def test_error_leaves_the_model_as_it_was():
    engine = engine_of("y = Sqrt (h)", LATER[0])
    fetched = engine.collection.graph.fetched()
    with pytest.raises(ke.NonFiniteError):
        engine.step({"x": X}, T)
    assert engine.collection.graph.fetched() == fetched
