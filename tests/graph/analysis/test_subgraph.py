"""A subgraph holds the ancestors of its ends, and counts who reads a value."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

from kfac_engine.graph.analysis.subgraph import SubGraph, dependents, of_data
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph, Node, Subgraph

BODY = """
    h = MatMul(x, w)
    r = Relu(h)
    y = Add(r, b)
    z = MatMul(r, w)
    unused = Mul(x, v)
"""


def graph():
    text = f'<ir_version: 8, opset_import: ["": 18]> m (float[N,3] x) => (float[] y) {{ {BODY} }}'
    model = parser.parse_model(text)
    for name, shape in {"w": (3, 3), "b": (3,), "v": (3,)}.items():
        array = np.ones(shape, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return load_graph(model)


def by_hand(*nodes):
    return Graph(nodes, (), (), {}, 18)


@pytest.mark.parametrize(
    ("ends", "members"),
    [
        (["y"], {"x", "w", "h", "r", "b", "y"}),
        (["h"], {"x", "w", "h"}),
        (["y", "z"], {"x", "w", "h", "r", "b", "y", "z"}),
        (["x"], {"x"}),
    ],
    ids=lambda names: "+".join(sorted(names)),
)
def test_subgraph_members_are_ends_and_ancestors(ends, members):
    found = SubGraph(graph(), ends)
    names = ["x", "w", "b", "v", "h", "r", "y", "z", "unused", "no such value"]
    assert set(found.filter_list(names)) == members
    assert {name for name in names if found.is_member(name)} == members


@pytest.mark.parametrize(
    ("sources", "stops", "members"),
    [
        (["b"], (), {"b", "y"}),
        (["h"], (), {"h", "r", "y", "z"}),
        (["h"], {"Relu"}, {"h"}),
        (["v", "r"], (), {"v", "unused", "r", "y", "z"}),
    ],
    ids=["one reader", "all behind it", "a stop", "two sources"],
)
def test_dependents_include_sources_and_descendants(sources, stops, members):
    assert dependents(graph().nodes, sources, stops) == members


def test_of_data_returns_descendants_of_inputs():
    assert of_data(graph()) == {"x", "h", "r", "y", "z", "unused"}


def test_filter_list_keeps_order():
    assert SubGraph(graph(), ["y"]).filter_list(["y", "z", "b", "x"]) == ("y", "b", "x")


@pytest.mark.parametrize(
    ("ends", "uses"),
    [(["y"], {"w": 1, "b": 1, "v": 0}), (["y", "z"], {"w": 2, "b": 1, "v": 0})],
    ids=["one loss", "two losses"],
)
def test_variable_uses_counts_readers_in_subgraph(ends, uses):
    found = SubGraph(graph(), ends)
    assert {name: found.variable_uses(name) for name in uses} == uses


def test_variable_uses_counts_readers_of_views():
    found = SubGraph(
        by_hand(
            Node("Identity", ("w",), ("w1",)),
            Node("Identity", ("w1",), ("w2",)),
            Node("MatMul", ("x", "w1"), ("a",)),
            Node("MatMul", ("a", "w2"), ("b",)),
            Node("MatMul", ("b", "w"), ("c",)),
        ),
        ["c"],
    )
    assert found.variable_uses("w") == 3


def test_variable_uses_counts_node_once():
    found = SubGraph(by_hand(Node("Mul", ("w", "w"), ("y",))), ["y"])
    assert found.variable_uses("w") == 1


def test_values_captured_by_body_are_ancestors_and_uses():
    body = Subgraph(b"", ("w",))
    found = SubGraph(by_hand(Node("If", ("condition",), ("y",), {"then_branch": body})), ["y"])
    assert found.is_member("w")
    assert found.variable_uses("w") == 1
