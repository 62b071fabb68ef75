"""One weight in each way that files hold one: under the file's name, with the same gradient."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import parser

import kfac_engine as ke

WEIGHT = np.asarray([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], np.float32)
X = np.asarray([[1.0, 2.0, 3.0], [-1.0, 0.5, 4.0]], np.float32)
COTANGENT = np.asarray([[1.0, -1.0], [2.0, 0.5]], np.float32)
HEAD = "m (float[N,3] x) => (float[N,2] y)"
VALUES = "{1, -2, 0.5, 3, -1, 0.25}"
PRODUCT = "[product] y = MatMul (x, w)"
LIST = "[1.0, -2.0, 0.5, 3.0, -1.0, 0.25]"


def text(body, opset=18, more=""):
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}{more}]> {HEAD} {{ {body} }}'
    )


def held(nodes=PRODUCT, opset=18, ir=8, inputs="", more=""):
    """Nodes that make ``y``, around the initializer ``w``."""
    return parser.parse_model(
        f"""<ir_version: {ir}, opset_import: ["": {opset}]>
        m (float[N,3] x{inputs}) => (float[N,2] y) <float[3,2] w = {VALUES}{more}> {{ {nodes} }}"""
    )


def nested_functions():
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "own": 1]> {HEAD} '
        f"{{ w = Constant <value = float[3,2] {VALUES}> ()  y = own.outer (x, w) }} "
        '<domain: "own", opset_import: ["": 18, "own": 1]> outer (a, b) => (c) '
        "{ c = own.inner (a, b) } "
        '<domain: "own", opset_import: ["": 18]> inner (a, b) => (c) { c = MatMul (a, b) }'
    )


SPELLINGS: dict[str, Callable[[], onnx.ModelProto]] = {
    "initializer": held,
    "initializer among the inputs": lambda: held(opset=7, ir=3, inputs=", float[3,2] w"),
    "Constant": lambda: text(f"w = Constant <value = float[3,2] {VALUES}> () y = MatMul (x, w)"),
    "Constant of floats": lambda: text(
        f"w = Constant <value_floats = {LIST}> () s = Constant <value_ints = [3, 2]> () "
        f"v = Reshape (w, s) y = MatMul (x, v)"
    ),
    "Identity and Cast": lambda: held(
        "a = Identity (w)  b = Cast <to = 11> (a)  c = Cast <to = 1> (b)  y = MatMul (x, c)"
    ),
    "equal node names": lambda: held("[product] a = Identity (w)  [product] y = MatMul (x, a)"),
    "disordered nodes": lambda: held("y = MatMul (x, b)  b = Identity (a)  a = Identity (w)"),
    "beside empty and unread ones": lambda: held(
        more=", float[0,2] empty = {}, float[3] unread = {1, 1, 1}"
    ),
    "inside functions": nested_functions,
    **{
        f"operator set {opset}": lambda opset=opset: held(opset=opset, ir=10)
        for opset in (1, 6, 8, 9, 11, 13, 17, 21, 26)
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_weight_in_any_form_has_name_and_gradient(spelling):
    model = ke.load_model(SPELLINGS[spelling]())
    assert list(model.parameters) == ["w"]
    trace = model.run({"x": X})
    np.testing.assert_allclose(trace["y"], X @ WEIGHT, rtol=1e-6)
    found = trace.vjp({"y": COTANGENT}, ["w"])["w"]
    np.testing.assert_allclose(found, (X.T @ COTANGENT).reshape(found.shape), rtol=1e-6)


def test_weight_in_constant_branch_is_parameter():
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
