"""What lies in the bodies of loops and branches belongs to the graph around them."""

import numpy as np
import pytest
from onnx import parser

from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.bodies import body_of, with_names
from kfac_engine.graph.export import export_files
from kfac_engine.graph.load import load_graph, load_model
from kfac_engine.graph.structure import Subgraph
from kfac_engine.graph.trainable import excluded_reason, trainable_parameters
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


def test_weights_of_bodies_are_constants_of_the_graph() -> None:
    model = parser.parse_model(INSIDE)
    graph = load_graph(model)
    assert trainable_parameters(graph) == ("e", "y.a", "y.g.b")
    np.testing.assert_array_equal(graph.constants["y.g.b"], [5, 6])
    assert set(graph.nodes[1].captures) == {"y.a", "y.g.b"}
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


def test_a_weight_of_a_body_cannot_be_written_back() -> None:
    loaded = load_model(parser.parse_model(INSIDE))
    with pytest.raises(UnsupportedError, match=r"'y\.a' lies inside"):
        export_files(loaded, {"y.a": np.zeros(2)}, "weights")


def test_a_loop_without_results_is_refused_by_name() -> None:
    model = parser.parse_model(INSIDE)
    del model.graph.node[1].output[:]
    model.graph.node[0].output[0] = "y"
    with pytest.raises(ModelError, match="Loop"):
        load_graph(model)


def test_a_body_has_the_names_that_its_captures_are_given() -> None:
    graph = load_graph(parser.parse_model(INSIDE))
    subgraph = graph.nodes[1].attributes["body"]
    assert isinstance(subgraph, Subgraph)
    renamed = with_names(subgraph, {"y.g.b": "other", "h": "inner names stay"})
    assert set(renamed.captures) == {"y.a", "other"}
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
def test_what_a_loop_hands_on_unchanged_is_what_its_body_makes_of_it(role: str) -> None:
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


def test_weights_that_a_scan_takes_layer_by_layer_are_parameters() -> None:
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


def test_a_weight_that_is_a_result_of_its_body_is_handed_out_by_it() -> None:
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
