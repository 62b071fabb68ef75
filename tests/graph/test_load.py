"""The canonical graph computes what the file says, whatever its spelling."""

import mmap
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.load import load_graph, load_model
from tests import models
from tests.graph.running import CARRIED, run_graph, run_model

# The same kernels run in both, but upgraded operators may sum in another order.
CLOSE = 1e-6
# What onnx stored beside its models came from PyTorch in float32.
STORED_CLOSE = 1e-4


def assert_same(found, expected, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance)


def relabelled(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """``model`` as one of operator set ``opset``, where its operators have the same form."""
    model.opset_import[0].version = opset
    model.ir_version = min(helper.find_min_ir_version_for(model.opset_import), 13)
    return model


# -- the function stays what it is ----------------------------------------------------------------


@pytest.mark.parametrize("name", models.MODELS)
def test_canonical_graph_computes_what_the_model_computes(name: str) -> None:
    model = models.MODELS[name]()
    feeds = models.random_inputs(model)
    expected = run_model(model.SerializeToString(), feeds)
    assert_same(run_graph(load_graph(model), feeds), expected, CLOSE)


@pytest.mark.parametrize("opset", [9, 11, 13, 16, 18, 21, 24, 26])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_block"])
def test_every_operator_set_computes_the_same(name: str, opset: int) -> None:
    model = relabelled(models.MODELS[name](), opset)
    feeds = models.random_inputs(model)
    graph = load_graph(model)
    assert graph.opset == max(opset, 18)
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


OLD_FORMS = {
    "softmax_flattens": (11, "y = Softmax <axis=1> (x)"),
    "log_softmax_flattens": (11, "y = LogSoftmax <axis=1> (x)"),
    "reduce_axes": (13, "y = ReduceMean <axes=[1], keepdims=0> (x)"),
    "reduce_sum_axes": (11, "y = ReduceSum <axes=[-1]> (x)"),
    "squeeze_axes": (11, "u = Unsqueeze <axes=[0]> (x)  y = Squeeze <axes=[0]> (u)"),
    "slice_attributes": (9, "y = Slice <axes=[2], starts=[1], ends=[3]> (x)"),
    "pad_attributes": (9, "y = Pad <pads=[0,0,1,0,0,2], value=0.5> (x)"),
    "clip_bounds": (9, "y = Clip <min=-0.5, max=0.5> (x)"),
    "dropout_ratio": (9, "y = Dropout <ratio=0.5> (x)"),
    "split_sizes": (11, "y, z = Split <axis=2, split=[1,3]> (x)"),
    "split_equal": (13, "y, z = Split <axis=2> (x)"),
    "upsample": (8, "y = Upsample <scales=[1.0, 1.0, 2.0]> (x)"),
    "flatten": (9, "y = Flatten <axis=1> (x)"),
    "upsample_linear": (7, 'y = Upsample <mode="linear", scales=[1.0, 1.0, 2.0]> (x)'),
    "resize_by_fraction": (
        10,
        'y = Resize <mode="nearest"> (x, s)',
        "<float[3] s = {1, 1.5, 1.6}>",
    ),
    "resize_linear": (10, 'y = Resize <mode="linear"> (x, s)', "<float[3] s = {1, 1, 0.6}>"),
    "roi_align": (
        10,
        "u = Unsqueeze <axes=[0]> (x)  y = RoiAlign <output_width=2> (u, r, b)",
        "<float[1,4] r = {0, 0, 2, 1}, int64[1] b = {0}>",
    ),
    "top_k": (9, "y, i = TopK <k=2> (x)"),
    "batch_norm_first_form": (
        7,
        "y = BatchNormalization <spatial=1> (x, s, s, s, v)",
        "<float[3] s = {1, 2, 3}, float[3] v = {3, 2, 1}>",
    ),
}


@pytest.mark.parametrize("form", OLD_FORMS.values(), ids=OLD_FORMS)
def test_old_form_of_an_operator_computes_the_same(form: tuple[int, str, *tuple[str, ...]]) -> None:
    opset, body, *constants = form
    model = parser.parse_model(
        f'<ir_version: 7, opset_import: ["": {opset}]> '
        f"m (float[2,3,4] x) => (float[] y) {''.join(constants)} {{ {body} }}"
    )
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    graph = load_graph(model)
    assert graph.opset == 18
    expected = run_model(model.SerializeToString(), {"x": x})
    assert_same(run_graph(graph, {"x": x}), expected, CLOSE)


# These have one slope a channel in a form that newer operators read differently.
CHANNEL_SLOPES = {f"test_PReLU_{rank}d_multiparam" for rank in (1, 2, 3)}

CONVERTED = [
    path.parent
    for family in ("pytorch-converted", "pytorch-operator")
    for path in sorted((CARRIED / family).glob("*/model.onnx"))
    if path.parent.name not in CHANNEL_SLOPES
]


@pytest.mark.parametrize("folder", CONVERTED, ids=lambda folder: folder.name)
def test_carried_model_gives_the_stored_outputs(folder: Path) -> None:
    graph = load_graph(folder / "model.onnx")
    data = folder / "test_data_set_0"
    arrays = [numpy_helper.to_array(onnx.load_tensor(p)) for p in sorted(data.glob("input_*.pb"))]
    feeds = dict(zip((entry.name for entry in graph.inputs), arrays, strict=True))
    stored = [numpy_helper.to_array(onnx.load_tensor(p)) for p in sorted(data.glob("output_*.pb"))]
    found = run_graph(graph, feeds, stored[0].dtype.name)
    assert_same(found, dict(zip(graph.outputs, stored, strict=True)), STORED_CLOSE)


@pytest.mark.parametrize("name", sorted(CHANNEL_SLOPES))
def test_slopes_that_newer_operators_would_misread_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"PRelu .* without exact counterpart"):
        load_graph(CARRIED / "pytorch-converted" / name / "model.onnx")


@pytest.mark.parametrize(
    ("opset", "op", "operands"),
    [(11, "Hardmax", ["x"]), (10, "Resize", ["x", "halves"]), (10, "Resize", ["x", "x"])],
    ids=["hardmax", "shrinking", "scales-from-data"],
)
def test_form_that_newer_operators_would_misread_is_refused(opset, op, operands) -> None:
    halves = numpy_helper.from_array(np.full(2, 0.5, np.float32), "halves")
    model = simple_model([helper.make_node(op, operands, ["y"])], [halves])
    with pytest.raises(UnsupportedError, match=rf"{op} .* without exact counterpart"):
        load_graph(relabelled(model, opset))


LIGHT = ["squeezenet", "shufflenet", "inception_v1"]
HEAVY = ["bvlc_alexnet", "densenet121", "inception_v2", "resnet50", "vgg19", "zfnet512"]


@pytest.mark.parametrize(
    "name", [*LIGHT, *(pytest.param(name, marks=pytest.mark.slow) for name in HEAVY)]
)
def test_network_whose_weights_are_nodes_computes_the_same(name: str) -> None:
    path = CARRIED / "light" / f"light_{name}.onnx"
    graph = load_graph(path)
    shape = [side or 1 for side in graph.inputs[0].shape]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    feeds = {graph.inputs[0].name: x}
    assert_same(run_graph(graph, feeds), run_model(path.read_bytes(), feeds), CLOSE)


# -- one spelling is left -------------------------------------------------------------------------


def test_path_bytes_and_model_give_the_same_graph(tmp_path: Path) -> None:
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


def test_given_model_is_left_as_it_is() -> None:
    model = relabelled(models.cnn(), 11)
    before = model.SerializeToString()
    load_graph(model)
    assert model.SerializeToString() == before


CONSTANT_FORMS = {
    "value": ({"value": numpy_helper.from_array(np.eye(2))}, np.eye(2)),
    "value_float": ({"value_float": 1.5}, np.float32(1.5)),
    "value_floats": ({"value_floats": [1.0, 2.0]}, np.asarray([1, 2], np.float32)),
    "value_int": ({"value_int": 3}, np.int64(3)),
    "value_ints": ({"value_ints": [3, 4]}, np.asarray([3, 4], np.int64)),
    "value_string": ({"value_string": "a"}, np.asarray("a", object)),
    "value_strings": ({"value_strings": ["a", "b"]}, np.asarray(["a", "b"], object)),
}


@pytest.mark.parametrize(("attributes", "expected"), CONSTANT_FORMS.values(), ids=CONSTANT_FORMS)
def test_constant_node_becomes_a_constant(attributes, expected) -> None:
    nodes = [helper.make_node("Constant", [], ["c"], **attributes)]
    nodes += [helper.make_node("Identity", ["c"], ["y"])]
    graph = load_graph(simple_model(nodes))
    assert [node.op for node in graph.nodes] == ["Identity"]
    assert graph.constants["c"].dtype == expected.dtype
    np.testing.assert_array_equal(graph.constants["c"], expected)


def test_filled_weight_becomes_a_constant_without_memory_of_its_own() -> None:
    value = numpy_helper.from_array(np.asarray([0.02], np.float32))
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"], value=value),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    shape = numpy_helper.from_array(np.asarray([2, 10**6], np.int64), "shape")
    graph = load_graph(simple_model(nodes, [shape]))
    assert [node.op for node in graph.nodes] == ["MatMul"]
    assert graph.constants["w"].shape == (2, 10**6)
    assert graph.constants["w"].strides == (0, 0)
    assert graph.constants["w"].min() == graph.constants["w"].max() == np.float32(0.02)


def test_fill_of_a_shape_that_data_decides_stays_a_node() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["y"]),
    ]
    assert [node.op for node in load_graph(simple_model(nodes)).nodes] == [
        "Shape",
        "ConstantOfShape",
    ]


def test_initializers_that_old_files_list_as_inputs_are_no_inputs() -> None:
    model = models.mlp()
    declared = [
        helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
        for entry in model.graph.initializer
    ]
    model.graph.input.extend(declared)
    assert [entry.name for entry in load_graph(model).inputs] == ["input"]


def test_nodes_get_names_of_their_own() -> None:
    model = models.mlp()
    for node, name in zip(model.graph.node, ["same", "same", "", "", "Gemm_4"], strict=True):
        node.name = name
    names = [node.name for node in load_graph(model).nodes]
    assert len(set(names)) == len(names)
    assert all(names)
    assert names[0] == "same"


def test_arrays_are_read_only() -> None:
    graph = load_graph(models.layer_norm())
    assert not any(array.flags.writeable for array in graph.constants.values())


@pytest.mark.parametrize(
    ("declared", "expected"),
    [((4, 2), (4, 2)), (("n", 2), ("n", 2)), ((None, -1), (None, None)), (None, None), ((), ())],
    ids=["sizes", "symbol", "open", "no-rank", "scalar"],
)
def test_shape_of_an_input_is_what_the_file_states(declared, expected) -> None:
    model = simple_model([helper.make_node("Identity", ["x"], ["y"])], shape=declared)
    assert load_graph(model).inputs[0].shape == expected


def test_unsorted_nodes_come_out_in_topological_order() -> None:
    model = models.cnn()
    feeds = models.random_inputs(model)
    expected = run_model(model.SerializeToString(), feeds)
    shuffled = onnx.ModelProto.FromString(model.SerializeToString())
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(reversed(model.graph.node))
    assert_same(run_graph(load_graph(shuffled), feeds), expected, CLOSE)


def test_functions_are_inlined() -> None:
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
def test_branch_on_a_constant_is_folded(condition: int, opset: int) -> None:
    constant = f", bool c = {{{condition}}}"
    text = BRANCHES.format(opset=opset, inputs="", constants=constant)
    model = parser.parse_model(text)
    graph = load_graph(model)
    assert {node.op for node in graph.nodes} <= {"Identity", "Mul", "Neg"}
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 1, 3)}
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


def test_branch_on_data_stays_a_node_that_tells_what_it_reads() -> None:
    model = parser.parse_model(BRANCHES.format(opset=18, inputs=", bool c", constants=""))
    graph = load_graph(model)
    assert [node.op for node in graph.nodes] == ["If", "If"]
    assert set(graph.nodes[0].captures) == {"x", "w"}
    assert (graph.nodes[0], -1) in graph.consumers["w"]
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 1, 3), "c": np.asarray(True)}
    assert_same(run_graph(graph, feeds), run_model(model.SerializeToString(), feeds), CLOSE)


def test_operators_of_other_domains_pass_with_their_version() -> None:
    nodes = [helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")]
    model = simple_model(nodes)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    graph = load_graph(model)
    assert graph.nodes[0].qualified_op == "com.microsoft::Gelu"
    assert graph.domains == {"com.microsoft": 1}


def test_long_name_of_the_standard_domain_is_understood() -> None:
    model = models.mlp()
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"
    graph = load_graph(model)
    assert {node.domain for node in graph.nodes} == {""}
    assert graph.opset == 18
    assert not graph.domains


# -- external data --------------------------------------------------------------------------------


def save_external(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(
        model, path, save_as_external_data=True, location="weights.bin", size_threshold=0,
        convert_attribute=True,
    )  # fmt: skip
    return path


def file_of(array: np.ndarray) -> mmap.mmap:
    """The mapped file that ``array`` is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    assert isinstance(array, mmap.mmap)
    return array


def test_external_weights_are_views_of_one_mapped_file(tmp_path: Path) -> None:
    model = models.cnn()
    graph = load_graph(save_external(models.cnn(), tmp_path))
    roots = {id(file_of(array)) for array in graph.constants.values()}
    assert len(roots) == 1
    assert_same(graph.constants, load_graph(model).constants, 0)


def test_external_weight_at_an_odd_place_is_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = models.linear(4, 3, bias=False)
    weight = model.graph.initializer[0]
    (tmp_path / "w.bin").write_bytes(b"\0" + weight.raw_data)
    expected = numpy_helper.to_array(weight)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    weight.external_data.add(key="offset", value="1")
    path.write_bytes(model.SerializeToString())
    found = load_graph(path).constants["fc.weight"]
    np.testing.assert_array_equal(found, expected)
    assert found.flags.aligned
    assert not found.flags.writeable


def test_external_weights_of_a_linked_model_are_found_beside_its_target(tmp_path: Path) -> None:
    target = save_external(models.mlp(), tmp_path / "store")
    link = tmp_path / "snapshot" / "model.onnx"
    link.parent.mkdir()
    link.symlink_to(target)
    (link.parent / "weights.bin").symlink_to(target.parent / "weights.bin")
    assert_same(load_graph(link).constants, load_graph(models.mlp()).constants, 0)


def test_external_tensors_in_attributes_are_read(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.arange(2000, dtype=np.float32))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=value),
        helper.make_node("Identity", ["c"], ["y"]),
    ]
    path = save_external(simple_model(nodes), tmp_path)
    assert os.path.getsize(path) < 1000 < os.path.getsize(tmp_path / "weights.bin")  # noqa: PTH202
    np.testing.assert_array_equal(load_graph(path).constants["c"], np.arange(2000))


def test_template_holds_no_weights() -> None:
    model = models.mlp((500, 500, 10))
    assert load_model(model).template.ByteSize() < 2000 < model.ByteSize()


def simple_model(nodes, initializers=(), shape=("n", 2)) -> onnx.ModelProto:
    """Input ``x``, output ``y``; the nodes are not checked."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph(nodes, "simple", [x], [y], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
