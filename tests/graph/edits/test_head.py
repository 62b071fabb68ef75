"""A head with other weights: the spellings of exporters, what follows the head, and errors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper, parser

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from tests import models

# float32 products of a few dozen terms.
RTOL = 1e-5
D, OLD, NEW = 6, 10, 4
MICROSOFT = ', "com.microsoft": 1'


def softmax(z: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(z - z.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@dataclass(frozen=True)
class Row:
    """A file of a body (a dense layer and Tanh to ``h``) and a head.

    Attributes:
        nodes: Text of the nodes after ``h``.
        weights: Shapes of float constants.
        tail: What follows the head, in NumPy.
        flipped: Whether the head's weight has its outputs first.
        whole: Integer constants.
        old: Number of outputs of the old head.
    """

    nodes: str
    weights: dict[str, tuple[int, ...]]
    tail: Callable[[np.ndarray], np.ndarray] = lambda z: z
    flipped: bool = False
    whole: dict[str, np.ndarray] | None = None
    old: int = OLD

    @property
    def model(self) -> onnx.ModelProto:
        model = parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 18{MICROSOFT}]> '
            f"m (float[N,5] x) => (float[N,{self.old}] y) "
            f"{{ first = MatMul (x, body)  h = Tanh (first)  {self.nodes} }}"
        )
        rng = np.random.default_rng(0)
        for name, shape in {"body": (5, D), **self.weights}.items():
            array = rng.normal(size=shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        for name, array in (self.whole or {}).items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return model


def ints(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)


MATMUL, GEMM = "y = MatMul (h, w)", "y = Gemm (h, w, b)"
INTEGERS = np.random.default_rng(1).integers(-9, 9, (D, OLD)).astype(np.int8)
ROWS = {
    "MatMul": Row(MATMUL, {"w": (D, OLD)}),
    "MatMul and Add": Row("z = MatMul (h, w)  y = Add (z, b)", {"w": (D, OLD), "b": (OLD,)}),
    "Add, bias first": Row("z = MatMul (h, w)  y = Add (b, z)", {"w": (D, OLD), "b": (1, OLD)}),
    "Gemm": Row(GEMM, {"w": (D, OLD), "b": (OLD,)}),
    "Gemm of torch": Row(
        "y = Gemm <transB = 1> (h, w, b)", {"w": (OLD, D), "b": (OLD,)}, flipped=True
    ),
    "Gemm without bias": Row("y = Gemm <transB = 1> (h, w)", {"w": (OLD, D)}, flipped=True),
    "Transpose of a weight": Row(
        "t = Transpose <perm = [1, 0]> (w)  y = MatMul (h, t)", {"w": (OLD, D)}
    ),
    "Softmax": Row("z = Gemm (h, w, b)  y = Softmax (z)",
                   {"w": (D, OLD), "b": (OLD,)}, softmax),
    "Softmax in parts": Row(
        "z = MatMul (h, w)  m = ReduceMax (z, last)  c = Sub (z, m)  e = Exp (c) "
        "t = ReduceSum (e, last)  y = Div (e, t)",
        {"w": (D, OLD)}, softmax, whole={"last": ints(-1)},
    ),
    "Softmax at a temperature": Row(
        "z = MatMul (h, w)  c = Mul (z, two)  y = Softmax (c)", {"w": (D, OLD)},
        lambda z: softmax(2 * z), whole={"two": np.float32(2)},
    ),
    "Reshape": Row(
        "z = MatMul (h, w)  y = Reshape (z, to)", {"w": (D, OLD)}, whole={"to": ints(-1, OLD)}
    ),
    "Reshape with Concat": Row(
        "z = MatMul (h, w)  q = Shape <end = 1> (x)  to = Concat <axis = 0> (q, n) "
        "y = Reshape (z, to)", {"w": (D, OLD)}, whole={"n": ints(OLD)},
    ),
    "convolution": Row(
        "i = Reshape (h, to)  z = Conv (i, w, b)  p = GlobalAveragePool (z)  y = Flatten (p)",
        {"w": (OLD, D, 1, 1), "b": (OLD,)}, whole={"to": ints(-1, D, 1, 1)}, flipped=True,
    ),
    "convolution and Add": Row(
        "i = Reshape (h, to)  z = Conv (i, w)  a = Add (z, b)  y = Reshape (a, flat)",
        {"w": (OLD, D, 1, 1), "b": (OLD, 1, 1)},
        whole={"to": ints(-1, D, 1, 1), "flat": ints(0, OLD)}, flipped=True,
    ),
    "dequantized": Row(
        "v = DequantizeLinear <axis = 1> (q, s)  z = MatMul (h, v)  y = Add (z, b)",
        {"s": (OLD,), "b": (OLD,)}, whole={"q": INTEGERS},
    ),
    "rounded results": Row(
        "v = DequantizeLinear (q, s)  z = MatMul (h, v)  r = QuantizeLinear (z, s, o) "
        "y = DequantizeLinear (r, s, o)",
        {"s": ()}, whole={"q": INTEGERS, "o": np.int8(0)},
    ),
    "four bits": Row(
        f"y = com.microsoft.MatMulNBits <K = {D}, N = {OLD}, bits = 4, block_size = 16> (h, q, s)",
        {"s": (OLD,)}, whole={"q": np.zeros((OLD, 1, 8), np.uint8)},
    ),
    "eight bits, bias": Row(
        f"y = com.microsoft.MatMulNBits <K = {D}, N = {OLD}, bits = 8, block_size = 16>"
        " (h, q, s, , , b)",
        {"s": (OLD,), "b": (OLD,)}, whole={"q": np.zeros((OLD, 1, 16), np.uint8)},
    ),
    "fused": Row(
        "y = com.microsoft.FusedMatMul <transB = 1> (h, w)", {"w": (OLD, D)}, flipped=True
    ),
    "tied": Row(
        "i = Cast <to = 7> (h)  f = Gather (w, zero)  g = Add (h, f)  t = Transpose (w) "
        "y = MatMul (g, t)", {"w": (OLD, D)}, whole={"zero": ints(0)},
    ),
    "one probability": Row("z = MatMul (h, w)  y = Sigmoid (z)", {"w": (D, 1)}, old=1),
    "several probabilities": Row(
        "z = MatMul (h, w)  y = Sigmoid (z)", {"w": (D, OLD)}, lambda z: 1 / (1 + np.exp(-z))
    ),
}  # fmt: skip


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *names: str) -> list[np.ndarray]:
    """Outputs, and inner values by name."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    declared = {entry.name for entry in shown.graph.output}
    shown.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in declared
    )
    session = ort.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names) or None, feeds)


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


def shape(model: onnx.ModelProto, output: str) -> tuple[str | int, ...]:
    entry = next(entry for entry in model.graph.output if entry.name == output)
    dims = entry.type.tensor_type.shape.dim
    return tuple(dim.dim_param or dim.dim_value for dim in dims)


X = np.random.default_rng(2).normal(size=(7, 5)).astype(np.float32)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_new_head_multiplies_the_same_features_with_new_weights(row):
    old = row.model
    before = old.SerializeToString()
    edited = ke.replace_head(old, NEW, seed=3)
    assert old.SerializeToString() == before, "the argument is unchanged"
    onnx.checker.check_model(edited)
    feature = "g" if "g = " in row.nodes else "h"
    (features,) = run(old, {"x": X}, feature)
    y, same = run(edited, {"x": X}, "y", feature)
    np.testing.assert_array_equal(same, features)
    head = weights(edited)
    W = head["head.weight"].reshape(head["head.weight"].shape[:2]).astype(np.float64)
    z = features @ (W.T if row.flipped else W)
    assert not head.get("head.bias", np.zeros(1)).any()
    assert ("head.bias" in head) == ("b" in row.weights)
    np.testing.assert_allclose(y, row.tail(z), rtol=RTOL, atol=1e-6)
    assert shape(edited, "y") == ("N", NEW)
    read = {name for node in edited.graph.node for name in node.input}
    assert set(head) <= read, "weights that nothing reads are removed"


@pytest.mark.parametrize("name", ["Gemm of torch", "convolution and Add", "four bits"])
def test_head_can_be_replaced_again(name):
    once = ke.replace_head(ROWS[name].model, NEW)
    twice = ke.replace_head(once, OLD)
    assert weights(once).keys() == weights(twice).keys()
    assert shape(twice, "y") == ("N", OLD)
    assert run(twice, {"x": X})[0].shape == (7, OLD)


def test_outputs_of_a_regression_have_no_probabilities():
    edited = ke.replace_head(ROWS["Softmax"].model, outputs=3)
    assert "Softmax" not in {node.op_type for node in edited.graph.node}
    assert run(edited, {"x": X})[0].shape == (7, 3)


def test_all_layers_after_the_head_are_removed_with_at():
    model = models.mlp()
    entry = model.graph.input[0].name
    edited = ke.replace_head(model, NEW, at=entry)
    (node,) = edited.graph.node
    output = model.graph.output[0].name
    assert (node.op_type, shape(edited, output)) == ("Gemm", ("batch", NEW))
    assert set(weights(edited)) == {"head.weight", "head.bias"}


def test_labels_of_the_old_classes_are_removed_with_at():
    row = Row(
        "z = MatMul (h, w)  p = Softmax (z)  i = ArgMax <axis = 1, keepdims = 0> (z) "
        "l = Gather (names, i)  y = Mul (p, each)",
        {"w": (D, OLD), "each": (OLD,)}, whole={"names": np.arange(OLD)},
    )  # fmt: skip
    model = row.model
    model.graph.output.append(helper.make_tensor_value_info("l", onnx.TensorProto.INT64, ["N"]))
    with pytest.raises(
        ke.UnsupportedError, match=r"Gather.* needs its old number of outputs, 10; .*at="
    ):
        ke.replace_head(model, NEW)
    edited = ke.replace_head(model, NEW, at="h")
    assert [entry.name for entry in edited.graph.output] == ["y"]
    assert run(edited, {"x": X})[0].shape == (7, NEW)


TWO = Row(
    "y = MatMul (h, w)  z = MatMul (h, v)  n = LayerNormalization (g, scale)",
    {"w": (D, OLD), "v": (D, OLD)},
)
REFUSED = {
    "neither number": (GEMM, {}, ke.InputError, "classes=N"),
    "both numbers": (GEMM, {"classes": 3, "outputs": 2}, ke.InputError, "either classes"),
    "no classes": (GEMM, {"classes": 0}, ke.InputError, "at least 1"),
    "a name": (GEMM, {"outputs": "y"}, ke.InputError, "whole number"),
    "a fraction": (GEMM, {"classes": 2.5}, ke.InputError, "whole number"),
    "a number as a value": (GEMM, {"classes": 2, "at": 3}, ke.InputError, "name of a value"),
    "a seed": (GEMM, {"classes": 2, "seed": -1}, ke.InputError, "seed"),
    "an unknown value": (GEMM, {"classes": 2, "at": "k"}, ke.UnknownNameError, r"'h' for the Gemm"),
    "a sum with data": (
        "z = MatMul (h, w)  y = Add (z, x)", {"classes": 2}, ke.ModelError,
        r"no dense layer right before an output; name the value .*'h' for the MatMul",
    ),
    "two heads": (
        "z = MatMul (h, w)  v = MatMul (x, u)  y = Add (z, v)", {"classes": 2}, ke.ModelError,
        r"several heads: .*'w', 6 × 10.*'u', 5 × 10",
    ),
    "two readers": (
        "z = MatMul (h, w)  v = MatMul (h, w)  y = Add (z, v)", {"classes": 2, "at": "h"},
        ke.ModelError, "'h' is read by several products",
    ),
    "a computed bias": ("y = Gemm (h, w, x)", {"classes": 2}, ke.UnsupportedError, "computed"),
    "a flat result": (
        "z = MatMul (h, w)  y = Reshape (z, flat)", {"classes": 2}, ke.UnsupportedError, "Reshape",
    ),
    "whole results": (
        "z = MatMul (h, w)  y = QuantizeLinear (z, one)", {"classes": 2}, ke.UnsupportedError,
        "QuantizeLinear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_head_that_cannot_be_replaced_is_named(refused):
    nodes, options, error, message = refused
    sizes = {"w": (D, OLD), "u": (5, OLD), "b": (OLD,), "one": ()}
    row = Row(nodes, sizes, whole={"flat": ints(-1)})
    with pytest.raises(error, match=message):
        ke.replace_head(row.model, **options)


def test_weights_beyond_a_message_go_to_a_second_file(tmp_path):
    path, model = tmp_path / "model.onnx", ROWS["Gemm"].model
    onnx.save(
        ROWS["Gemm"].model, path, save_as_external_data=True, location="w.data", size_threshold=0
    )
    edited = ke.replace_head(path, NEW, path=tmp_path / "new.onnx")
    written = onnx.load(tmp_path / "new.onnx")
    assert written.SerializeToString() == edited.SerializeToString()
    np.testing.assert_array_equal(weights(edited)["body"], weights(model)["body"])


def test_kfac_trains_only_a_new_head_to_its_accuracy(tmp_path):
    images, labels = digits()
    known, other = labels < 5, labels >= 5
    history = ke.fit(demo_model("cnn"), (images[known][:600], labels[known][:600]), epochs=2)
    history.engine.export(tmp_path / "known.onnx")
    edited = ke.replace_head(tmp_path / "known.onnx", classes=5)
    engine = ke.Engine.from_onnx(edited, loss="categorical", trainable="head.*")
    assert set(engine.parameters) == {"head.weight", "head.bias"}
    data = images[other], labels[other] - 5
    ke.fit(engine, (data[0][:600], data[1][:600]), epochs=6, batch_size=64)
    accuracy = engine.evaluate((data[0][600:], data[1][600:]))["accuracy"]
    assert accuracy > 0.8, "one in five guesses is right"
