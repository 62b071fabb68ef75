"""Functions and constant branches dissolve into the graph."""

import numpy as np
import pytest
from onnx import parser

from kfac_engine.graph.load import load_graph
from tests.graph.running import CLOSE, assert_same, run_graph, run_model


def test_functions_are_inlined():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        m (float[2,3] x) => (float[2,3] y) { h = own.twice (x)  y = own.twice (h) }
        <domain: "own", opset_import: ["": 17]>
        twice (a) => (b) { two = Constant <value = float {2.0}> ()  b = Mul (a, two) }"""
    )
    graph = load_graph(model)
    assert [node.op for node in graph.nodes] == ["Mul", "Mul"]
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(run_graph(graph, {"x": x})["y"], 4 * x)


def test_inlined_functions_have_default_attributes():
    """Called from the graph, from another function and from a branch, with and without."""
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17, "own": 1]>
        m (float[2,3] x, bool c) => (float[2,3] y) {
          p = own.leaky (x)  q = own.leaky <slope = 0.25> (x)  r = own.outer (x)
          s = If (c) <
            then_branch = t () => (float[2,3] a) { a = own.leaky (x) },
            else_branch = e () => (float[2,3] a) { a = Identity (x) }
          >
          y = Sum (p, q, r, s)
        }
        <domain: "own", opset_import: ["": 17]>
        leaky <slope: float = 0.5> (a) => (b) { b = LeakyRelu <alpha: float = @slope> (a) }
        <domain: "own", opset_import: ["": 17, "own": 1]>
        outer (a) => (b) { b = own.leaky (a) }"""
    )
    feeds = {"x": np.full((2, 3), -1, np.float32), "c": np.array(True)}
    found = run_graph(load_graph(model), feeds)["y"]
    np.testing.assert_array_equal(found, np.full((2, 3), -(0.5 + 0.25 + 0.5 + 0.5)))


BRANCHES = """<ir_version: 8, opset_import: ["": {opset}]>
    m (float[2,1,3] x{inputs}) => (float[] y, float[] z) <float[1] w = {{2}}{constants}> {{
      y = If (c) <
        then_branch = t () => (float[] a) <float[1] v = {{5}}> {{
          k = Constant <value = bool {{0}}> ()
          a = If (k) <
            then_branch = tt () => (float[] q) {{ q = Identity (x) }},
            else_branch = te () => (float[] q) {{ p = Mul (x, v)  q = Mul (p, w) }}
          >
        }},
        else_branch = e () => (float[] a) {{ a = Identity (x) }}
      >
      z = If (c) <
        then_branch = zt () => (float[] a) {{ a = Neg (x) }},
        else_branch = ze () => (float[] a) {{ a = Identity (x) }}
      >
    }}"""


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("condition", [0, 1])
def test_branch_on_a_constant_is_folded(condition, opset):
    constant = f", bool c = {{{condition}}}"
    text = BRANCHES.format(opset=opset, inputs="", constants=constant)
    model = parser.parse_model(text)
    graph = load_graph(model)
    assert {node.op for node in graph.nodes} <= {"Identity", "Mul", "Neg"}
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 1, 3)}
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


def test_branch_on_data_remains_node_with_captures():
    model = parser.parse_model(BRANCHES.format(opset=18, inputs=", bool c", constants=""))
    graph = load_graph(model)
    assert [node.op for node in graph.nodes] == ["If", "If"]
    # The initializer v of the branch lies with the weights of the graph now.
    assert set(graph.nodes[0].captures) == {"x", "w", "v"}
    assert (graph.nodes[0], -1) in graph.consumers["w"]
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 1, 3), "c": np.asarray(True)}
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)
