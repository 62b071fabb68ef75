"""One weight in each way that files hold one: under the file's name, with the same gradient."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import kfac_engine as ke

WEIGHT = np.asarray([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], np.float32)
X = np.asarray([[1.0, 2.0, 3.0], [-1.0, 0.5, 4.0]], np.float32)
COTANGENT = np.asarray([[1.0, -1.0], [2.0, 0.5]], np.float32)
HEAD = "m (float[N,3] x) => (float[N,2] y)"
VALUES = "{1, -2, 0.5, 3, -1, 0.25}"
LIST = "[1.0, -2.0, 0.5, 3.0, -1.0, 0.25]"


def text(body: str, opset: int = 18, more: str = "") -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}{more}]> {HEAD} {{ {body} }}'
    )


def held(*nodes: onnx.NodeProto, opset: int = 18, ir: int = 8) -> onnx.ModelProto:
    """Nodes around the initializer ``w``; the last one makes ``y``."""
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def product(weight: str = "w", name: str = "product") -> onnx.NodeProto:
    return helper.make_node("MatMul", ["x", weight], ["y"], name)


def as_input() -> onnx.ModelProto:
    model = held(product(), opset=7, ir=3)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2]))
    return model


def cast_chain() -> onnx.ModelProto:
    return held(
        helper.make_node("Identity", ["w"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT),
        product("c"),
    )


def same_node_names() -> onnx.ModelProto:
    return held(helper.make_node("Identity", ["w"], ["a"], "product"), product("a"))


def disordered() -> onnx.ModelProto:
    return held(product("b"), helper.make_node("Identity", ["a"], ["b"]),
                helper.make_node("Identity", ["w"], ["a"]))  # fmt: skip


def with_empty_and_unread() -> onnx.ModelProto:
    model = held(product())
    for name, array in (("empty", np.zeros((0, 2))), ("unread", np.ones(3))):
        tensor = numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    return model


def nested_functions() -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "own": 1]> {HEAD} '
        f"{{ w = Constant <value = float[3,2] {VALUES}> ()  y = own.outer (x, w) }} "
        '<domain: "own", opset_import: ["": 18, "own": 1]> outer (a, b) => (c) '
        "{ c = own.inner (a, b) } "
        '<domain: "own", opset_import: ["": 18]> inner (a, b) => (c) { c = MatMul (a, b) }'
    )


SPELLINGS: dict[str, Callable[[], onnx.ModelProto]] = {
    "initializer": lambda: held(product()),
    "initializer among the inputs": as_input,
    "Constant": lambda: text(f"w = Constant <value = float[3,2] {VALUES}> () y = MatMul (x, w)"),
    "Constant of floats": lambda: text(
        f"w = Constant <value_floats = {LIST}> () s = Constant <value_ints = [3, 2]> () "
        f"v = Reshape (w, s) y = MatMul (x, v)"
    ),
    "Identity and Cast": cast_chain,
    "equal node names": same_node_names,
    "disordered nodes": disordered,
    "beside empty and unread ones": with_empty_and_unread,
    "inside functions": nested_functions,
    **{
        f"operator set {opset}": lambda opset=opset: held(product(), opset=opset, ir=10)
        for opset in (1, 6, 8, 9, 11, 13, 17, 21, 26)
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_weight_in_any_form_has_name_and_gradient(spelling: str) -> None:
    model = ke.load_model(SPELLINGS[spelling]())
    assert list(model.parameters) == ["w"]
    trace = model.run({"x": X})
    np.testing.assert_allclose(trace["y"], X @ WEIGHT, rtol=1e-6)
    found = trace.vjp({"y": COTANGENT}, ["w"])["w"]
    np.testing.assert_allclose(found, (X.T @ COTANGENT).reshape(found.shape), rtol=1e-6)


def test_weight_in_constant_branch_is_parameter() -> None:
    model = text(
        f"yes = Constant <value = bool {{1}}> () "
        f"y = If (yes) <then_branch = t () => (float[N,2] z) "
        f"{{ w = Constant <value = float[3,2] {VALUES}> () z = MatMul (x, w) }}, "
        f"else_branch = e () => (float[N,2] z) "
        f"{{ v = Constant <value = float[3,2] {VALUES}> () z = MatMul (x, v) }}>"
    )
    loaded = ke.load_model(model)
    (name,) = loaded.parameters
    assert name.endswith("w")
    found = loaded.run({"x": X}).vjp({"y": COTANGENT}, [name])[name]
    np.testing.assert_allclose(found, X.T @ COTANGENT, rtol=1e-6)
