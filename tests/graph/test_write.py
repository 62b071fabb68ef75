"""Node lists as models: read back with onnx itself, executed by ONNX Runtime."""

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper, numpy_helper

from kfac_engine.errors import ModelError
from kfac_engine.graph.passes.canonicalize import NEWEST_OPSET, OLDEST_OPSET
from kfac_engine.graph.structure import Input, Node, Subgraph
from kfac_engine.graph.write import build_model, serialize
from tests.graph.running import run_model

FLOAT = np.dtype("float32")
X, Y = Input("x", FLOAT, ("batch", 2)), Input("y", FLOAT, None)


def written_attribute(node, name, domains=None):
    model = build_model([node], [X], [Y], {}, 18, domains=domains)
    return next(entry for entry in model.graph.node[0].attribute if entry.name == name)


@pytest.mark.parametrize("opset", range(OLDEST_OPSET, NEWEST_OPSET + 1))
def test_runtime_executes_all_written_operator_sets(opset):
    model = build_model([Node("Neg", ("x",), ("y",))], [X], [Y], {}, opset)
    x = np.asarray([[1.0, -2.0]], FLOAT)
    np.testing.assert_array_equal(run_model(serialize(model), {"x": x})["y"], -x)


@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((3, "batch", None), [("dim_value", 3), ("dim_param", "batch"), (None, None)]),
        ((), []),
        (None, None),
    ],
    ids=["size-symbol-open", "scalar", "no-rank"],
)
def test_written_shape_has_known_sizes(shape, sides):
    entry = build_model([], [Input("x", FLOAT, shape)], [], {}, 18).graph.input[0]
    form = entry.type.tensor_type
    assert form.elem_type == onnx.TensorProto.FLOAT
    assert form.HasField("shape") == (sides is not None)
    found = [(side.WhichOneof("value"), side) for side in form.shape.dim]
    assert [(kind, getattr(side, kind) if kind else None) for kind, side in found] == (sides or [])


@pytest.mark.parametrize(
    ("op", "name", "value", "expected"),
    [
        ("LeakyRelu", "alpha", 1, AttributeProto.FLOAT),
        ("Gemm", "alpha", 0.5, AttributeProto.FLOAT),
        ("Gemm", "transB", 1, AttributeProto.INT),
        ("Transpose", "perm", (), AttributeProto.INTS),
        ("Resize", "axes", (0, 1), AttributeProto.INTS),
        ("Constant", "value_floats", (), AttributeProto.FLOATS),
        ("Constant", "value_floats", (1, 2), AttributeProto.FLOATS),
        ("Constant", "value_strings", ("a",), AttributeProto.STRINGS),
        ("Conv", "auto_pad", "VALID", AttributeProto.STRING),
        ("Constant", "value", np.eye(2, dtype=FLOAT), AttributeProto.TENSOR),
    ],
)
def test_attribute_has_type_of_operator_schema(op, name, value, expected):
    entry = written_attribute(Node(op, ("x",), ("y",), {name: value}), name)
    assert entry.type == expected
    read = helper.get_attribute_value(entry)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(numpy_helper.to_array(read), value)
    elif isinstance(value, tuple):
        assert [v.decode() if isinstance(v, bytes) else v for v in read] == list(value)
    else:
        assert (read.decode() if isinstance(read, bytes) else read) == value


def test_attribute_of_unknown_operator_has_type_of_value():
    node = Node("Odd", ("x",), ("y",), {"gain": 2.0}, domain="my.ops")
    assert written_attribute(node, "gain", {"my.ops": 1}).type == AttributeProto.FLOAT


def test_subgraph_is_written_unchanged():
    body = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"])],
        "body",
        [],
        [helper.make_empty_tensor_value_info("z")],
    )
    branch = Subgraph(body.SerializeToString(), ("x",))
    node = Node("If", ("c",), ("y",), {"then_branch": branch, "else_branch": branch})
    condition = Input("c", np.dtype("bool"), ())
    model = build_model([node], [X, condition], [Y], {}, 18)
    x = np.asarray([[1.0, -2.0]], FLOAT)
    found = run_model(serialize(model), {"x": x, "c": np.asarray(True)})
    np.testing.assert_array_equal(found["y"], -x)


def test_optional_operands_and_results_may_be_omitted():
    nodes = [Node("Clip", ("x", "", "top"), ("y",), name="clip")]
    model = build_model(nodes, [X], [Y], {"top": np.asarray(0.5, FLOAT)}, 18)
    found = run_model(serialize(model), {"x": np.asarray([[-9.0, 9.0]], FLOAT)})
    np.testing.assert_array_equal(found["y"], np.asarray([[-9.0, 0.5]], FLOAT))


@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE", "INT64", "BOOL"])
def test_constant_keeps_type_and_values(kind):
    dtype = helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(kind))
    values = np.asarray([[0, 1], [1, 0]]).astype(dtype)
    written = build_model([], [], [], {"c": values}, 18).graph.initializer[0]
    assert written.name == "c"
    found = numpy_helper.to_array(written)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)


def test_constants_above_two_gigabytes_raise_error_before_copy():
    huge = np.broadcast_to(np.float32(0), (1 << 30,))
    with pytest.raises(ModelError, match=r"'big' has 4\.3 GB of constants"):
        build_model([], [], [], {"w": huge}, 18, name="big")
