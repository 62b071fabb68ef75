"""What lies in the bodies of loops and branches belongs to the graph around them."""

import numpy as np
import onnx
import pytest
from onnx import parser

from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.analysis.trainable import excluded_reason, trainable_parameters
from kfac_engine.graph.export import export_files
from kfac_engine.graph.load import load_graph, load_model
from kfac_engine.graph.passes.bodies import body_of, with_names
from kfac_engine.graph.structure import Subgraph
from tests.graph.running import CLOSE, assert_same, run_graph, run_model

HEAD = '<ir_version: 8, opset_import: ["": 18]> m (float[n,2] x) => (float[n,2] y)'

# A weight in the graph, one in a body, and one in a body of that body.
INSIDE = f"""{HEAD} <int64 m = {{2}}, bool on = {{1}}, float[2] e = {{3, 4}}> {{
    z = Add (x, e)
    y = Loop (m, on, z) <body = step (int64 i, bool c, float[n,2] h) => (bool c_out, float[n,2] g)
      <float[2] a = {{1, 2}}> {{
        c_out = Identity (c)
        k = Mul (h, a)
        g = If (c) <
          then_branch = yes () => (float[n,2] p) <float[2] b = {{5, 6}}> {{ p = Add (k, b) }},
          else_branch = no () => (float[n,2] q) {{ q = Identity (k) }}
        >
      }}>
  }}"""


def test_weights_of_bodies_become_graph_constants():
    model = parser.parse_model(INSIDE)
    graph = load_graph(model)
    assert trainable_parameters(graph) == ("e", "a", "b")
    np.testing.assert_array_equal(graph.constants["b"], [5, 6])
    assert set(graph.nodes[1].captures) == {"a", "b"}
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


SPELLED = {
    "initializers": INSIDE,
    "nodes": INSIDE.replace("<float[2] a = {1, 2}>", "")
    .replace("c_out =", "a = Constant <value = float[2] {1, 2}> ()  c_out =")
    .replace("<float[2] b = {5, 6}> { p =", "{ b = Constant <value_floats = [5.0, 6.0]> ()  p ="),
}


@pytest.mark.parametrize("spelling", SPELLED)
def test_weights_of_bodies_have_formula_gradient_and_are_exported(spelling):
    model = parser.parse_model(SPELLED[spelling])
    loaded = load_model(model)
    assert trainable_parameters(loaded.graph) == ("e", "a", "b")
    x = np.arange(6, dtype=np.float32).reshape(3, 2)

    def formula(e, a, b):
        h = x + e
        return (h * a + b) * a + b

    values = {"e": [3, 4], "a": [1, 2], "b": [5, 6]}
    found = run_graph(loaded.graph, {"x": x})["y"]
    np.testing.assert_array_equal(found, formula(*map(np.array, values.values())))
    values = {"e": [7, 8], "a": [9, 10], "b": [11, 12]}
    arrays = {name: np.array(value, np.float32) for name, value in values.items()}
    written = onnx.ModelProto.FromString(export_files(loaded, arrays, "weights").message)
    found = run_model(written.SerializeToString(), {"x": x})["y"]
    np.testing.assert_array_equal(found, formula(*arrays.values()))


TWICE = f"""{HEAD} <float[2] k = {{1, 1}}> {{
    s = ReduceSum <keepdims = 0> (x)  c = Cast <to = 9> (s)
    y = If (c) <
      then_branch = t () => (float[n,2] p) <float[2] w = {{1, 2}}> {{ p = Add (x, w) }},
      else_branch = e () => (float[n,2] q) <float[2] w = {{3, 4}}> {{ q = Add (x, w) }}
    >
  }}"""


def test_weights_of_equal_names_are_distinct_and_not_exported():
    loaded = load_model(parser.parse_model(TWICE))
    constant_values = {name: array.tolist() for name, array in loaded.graph.constants.items()}
    assert constant_values == {"k": [1, 1], "y.w": [1, 2], "y.w_": [3, 4]}
    with pytest.raises(UnsupportedError, match=r"'y\.w' is inside"):
        export_files(loaded, {"y.w": np.zeros(2)}, "weights")


def test_weight_returned_by_body_is_result_of_node():
    text = f"""{HEAD} {{
        s = ReduceSum <keepdims = 0> (x)  c = Cast <to = 9> (s)
        y = If (c) <
          then_branch = t () => (float[1,2] p) <float[1,2] p = {{1, 2}}> {{}},
          else_branch = e () => (float[1,2] q) {{ q = Constant <value = float[1,2] {{3, 4}}> () }}
        >
      }}"""
    graph = load_graph(parser.parse_model(text))
    for number, expected in ((1, [[1, 2]]), (0, [[3, 4]])):
        found = run_graph(graph, {"x": np.full((1, 2), number, np.float32)})["y"]
        np.testing.assert_array_equal(found, expected)


def test_loop_without_results_error_names_node():
    model = parser.parse_model(INSIDE)
    del model.graph.node[1].output[:]
    model.graph.node[0].output[0] = "y"
    with pytest.raises(ModelError, match="Loop"):
        load_graph(model)


def test_with_names_renames_captured_values():
    graph = load_graph(parser.parse_model(INSIDE))
    subgraph = graph.nodes[1].attributes["body"]
    assert isinstance(subgraph, Subgraph)
    renamed = with_names(subgraph, {"b": "other", "h": "inner names stay"})
    assert set(renamed.captures) == {"a", "other"}
    body = body_of(graph.nodes[1], "body", graph.opset)
    assert body.inputs == ("i", "c", "h")
    assert body.graph.outputs == ("c_out", "g")
    assert [node.op for node in body.graph.nodes] == ["Identity", "Mul", "If"]


# What a body does with operand "w" of the loop, and whether that makes it a parameter.
ROLES = {
    "handed-on": ("k = MatMul (h, w_in)  g = Tanh (k)  w_out = Identity (w_in)", None),
    "changed": ("k = MatMul (h, w_in)  g = Tanh (k)  w_out = Mul (w_in, two)", "initial value"),
    "exponent": ("g = Pow (h, captured)  w_out = Identity (w_in)", "read by nothing"),
}


@pytest.mark.parametrize("role", ROLES)
def test_unchanged_loop_state_follows_body(role):
    text, reason = ROLES[role]
    graph = load_graph(
        parser.parse_model(
            f"""{HEAD} <int64 m = {{2}}, bool on = {{1}}, float[2,2] w = {{1, 2, 3, 4}},
              float[2] two = {{2, 2}}, float[2] captured = {{2, 3}}> {{
              y, last = Loop (m, on, x, w) <body = step
                (int64 i, bool c, float[n,2] h, float[2,2] w_in)
                => (bool c_out, float[n,2] g, float[2,2] w_out) {{ c_out = Identity (c)  {text} }}>
            }}"""
        )
    )
    found = excluded_reason(graph, "w")
    assert found is None if reason is None else reason in str(found)
    if role == "exponent":
        assert "an exponent" in str(excluded_reason(graph, "captured"))


def test_weights_scanned_by_layer_are_parameters():
    graph = load_graph(
        parser.parse_model(
            f"""{HEAD} <float[3,2,2] stack = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
              float[1,2] start = {{0, 0}}> {{
              z, y = Scan <num_scan_inputs = 1, body = layer (float[n,2] h, float[2,2] w)
                => (float[n,2] g, float[n,2] seen)
                {{ k = MatMul (h, w)  g = Tanh (k)  seen = Identity (g) }}> (start, stack)
            }}"""
        )
    )
    assert trainable_parameters(graph) == ("stack",)
    assert "initial value" in str(excluded_reason(graph, "start"))


def test_weight_that_is_body_result_is_returned_by_body():
    text = f"""{HEAD} <int64 m = {{2}}> {{
        k = ReduceSum (x)
        zero = Sub (k, k)
        c = Greater (k, zero)
        g = If (c) <
          then_branch = yes () => (float[2] p) <float[2] p = {{5, 6}}> {{ }},
          else_branch = no () => (float[2] q) <float[2] b = {{1, 2}}> {{ q = Neg (b) }}
        >
        y = Mul (x, g)
      }}"""
    loaded = load_graph(parser.parse_model(text))
    np.testing.assert_array_equal(loaded.constants["g.p"], np.array([5, 6], np.float32))
    for sign in (1, -1):
        x = sign * np.ones((3, 2), np.float32)
        y = run_graph(loaded, {"x": x})["y"]
        np.testing.assert_array_equal(y, x * ((5, 6) if sign == 1 else (-1, -2)))
