"""The canonical graph is one spelling of what the file says."""

import numpy as np
import onnx
import pytest
from onnx import helper

from kfac_engine.graph.load import load_graph, load_model
from tests import models
from tests.graph.running import CLOSE, assert_same, relabelled, run_graph, run_model, simple_model


@pytest.mark.parametrize("name", models.MODELS)
def test_canonical_graph_equals_model(name):
    model = models.MODELS[name]()
    feeds = models.random_inputs(model)
    expected = run_model(model.SerializeToString(), feeds)
    assert_same(run_graph(load_graph(model), feeds), expected, CLOSE)


def test_path_bytes_and_model_give_the_same_graph(tmp_path):
    model = models.mlp()
    path = tmp_path / "mlp.onnx"
    onnx.save(model, path)
    graphs = [load_graph(source) for source in (path, str(path), path.read_bytes(), model)]
    first = graphs[0]
    for graph in graphs[1:]:
        assert graph.nodes == first.nodes
        assert graph.inputs == first.inputs
        assert graph.outputs == first.outputs
        assert_same(graph.constants, first.constants, 0)
    assert [graph.name for graph in graphs] == ["mlp.onnx", "mlp.onnx", "test_model", "test_model"]


def test_loading_does_not_change_message():
    model = relabelled(models.cnn(), 11)
    before = model.SerializeToString()
    load_graph(model)
    assert model.SerializeToString() == before


CONSTANT_FORMS = {
    "value": ("float[2] {1.0, 2.0}", np.asarray([1, 2], np.float32)),
    "value_float": ("1.5", np.float32(1.5)),
    "value_floats": ("[1.0, 2.0]", np.asarray([1, 2], np.float32)),
    "value_int": ("3", np.int64(3)),
    "value_ints": ("[3, 4]", np.asarray([3, 4], np.int64)),
    "value_string": ('"a"', np.asarray("a", object)),
    "value_strings": ('["a", "b"]', np.asarray(["a", "b"], object)),
}


@pytest.mark.parametrize("name", CONSTANT_FORMS)
def test_constant_node_becomes_a_constant(name):
    value, expected = CONSTANT_FORMS[name]
    graph = load_graph(simple_model(f"c = Constant <{name} = {value}> ()  y = Identity (c)"))
    assert [node.op for node in graph.nodes] == ["Identity"]
    assert graph.constants["c"].dtype == expected.dtype
    np.testing.assert_array_equal(graph.constants["c"], expected)


def test_filled_weight_is_broadcast_view():
    nodes = "w = ConstantOfShape <value = float[1] {0.02}> (shape)  y = MatMul (x, w)"
    graph = load_graph(simple_model(nodes, shape=np.array([2, 10**6])))
    assert [node.op for node in graph.nodes] == ["MatMul"]
    assert graph.constants["w"].shape == (2, 10**6)
    assert graph.constants["w"].strides == (0, 0)
    assert graph.constants["w"].min() == graph.constants["w"].max() == np.float32(0.02)


def test_fill_of_dynamic_shape_remains_node():
    graph = load_graph(simple_model("s = Shape (x)  y = ConstantOfShape (s)"))
    assert [node.op for node in graph.nodes] == ["Shape", "ConstantOfShape"]


def test_initializers_listed_as_inputs_are_constants():
    model = models.mlp()
    declared = [
        helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
        for entry in model.graph.initializer
    ]
    model.graph.input.extend(declared)
    assert [entry.name for entry in load_graph(model).inputs] == ["input"]


def test_nodes_have_unique_names():
    model = models.mlp()
    for node, name in zip(model.graph.node, ["same", "same", "", "", "Gemm_4"], strict=True):
        node.name = name
    names = [node.name for node in load_graph(model).nodes]
    assert len(set(names)) == len(names)
    assert all(names)
    assert names[0] == "same"


def test_arrays_are_read_only():
    graph = load_graph(models.layer_norm())
    assert not any(array.flags.writeable for array in graph.constants.values())


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("float[4,2] x", (4, 2)),
        ("float[n,2] x", ("n", 2)),
        ("float[?,?] x", (None, None)),
        ("float[] x", None),
        ("float x", ()),
    ],
    ids=["sizes", "symbol", "open", "no-rank", "scalar"],
)
def test_input_shape_is_declared_shape(declared, expected):
    model = simple_model("y = Identity (x)", declared)
    assert load_graph(model).inputs[0].shape == expected


def test_unsorted_nodes_are_sorted_topologically():
    model = models.cnn()
    feeds = models.random_inputs(model)
    expected = run_model(model.SerializeToString(), feeds)
    shuffled = onnx.ModelProto.FromString(model.SerializeToString())
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(reversed(model.graph.node))
    assert_same(run_graph(load_graph(shuffled), feeds), expected, CLOSE)


def test_operators_of_other_domains_keep_version():
    model = simple_model("y = com.microsoft.Gelu (x)")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    graph = load_graph(model)
    assert graph.nodes[0].qualified_op == "com.microsoft::Gelu"
    assert graph.domains == {"com.microsoft": 1}


def test_long_name_of_standard_domain_is_accepted():
    model = models.mlp()
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"
    graph = load_graph(model)
    assert {node.domain for node in graph.nodes} == {""}
    assert graph.opset == 18
    assert not graph.domains


def test_template_contains_no_weights():
    model = models.mlp((500, 500, 10))
    assert load_model(model).template.ByteSize() < 2000 < model.ByteSize()
