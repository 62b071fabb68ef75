"""Batch sizes and axes that files hide: squeezed, fixed, called otherwise, or named by the user."""

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke
from kfac_engine.runtime.batch_axis import find_batch
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.runtime.model import load_model
from tests import models, oracle
from tests.comparing import assert_arrays_equal
from tests.graph.running import outputs


def floats(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def runs(model, feeds):
    """What plain ONNX Runtime makes of a batch."""
    return next(iter(outputs(model, feeds).values()))


# -- Squeeze without axes --------------------------------------------------------------------------


def squeezed():
    """One number an example, with axes of one that ``Squeeze`` takes away without naming them."""
    nodes = "rows = MatMul(input, w)  output = Squeeze(rows)"
    model = models.written("batch,3 -> batch", "w(3,1)", nodes)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("sample", [None, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_squeeze_without_axes_runs_for_all_batch_sizes(sample, size):
    model = squeezed()
    inputs = None if sample is None else {"input": floats(sample, 3)}
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs)
    assert engine.losses[0].fixed_batch == ""
    x, t = floats(size, 3), floats(size)
    found = engine.gradients({"input": x}, t)
    y = runs(model, {"input": x}).reshape(size)
    assert found.loss == pytest.approx(float(((y - t) ** 2).mean() + np.log(np.pi) / 2), rel=1e-5)
    gradient = 2 * x.T.astype(np.float64) @ (y - t) / size
    np.testing.assert_allclose(found.gradients["w"][:, 0], gradient, rtol=1e-4, atol=1e-5)


def test_squeeze_with_axes_is_unchanged():
    nodes = "rows = MatMul(input, w)  output = Squeeze(rows, axes)"
    loaded = load_model(models.written("batch,3 -> batch", "w(3,1) axes=1", nodes))
    (node,) = (node for node in loaded.graph.nodes if node.op == "Squeeze")
    assert node.inputs == ("rows", "axes")


# -- symbols ---------------------------------------------------------------------------------------


def images(height, width):
    net = models.Net()
    x = net.conv("conv", "input", 1, 2, 3)
    x = net.op("GlobalAveragePool", x, to="pooled")
    net.op("Flatten", x, to="output")
    return net.model({"input": ["batch", 1, height, width]}, {"output": ["batch", 2]})


@pytest.mark.parametrize("word", ["?", "None", "unk__7", "-1"])
def test_names_of_unknown_sizes_are_not_symbols(word):
    x = floats(4, 1, 8, 12)
    found = ke.precondition(
        images(word, word), {"input": x}, np.zeros(4, int), "categorical", damping=0.1
    )
    expected = ke.precondition(
        images("height", "width"), {"input": x}, np.zeros(4, int), "categorical", damping=0.1
    )
    assert found.loss == expected.loss
    assert found.notes == expected.notes == ()


def test_different_sizes_of_one_symbol_run_with_note():
    model, x = images("side", "side"), floats(4, 1, 8, 12)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    found = engine.step({"input": x}, np.zeros(4, int))
    value, _ = oracle.loss_and_gradient(
        model, {"input": x}, "output", ["conv.bias"], "categorical", np.zeros(4, int)
    )
    assert found.loss == pytest.approx(value, rel=1e-5)
    (note,) = found.notes
    assert "axis 'side' of the inputs has several sizes: 8 in 'input', 12 in 'input'" in note
    assert engine.step({"input": floats(4, 1, 8, 8)}, np.zeros(4, int)).notes == ()


def two_inputs(columns=2):
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        m (float[batch,3] a, float[batch,{columns}] b) => (float[batch,{columns}] output)
        <float[3,{columns}] w = {{{", ".join(map(str, range(3 * columns)))}}}>
        {{ rows = MatMul(a, w)  output = Add(rows, b) }}"""
    )


def test_incompatible_inputs_error_lists_sizes():
    engine = ke.Engine.from_onnx(two_inputs(), loss="normal")
    with pytest.raises(ke.ShapeError, match=r"axis 'batch' .* 3 in 'a', 4 in 'b'"):
        engine.step({"a": floats(3, 3), "b": floats(4, 2)}, floats(4, 2))
    with pytest.raises(ke.ModelError, match=r"axis 'batch' .* 3 in 'a', 4 in 'b'"):
        ke.precondition(
            two_inputs(), {"a": floats(3, 3), "b": floats(4, 2)}, floats(4, 2), "normal"
        )


# -- a batch of one --------------------------------------------------------------------------------


def traced_with_one(symbols):
    """Tokens of one example whose batch a trace has baked in, as rows."""
    return models.written(
        f"{symbols},3 -> 1,seq,2",
        "w(3,2) to=-1,3 one=1,-1,2 first=1 last=2",
        # Two examples make a different length: the Add fails for them.
        """x = Reshape(input, to)  rows = MatMul(x, w)  tokens = Reshape(rows, one)
           length = Shape<start=1, end=2>(input)  wanted = Concat<axis=0>(first, length, last)
           zeros = ConstantOfShape(wanted)  output = Add(tokens, zeros)""",
    )


def located(model, inputs=None, axes=None):
    loaded = load_model(model, sample_inputs=inputs)
    return find_batch(loaded.graph, loaded.facts, loaded.graph.outputs, inputs, axes)


@pytest.mark.parametrize("inputs", [None, {"input": floats(1, 5, 3)}])
def test_axis_named_batch_with_single_valid_size_has_one_example(inputs):
    batch = located(traced_with_one("batch,seq"), inputs)
    assert (batch.size, batch.inputs) == (1, {"input": 0})
    assert batch.places["output"] == ExampleAxis(0, 1)
    assert "fixes the batch size at 1" in batch.fixed


def test_growing_axis_with_other_name_is_batch_with_note():
    batch = located(traced_with_one("first,second"))
    assert batch.inputs == {"input": 1}
    assert "the model runs with a single size of axis 0 of 'input'" in batch.note


# -- axes that the user names ----------------------------------------------------------------------


# Files of fixed sizes, with the examples on the second axis of the input.
FIXED = {
    # A weight from the left of a MatMul: examples are columns of the input.
    "columns": ("3,4 -> 4,3", "w(3,3)", "columns = MatMul(w, input)  output = Transpose(columns)"),
    # Examples are columns of the input and rows of the output.
    "transposed": ("3,3 -> 3,2", "w(3,2)", "output = Gemm<transA=1>(input, w)"),
    # Time first, of an LSTM as PyTorch writes it.
    "recurrence": (
        "4,2,3 -> 4,2,2",
        "w(1,8,3) r(1,8,2) axes=1",
        "states = LSTM<hidden_size=2>(input, w, r)  output = Squeeze(states, axes)",
    ),
}


@pytest.mark.parametrize(
    ("name", "place", "size", "same"),
    [
        ("columns", ExampleAxis(0, 1), 4, -1),
        ("transposed", ExampleAxis(0, 1), 3, -1),
        ("recurrence", ExampleAxis(1, 1), 2, -2),
    ],
)
def test_batch_axes_option_applies_to_fixed_sizes(name, place, size, same):
    model = models.written(*FIXED[name])
    batch = located(model, axes={"input": 1})
    assert (batch.inputs, batch.places["output"], batch.size) == ({"input": 1}, place, size)
    assert located(model, axes={"input": same}) == batch
    assert batch.note == ""


def test_loss_and_gradients_use_named_batch_axis():
    """Squared errors of four columns: their mean is over four examples, not three."""
    x, t = floats(3, 4), floats(4, 3)
    engine = ke.Engine.from_onnx(
        models.written(*FIXED["columns"]),
        loss="normal",
        batch_axes={"input": 1},
        reduction="batch_mean",
    )
    w = engine.parameters["w"].astype(np.float64)
    found = engine.gradients({"input": x}, t)
    np.testing.assert_allclose(
        found.gradients["w"], 2 * (w @ x - t.T) @ x.T / 4, rtol=1e-4, atol=1e-5
    )


def test_axis_of_independent_examples_is_that_of_the_batch():
    (report,) = ke.Engine.from_onnx(models.written(*FIXED["recurrence"]), loss="normal").losses
    assert (report.batch_axis, report.doubts) == (1, ())


def test_coupled_examples_note_names_batch_axes_option():
    nodes = "rows = MatMul(input, w)  output = Softmax<axis=0>(rows)"
    model = models.written("5,3 -> 5,2", "w(3,2)", nodes)
    (report,) = ke.Engine.from_onnx(model, loss="normal").losses
    assert "depend on each other; if it is another axis" in report.doubts[0]
    assert "batch_axes" in report.doubts[0]


def test_unknown_batch_axis_error_names_option():
    """The largest entry of each row belongs to one example or another."""
    nodes = "columns = MatMul(w, input)  output = ReduceMax(columns, axes)"
    model = models.written("3,5 -> 2,1", "w(2,3) axes=1", nodes)
    with pytest.raises(ke.ShapeError, match=r"name the axis of the examples .* batch_axes"):
        ke.Engine.from_onnx(model, loss="normal")


@pytest.mark.parametrize(
    ("axes", "error", "said"),
    [
        ({"inptu": 1}, ke.UnknownNameError, "'inptu', which is not an input .* input"),
        ({"a": 2}, ke.ShapeError, "axis 2 of input 'a', which has 2 axes"),
        ({"a": -3}, ke.ShapeError, "axis -3 of input 'a'"),
        ({"a": 0, "b": 1}, ke.ShapeError, "different sizes: 2 in 'a', 5 in 'b'"),
    ],
)
def test_batch_axes_that_do_not_fit_inputs_raise_error(axes, error, said):
    with pytest.raises(error, match=said):
        ke.Engine.from_onnx(two_inputs(5), loss="normal", batch_axes=axes)


def test_named_dynamic_axis_is_batch_for_any_symbol():
    model = models.written(
        "batch,tokens,3 -> batch,tokens,2", "w(3,2)", "output = MatMul(input, w)"
    )
    batch = located(model, axes={"input": 1})
    assert (batch.inputs, batch.places["output"]) == ({"input": 1}, ExampleAxis(1, 1))
    assert located(model).inputs == {"input": 0}


def test_gradient_model_uses_named_batch_axis():
    from onnx.reference import ReferenceEvaluator

    x, t = floats(3, 4), floats(4, 3)
    model = ke.differentiate(
        models.written(*FIXED["columns"]), "normal", batch_axes={"input": 1}, reduction="batch_mean"
    )
    gradient = ReferenceEvaluator(model).run(["gradient/w"], {"input": x, "targets": t})[0]
    w = load_model(models.written(*FIXED["columns"])).parameters["w"].astype(np.float64)
    np.testing.assert_allclose(gradient, 2 * (w @ x - t.T) @ x.T / 4, rtol=1e-4, atol=1e-5)


def test_failed_sample_run_asks_for_sample_inputs():
    nodes = "x = Reshape(input, to)  output = MatMul(x, w)"
    model = models.written("batch,side,side2 -> batch,2", "w(55,2) to=-1,55", nodes)
    with pytest.raises(ke.ModelError, match="a real batch") as caught:
        ke.Engine.from_onnx(model, loss="normal")
    assert "trainable" not in str(caught.value)
    x = floats(4, 5, 11)
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs={"input": x})
    assert engine.step({"input": x}, floats(4, 2)).loss > 0


def test_unnamed_dynamic_axes_of_equal_length_are_batch():
    """A recurrence with its state: examples come first in the data and second in the state."""
    net = models.Net()
    h = net.op("MatMul", "input", net.weight("w", 3, 4), to="rows")
    last = net.op("Gather", "state", net.constant("zero", np.array(0)), to="last")
    net.op("Add", h, last, to="output")
    model = net.model({"input": [None, None], "state": [2, None, 4]}, {"output": [None, 4]})
    inputs = {"input": floats(5, 3), "state": floats(2, 5, 4)}
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs)
    assert engine.losses[0].batch_axis == 0
    for size in (1, 5, 7):
        x, state, t = floats(size, 3), floats(2, size, 4), floats(size, 4)
        found = engine.step({"input": x, "state": state}, t).gradients["w"]
        y = runs(model, {"input": x, "state": state})
        expected = 2 * x.T @ (y - t) / size
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def pooled(side):
    """Three poolings by two: images must have eight pixels a side, and sixteen after a stride."""
    pools = "".join(
        f"p{i + 1} = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(p{i})  " for i in range(3)
    )
    return models.written(
        f"batch,1,{side},{side} -> batch,2",
        "w(2,1,1,1)",
        f"p0 = Conv<strides=[2, 2]>(input, w)  {pools}mean = GlobalAveragePool(p3)  "
        "output = Flatten(mean)",
    )


def test_generated_images_fit_pooling_windows():
    """ONNX Runtime pools images of one pixel by windows of two without a word."""
    loaded = load_model(pooled("side"))
    assert loaded.facts["input"].shape == (2, 1, 32, 32)
    engine = ke.Engine.from_onnx(pooled("side"), loss="categorical")
    assert engine.step({"input": floats(3, 1, 24, 24)}, np.zeros(3, int)).loss > 0


def test_image_smaller_than_window_raises_error():
    with pytest.raises(ke.ModelError, match=r"window of \(2, 2\) pixels on an image") as caught:
        ke.Engine.from_onnx(pooled(8), loss="categorical")
    assert "freeze" not in str(caught.value)


def test_sample_run_does_not_change_user_arrays():
    """The training form of a normalization, whose running statistics are inputs."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        m (float[n,3] x, float[3] mean, float[3] var) => (float[n,3] y)
        <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}> {
          y, mean_out, var_out = BatchNormalization <training_mode = 1> (x, s, b, mean, var)
        }"""
    )
    inputs = {"x": floats(5, 3), "mean": floats(3), "var": np.abs(floats(3))}
    before = {name: array.copy() for name, array in inputs.items()}
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs)
    assert engine.losses
    assert_arrays_equal(inputs, before)
