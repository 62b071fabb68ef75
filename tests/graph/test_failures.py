"""Whatever a malformed model makes a library raise is one error of ours that says where."""

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

import kfac_engine as ke
from kfac_engine.graph.failures import model_errors
from kfac_engine.sessions.session import FAILURES
from tests.comparing import assert_arrays_close
from tests.models import written

# A declared shape that contradicts the one that is inferred, in an operator set that is upgraded.
FALSE_SHAPE = """
<ir_version: 8, opset_import: ["": 9]>
g (float[n,2] x) => (float[n,3] b) <float[2,3] W = {1,2,3,4,5,6}, float[3] b = {1,2,3}>
{ h = MatMul(x, W)  y = Add(h, b) }
"""
# A function that passes on what it is not given.
BODIES = {
    "a Scan hands over more than its body takes": (
        """y = Scan <num_scan_inputs = 1, body = b (float[4] a) => (float[4] c) {
             c = Mul(a, W) }> (W, x)""",
        "Scan .* body of 1 operands and 1 results, but 2 and 1 are needed",
    ),
    "a Scan scans nothing": (
        """y = Scan <num_scan_inputs = 0, body = b (float[4] a) => (float[4] c) {
             c = Mul(a, W) }> (x)""",
        "Scan .* scans 0 of its 1 operands",
    ),
    "a Loop hands over more than its body takes": (
        """y = Loop <body = b (int64 i, bool go) => (bool on) { on = Identity(go) }> (n, "", x)""",
        "Loop .* body of 2 operands and 1 results, but 3 and 2 are needed",
    ),
    "a Loop gives more than its body": (
        """y, z = Loop <body = b (int64 i, bool go, float[n, 4] a) => (bool on, float[n, 4] c) {
             on = Identity(go)  c = Mul(a, W) }> (n, "", x)""",
        "Loop .* body of 3 operands and 2 results, but 3 and 3 are needed",
    ),
    "a branch gives nothing": (
        """y = If <then_branch = t () => () { }, else_branch = e () => (float c) {
             c = Identity(x) }> (go)""",
        "If .* then_branch of 0 operands and 0 results, but 0 and 1 are needed",
    ),
}
GRAPH = """
<ir_version: 8, opset_import: ["": 18]>
g (float[n,4] x) => (float[n,4] y) <float[4] W = {{1,2,3,4}}, int64 n = {{3}}, bool go = {{1}}>
{{ {} }}
"""


def test_wrong_shape_in_old_model_raises_model_error():
    with pytest.raises(ke.ModelError, match=r"operator set 9 cannot be brought to 18: .*rank"):
        ke.load_model(onnx.parser.parse_model(FALSE_SHAPE))


@pytest.mark.parametrize(("node", "message"), BODIES.values(), ids=BODIES)
def test_body_with_wrong_operands_raises_error(node, message):
    with pytest.raises(ke.ModelError, match=message):
        ke.load_model(onnx.parser.parse_model(GRAPH.format(node)))


def test_bodies_with_optional_operands_are_loaded():
    """A loop without initial values, and one whose scanned results nobody reads."""
    plain = """
      z = Loop <body = b (int64 i, bool go_on) => (bool on, int64 k) {
        on = Identity(go_on)  k = Identity(i) }> (n, "")
      v, unread = Loop <body = c (int64 i, bool go_on, float[n, 4] a)
        => (bool on, float[n, 4] c, int64 k) {
        on = Identity(go_on)  c = Mul(a, W)  k = Identity(i) }> (n, "", x)
      s = ReduceSum <keepdims = 0> (z)
      f = CastLike(s, x)
      y = Mul(v, f)
    """
    model = ke.load_model(onnx.parser.parse_model(GRAPH.format(plain)))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y = model.run({"x": x})["y"]
    np.testing.assert_allclose(y, 3 * x * np.array([1, 2, 3, 4], np.float32) ** 3)


RAISED = [
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    onnx.version_converter.ConvertError,
    IndexError,
    TypeError,
    OverflowError,
    RuntimeError,
    UnicodeError,
]


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_onnx_exceptions_become_model_errors(kind):
    with (
        pytest.raises(ke.ModelError, match=r"^it failed: why; do that\.$"),
        model_errors("it failed", "do that"),
    ):
        raise kind("why\nand where")


def test_kfac_errors_keep_their_type():
    with pytest.raises(ke.UnsupportedError, match="mine"), model_errors("it failed"):
        raise ke.UnsupportedError("mine")


def test_onnxruntime_exceptions_are_converted():
    own = {kind for kind in vars(ort_errors).values() if str(kind).startswith("<class")}
    raised = {kind for kind in own if issubclass(kind, Exception)}
    assert len(raised) > 10
    assert raised <= set(FAILURES)


def resized(sides):
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[n,1,4,4] x) => (float[] y)
        <float[1,1,1,1] one = {{1}}, float[{sides}] scales = {{1,1,2,2}}>
        {{ same = Conv(x, one)  y = Resize <mode = "nearest"> (same, "", scales) }}"""
    )


@pytest.mark.parametrize("sides", ["4", "1,4"], ids=["vector", "matrix"])
def test_resize_scales_may_be_matrix(sides):
    """ONNX Runtime takes them; each pixel is read by four."""
    model = ke.load_model(resized(sides))
    trace = model.run({"x": np.zeros((2, 1, 4, 4), np.float32)})
    found = trace.vjp({"y": np.ones((2, 1, 8, 8), np.float32)}, ["x"])["x"]
    np.testing.assert_array_equal(found, np.full((2, 1, 4, 4), 4, np.float32))


def test_model_with_text_input_can_be_inspected():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[n,4] x, string[n] s) => (float[n,3] y, string[n] t)
        <float[4,3] W = {1,2,3,4,5,6,7,8,9,10,11,12}> { y = MatMul(x, W)  t = Identity(s) }"""
    )
    engine = ke.Engine.from_onnx(model, loss="categorical", output="y", threads=1)
    assert engine.memory(2).total > 0
    (report,) = engine.losses
    assert (report.output, report.batch_axis, report.coupling) == ("y", 0, "")


@pytest.mark.parametrize("transposed", ["transA", "transB"])
def test_gemm_transposes_for_any_nonzero_flag(transposed):
    """As ONNX says; the gradient is that of the flag 1."""
    x = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    g = np.arange(9, dtype=np.float32).reshape(3, 3)
    found = []
    for flag in (1, 2, -1):
        node = f"output = Gemm <{transposed} = {flag}> (input, w)"
        model = ke.load_model(written("3,3", "w(3,3)", node))
        found.append(model.run({"input": x}).vjp({"output": g}, ["input", "w"]))
    w = model.parameters["w"]
    wt = w.T if transposed == "transB" else w
    left = g @ wt.T
    wanted = {"input": left.T if transposed == "transA" else left}
    wanted["w"] = (g.T @ x) if transposed == "transB" else (x @ g)
    for gradients in found:
        assert_arrays_close(gradients, wanted, rtol=1e-5, atol=1e-5)


def test_damaged_domain_name_raises_error():
    data = onnx.parser.parse_model(FALSE_SHAPE.replace('["": 9]', '["": 18, "domain": 1]'))
    damaged = data.SerializeToString().replace(b"domain", b"\xef\xffmain")
    with pytest.raises(ke.ModelError, match="not UTF-8"):
        ke.load_model(damaged)
