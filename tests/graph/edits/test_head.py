"""A head with other weights: the spellings of exporters, what follows the head, and errors."""

import numpy as np
import onnx
import pytest
from onnx import helper

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from tests import models
from tests.graph.edits.spellings import GEMM, NEW, OLD, ROWS, D, Row, X, ints, run, shape, weights

# float32 products of a few dozen terms.
RTOL = 1e-5


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


@pytest.mark.parametrize(("at", "kept"), [("y", "z"), ("z", "y")])
def test_one_of_two_heads_of_a_value_is_named_by_its_result(at, kept):
    model = Row("y = MatMul (h, w)  z = MatMul (h, u)", {"w": (D, OLD), "u": (D, OLD)}).model
    model.graph.output.append(
        helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["N", OLD])
    )
    with pytest.raises(ke.ModelError, match=r"several heads: .*at=…: 'z' for .*'y' for"):
        ke.replace_head(model, NEW)
    edited = ke.replace_head(model, NEW, at=at)
    assert shape(edited, at) == ("N", NEW)
    np.testing.assert_array_equal(run(edited, {"x": X}, kept)[0], run(model, {"x": X}, kept)[0])


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
        r"no dense layer right before an output; name a value .*'h' for the MatMul"),
    "two heads": (
        "z = MatMul (h, w)  v = MatMul (x, u)  y = Add (z, v)", {"classes": 2}, ke.ModelError,
        r"several heads: .*'w', 6 × 10.*'u', 5 × 10"),
    "two readers": (
        "z = MatMul (h, w)  v = MatMul (h, w)  y = Add (z, v)", {"classes": 2, "at": "h"},
        ke.ModelError, r"'h' belongs to several products.*'v' for the MatMul.*'z' for the MatMul"),
    "a computed bias": ("y = Gemm (h, w, x)", {"classes": 2}, ke.UnsupportedError, "computed"),
    "a flat result": (
        "z = MatMul (h, w)  y = Reshape (z, flat)", {"classes": 2}, ke.UnsupportedError, "Reshape"),
    "whole results": (
        "z = MatMul (h, w)  y = QuantizeLinear (z, one)", {"classes": 2}, ke.UnsupportedError,
        "QuantizeLinear"),
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
