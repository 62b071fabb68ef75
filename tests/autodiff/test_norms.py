"""Norms that a file writes in several nodes, at zero."""

import numpy as np
import pytest
from onnx import parser

from kfac_engine.graph.load import load_graph
from tests.autodiff.harness import Bench

ROUNDING = 1e-12  # A few operations in float64.

AT_ZERO = {  # of (2, 2), whose first row is zero
    "norm": "p = Mul (x, x)  s = ReduceSum <keepdims = 0> (p, last)  y = Sqrt (s)",
    "power": "p = Pow (x, two)  s = ReduceSum (p, last)  y = Sqrt (s)",
    "power of half": "p = Pow (x, two)  s = ReduceSum (p, last)  y = Pow (s, half)",
    "square sum": "s = ReduceSumSquare (x, last)  y = Sqrt (s)",
    "mean": "p = Mul (x, x)  s = ReduceMean (p, last)  y = Sqrt (s)",
    "deviation": "m = ReduceMean (x, last)  d = Sub (x, m)  p = Mul (d, d)"
    "  s = ReduceSum (p, last)  q = Div (s, two)  y = Sqrt (q)",
    "distance": "e = Unsqueeze (x, last)  d = Sub (e, other)  p = Pow (d, two)"
    "  s = ReduceSum <keepdims = 0> (p, axis)  y = Sqrt (s)",
    "two terms": "a, c = Split <axis = 1, num_outputs = 2> (x)  p = Mul (a, a)  q = Mul (c, c)"
    "  s = Add (p, q)  y = Sqrt (s)",
}


@pytest.mark.parametrize("body", AT_ZERO.values(), ids=AT_ZERO)
def test_norm_has_the_subgradient_zero_at_zero(body):
    """The other row has its own gradient: that of the same graph for this row."""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> m (double[2,2] x) => (double[] y)
        <double two = {{2}}, double half = {{0.5}}, int64[1] last = {{-1}}, int64[1] axis = {{1}},
         double[1,2,1] other = {{0, 0}}> {{ {body} }}"""
    )
    graph = load_graph(model)
    cotangents, second = {}, [3.0, -1.0]
    for kind, value in (
        ("kink", np.array([[0, 0], second])),
        ("smooth", np.array([[1, 3], second])),
    ):
        found = Bench(graph, {"x": value}, graph.outputs, ("x",), "onnxruntime")
        y = np.ones(found.facts[graph.outputs[0]].shape)
        cotangents[kind] = found.gradients({"x": value}, {graph.outputs[0]: y})["x"]
    np.testing.assert_array_equal(cotangents["kink"][0], [0, 0])
    assert cotangents["smooth"][0].any()
    np.testing.assert_allclose(cotangents["kink"][1], cotangents["smooth"][1], atol=ROUNDING)


@pytest.mark.parametrize("body", ["y = Sqrt (x)", "s = Add (x, x)  y = Sqrt (s)"])
def test_root_of_another_value_has_no_finite_derivative_at_zero(body):
    graph = load_graph(
        parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 18]>
            m (double[2] x) => (double[2] y) {{ {body} }}"""
        )
    )
    feeds = {"x": np.array([0.0, 4.0])}
    bench = Bench(graph, feeds, ("y",), ("x",), "onnxruntime")
    with np.errstate(divide="ignore"):
        slope = bench.gradients(feeds, {"y": np.ones(2)})["x"]
    assert np.isinf(slope[0])
    assert np.isfinite(slope[1])
