"""What losses read: models that end in probabilities, or have their batch elsewhere.

The truth is the same network written plainly: ending in its logits, with the batch first.
"""

import numpy as np
import onnx
import pytest
from onnx import helper, parser

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal

# Two float32 runs of one small network with its operators in another order.
SAME = {"rtol": 2e-4, "atol": 2e-6}


def dense_net(ending, outputs="batch,3"):
    """Two dense layers with the result ``z``, and nodes from there to ``output``."""
    layers = "[fc0] h = Gemm (input, w0, b0)  act0 = Tanh (h)  z = Gemm (act0, w1, b1)  "
    weights = "w0(4,5) b0(5) w1(5,3) b1(3) axes=1 rows=-1,1,3"
    return models.written(f"batch,4 -> {outputs}", weights, layers + ending)


PLAIN = dense_net("output = Identity (z)")


def batch(loss, size=6):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((size, 4)).astype(np.float32)
    one = rng.integers(0, 3, size)
    many = rng.integers(0, 2, (size, 3)).astype(np.float32)
    return {"input": x}, one if "oft" in loss or loss == "categorical" else many


def assert_same(found, expected):
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(found.gradients[name], gradient, **SAME)
        np.testing.assert_allclose(
            found.natural_gradients[name], expected.natural_gradients[name], **SAME
        )


def test_reshaped_probabilities_keep_the_targets_of_the_output():
    model = dense_net("p = Softmax (z)  output = Reshape (p, rows)", "batch,1,3")
    inputs, targets = batch("categorical")
    found = ke.precondition(model, inputs, targets[:, None], "categorical", damping=0.1)
    assert_same(found, ke.precondition(PLAIN, inputs, targets, "categorical", damping=0.1))


def test_probabilities_of_other_make_are_read_through_their_logarithm():
    """Positive numbers divided by their sum: probabilities without a Softmax."""
    divided = dense_net("e = Exp (z)  total = ReduceSum (e, axes)  output = Div (e, total)")
    inputs, targets = batch("categorical")
    engine = ke.Engine.from_onnx(divided, loss="categorical", damping=0.1)
    assert "contains probabilities" in engine.losses[0].how
    assert_same(
        engine.step(inputs, targets),
        ke.precondition(PLAIN, inputs, targets, "categorical", damping=0.1),
    )


def test_softmax_along_another_axis_names_the_right_class_axis():
    model = detector("output = Softmax <axis = 1> (conv)")
    with pytest.raises(ke.ShapeError, match="classes on axis 1; pass class_axis=1"):
        ke.Engine.from_onnx(model, loss="categorical", class_axis=3)
    with pytest.raises(ke.ShapeError, match="class_axis=1"):
        ke.differentiate(model, "categorical", class_axis=3)
    for axis in (1, -1):
        engine = ke.Engine.from_onnx(model, loss="categorical", class_axis=axis)
        assert engine.losses[0].reads == "conv"


# -- the batch elsewhere ---------------------------------------------------------------------------


def tokens(order):
    """Two dense layers on (n, t, d) data; ``order`` says what the file's axes are."""
    x, fold = ("x", "x = Reshape (input, rows4) ") if order == "folded" else ("input", "")
    a, late = ("a", "a = Reshape (a0, rows5) ") if order == "folded late" else ("a0", "")
    sides = "time,batch" if order == "time first" else "batch,7"
    return models.written(
        f"{sides},4 -> {'rows' if 'folded' in order else sides},3",
        "w0(4,5) b0(5) w1(5,3) rows4=-1,4 rows5=-1,5",
        f"""{fold} s0 = MatMul ({x}, w0)  s0b = Add (s0, b0)  a0 = Tanh (s0b)
        {late} output = MatMul ({a}, w1)""",
    )


@pytest.mark.rounding
@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("order", ["time first", "folded", "folded late"])
def test_layout_of_the_batch_changes_no_number(order, reduction):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 7, 4)).astype(np.float32)
    y = rng.integers(0, 3, (3, 7))
    options = {"reduction": reduction, "damping": 0.1, "estimation_mode": "empirical"}
    expected = ke.precondition(tokens("plain"), {"input": x}, y, "categorical", **options)
    moved = (x.swapaxes(0, 1), y.T) if order == "time first" else (x, y.reshape(-1))
    found = ke.precondition(tokens(order), {"input": moved[0]}, moved[1], "categorical", **options)
    assert_same(found, expected)


@pytest.mark.rounding
@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("order", ["time first", "folded late"])
def test_gradient_models_count_the_same_examples(order, reduction):
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 7, 4)).astype(np.float32)
    y = rng.integers(0, 3, (3, 7))
    moved = (x.swapaxes(0, 1), y.T) if order == "time first" else (x, y.reshape(-1))
    model = ke.differentiate(tokens(order), "categorical", reduction=reduction)
    engine = ke.Engine.from_onnx(tokens("plain"), loss="categorical", reduction=reduction)
    expected = engine.gradients({"input": x}, y)
    loss, gradient = ReferenceEvaluator(model).run(
        ["loss", "gradient/w0"], {"input": moved[0], "targets": moved[1]}
    )
    assert float(loss) == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(gradient, expected.gradients["w0"], **SAME)


def test_per_example_approximations_are_refused_where_examples_are_not_first():
    with pytest.raises(ke.UnsupportedError, match="lie on axis 1 of 'input'; choose another"):
        ke.Engine.from_onnx(
            tokens("time first"), loss="categorical", approximations={"fully_connected": "diagonal"}
        )


@pytest.mark.parametrize("order", ["time first", "folded"])
def test_exact_modes_are_refused_where_examples_are_not_first(order):
    with pytest.raises(ke.UnsupportedError, match="'exact' needs the examples alone on the first"):
        ke.Engine.from_onnx(tokens(order), loss="categorical", estimation_mode="exact")


def test_output_without_examples_is_refused():
    nodes = "rows = MatMul (input, w)  output = ReduceMean <keepdims = 1> (rows, axes)"
    model = models.written("batch,4 -> 1,3", "w(4,3) axes=0", nodes)
    with pytest.raises(ke.ShapeError, match=r"'output' has shape .* for every number"):
        ke.Engine.from_onnx(model, loss="normal")


def fixed(size, inside):
    if inside:
        nodes = "flat = Reshape (input, to)  output = MatMul (flat, w)"
        return models.written("batch,4 -> batch,3", f"w(4,3) to={size},4", nodes)
    return models.written(f"{size},4 -> batch,3", "w(4,3)", "output = MatMul (input, w)")


@pytest.mark.parametrize("inside", [True, False])
def test_other_sizes_of_a_fixed_batch_are_refused_by_name(inside):
    x, y = np.zeros((4, 4), np.float32), np.zeros((4, 3), np.float32)
    engine = ke.Engine.from_onnx(fixed(4, inside), loss="normal", sample_inputs={"input": x})
    assert engine.losses[0].fixed_batch
    assert engine.step({"input": x}, y).loss > 0
    with pytest.raises(ke.ShapeError, match=r"'input' has 3 examples, but .* dynamic batch axis"):
        engine.step({"input": x[:3]}, y[:3])


def test_a_loss_on_a_sequence_is_refused_by_what_made_it():
    model = dense_net("output = Softmax (z)  [last] all = SequenceConstruct (output)")
    model.graph.output.append(
        helper.make_tensor_sequence_value_info("all", onnx.TensorProto.FLOAT, None)
    )
    with pytest.raises(
        ke.InputError, match=r"'all', which is a result of SequenceCon.*last.*not a tensor"
    ):
        ke.Engine.from_onnx(model, loss="categorical", output="all")


# -- classes on another axis -----------------------------------------------------------------------


def detector(ending, sides="batch,a,b,c"):
    """Scores ``conv`` of 3 channels for 4×4 pixels, and nodes from there to ``output``."""
    constants = "w(3,2,1,1) b(3) pixels_last=0,3,-1 pixels_second=0,-1,3 axis:3"
    return models.written(
        f"batch,2,4,4 -> {sides}", constants, "conv = Conv (input, w, b)  " + ending
    )


# What follows a convolution with 3 channels, and the axis on which it puts the channels.
CLASSES = {
    "activation": ("output = Relu (conv)", 1),
    "pixels in one axis": ("r = Relu (conv)  output = Reshape (r, pixels_last)", 1),
    "softmax": ("output = Softmax <axis = 1> (conv)", 1),
    "log-softmax of pixels": (
        "r = Reshape (conv, pixels_last)  output = LogSoftmax <axis = 1> (r)", 1),
    "channels last": ("output = Transpose <perm = [0, 2, 3, 1]> (conv)", 3),
    "channels and pixels last": (
        "t = Transpose <perm = [0, 2, 3, 1]> (conv)  output = Reshape (t, pixels_second)", 2),
    "channels third": ("output = Transpose <perm = [0, 2, 1, 3]> (conv)", 2),
}  # fmt: skip


@pytest.mark.parametrize(("ending", "axis"), CLASSES.values(), ids=CLASSES)
def test_the_axis_of_the_classes_is_found(ending, axis):
    sides = "batch,a,b" if "Reshape" in ending else "batch,a,b,c"
    model, rng = detector(ending, sides), np.random.default_rng(0)
    inputs = {"input": rng.standard_normal((5, 2, 4, 4)).astype(np.float32)}
    predicted = ke.Engine.from_onnx(model, loss="normal").predict(inputs)
    targets = rng.integers(0, 3, np.delete(predicted.shape, axis))
    found = ke.precondition(model, inputs, targets, "categorical", damping=0.1)
    said = ke.precondition(model, inputs, targets, "categorical", damping=0.1, class_axis=axis)
    assert found.loss == said.loss
    assert_arrays_equal(found.natural_gradients, said.natural_gradients)
    # The truth: the cross-entropy of the logits, with their classes last.
    logits = np.moveaxis(predicted.astype(np.float64), axis, -1).reshape(-1, 3)
    if " Softmax" in ending:
        logits = np.log(logits)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    truth = -np.take_along_axis(logits, targets.reshape(-1, 1), axis=1).mean()
    assert found.loss == pytest.approx(truth, rel=1e-5)


def test_columns_of_a_product_are_the_classes():
    """Scores (n, classes, tokens), as PyTorch's cross-entropy reads them, from tokens (n, t, d)."""
    nodes = "s = MatMul (input, w)  sb = Add (s, b)  output = Transpose <perm = [0, 2, 1]> (sb)"
    model = models.written("batch,6,4 -> batch,3,6", "w(4,3) b(3)", nodes)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    inputs, targets = {"input": np.ones((5, 6, 4), np.float32)}, np.zeros((5, 6), int)
    said = ke.Engine.from_onnx(model, loss="categorical", class_axis=1)
    assert engine.loss(inputs, targets) == said.loss(inputs, targets)


def test_an_axis_that_no_operator_tells_is_the_last():
    model = detector("output = CumSum (conv, axis)", "batch,3,4,4")
    engine = ke.Engine.from_onnx(model, loss="categorical")
    inputs = {"input": np.ones((5, 2, 4, 4), np.float32)}
    assert engine.loss(inputs, np.zeros((5, 3, 4), int)) > 0
    with pytest.raises(ke.ShapeError, match=r"give class_axis=1 \(--class-axis\), if"):
        engine.loss(inputs, np.zeros((5, 4, 4), int))


# -- several outputs -------------------------------------------------------------------------------


def cached():
    """Attention-like states on the way to the logits, one of them behind a rearrangement."""
    net = models.Net(seed=1)
    key = net.op("Concat", "past", net.dense("key", "input", 4, 3), to="present", axis=1)
    net.op("Reshape", key, net.constant("to", np.array([0, 2, -1])), to="view")
    net.dense("logits", net.op("Tanh", key, to="act"), 6, 3)
    sides = {"logits": ["batch", 3], "present": ["batch", 6], "view": ["batch", 2, 3]}
    return net.model({"input": ["batch", 4], "past": ["batch", 3]}, {**sides, "act": ["batch", 6]})


def test_outputs_on_the_way_to_another_need_no_loss():
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((6, n)).astype(np.float32)
              for name, n in {"input": 4, "past": 3}.items()}  # fmt: skip
    targets = rng.integers(0, 3, 6)
    found = ke.precondition(cached(), inputs, targets, "categorical")
    said = ke.precondition(cached(), inputs, targets, "categorical", output="logits")
    assert found.loss == said.loss
    assert ke.Engine.from_onnx(cached(), loss="categorical").losses[0].doubts[0].startswith(
        "'logits' has the loss, because other outputs are only on the way to it"
    )  # fmt: skip
    assert next(o.name for o in ke.differentiate(cached(), "categorical").graph.output) == "loss"
    assert "cotangent" in [i.name for i in ke.differentiate(cached()).graph.input]


HEADS = {"logits": "categorical", "mean": "normal"}
REFUSED = {
    "an unknown output": ({"loss": {"logit": "categorical"}}, "no output matches 'logit'"),
    "two losses": (
        {"loss": {"mean": "normal", "*": "normal"}}, "two losses are put on the output 'mean'"),
    "outputs twice": ({"loss": HEADS, "output": ["mean", "logits"]}, "names the outputs already"),
    "a loss object": (
        {"loss": {"logits": ke.NormalMeanNegativeLogProbLoss("mean")}}, "put it on 'mean'"),
    "nothing": ({"loss": {}}, "loss must be a name"),
}  # fmt: skip


def test_losses_are_put_on_outputs_by_name_and_pattern():
    model, rng = models.two_outputs(), np.random.default_rng(0)
    inputs = {"input": rng.standard_normal((6, 5)).astype(np.float32)}
    targets = {"logits": rng.integers(0, 3, 6), "mean": rng.standard_normal((6, 2))}
    said = ke.precondition(
        model, inputs, targets, [ke.Normal(weight=0.5), ke.Categorical(weight=2)],
        output=["mean", "logits"],
    )  # fmt: skip
    for names in ("mean", "logits"), ("m*n", "l*"):
        losses = dict(zip(names, (ke.Normal(weight=0.5), ke.Categorical(weight=2)), strict=True))
        found = ke.precondition(model, inputs, targets, losses)
        assert found.loss == said.loss
        assert_arrays_equal(found.natural_gradients, said.natural_gradients)
    mean = ke.NormalMeanNegativeLogProbLoss("mean", targets="t").times(0.5)
    for pattern in ("logits", "l*"):
        losses = {"mean": mean, pattern: ke.Categorical(weight=2)}
        found = ke.precondition(model, inputs, targets, losses)
        assert found.loss == said.loss
        assert_arrays_equal(found.natural_gradients, said.natural_gradients)
    everything = ke.Engine.from_onnx(model, loss={"*": ke.Normal(weight=0.5)})
    assert [loss.output for loss in everything.losses] == ["logits", "mean"]
    means = {"logits": np.ones((6, 3)), "mean": np.ones((6, 2))}
    one = ke.Engine.from_onnx(model, loss=[ke.Normal(weight=0.5)] * 2)
    assert everything.loss(inputs, means) == one.loss(inputs, means)


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("call", [ke.Engine.from_onnx, ke.differentiate])
def test_losses_that_fit_no_output_are_refused(call, options, said):
    with pytest.raises(ke.KfacError, match=said):
        call(models.two_outputs(), **options)


# -- outputs that hold no real numbers -------------------------------------------------------------

LABELS = """<ir_version: 8, opset_import: ["": 18]>
    m (float[n,3] x) => (OUTPUTS) <float[3,2] w = {1, 2, 3, 4, 5, 7}> {
      logits = MatMul (x, w)  label = ArgMax <axis = 1, keepdims = 0> (logits)
    }"""


@pytest.mark.parametrize("call", [ke.Engine.from_onnx, ke.differentiate])
@pytest.mark.parametrize("output", [None, "label"])
def test_an_output_of_integers_is_refused_by_name_and_node(call, output):
    outputs = "int64[n] label" if output is None else "int64[n] label, float[n,2] logits"
    model = parser.parse_model(LABELS.replace("OUTPUTS", outputs))
    said = r"'label' holds int64, made by ArgMax node 'ArgMax_1' of 'logits'.*output="
    with pytest.raises(ke.InputError, match=said):
        call(model, loss="categorical", output=output)
    engine = ke.Engine.from_onnx(model, loss="categorical", output="logits")
    assert list(engine.parameters) == ["w"]


def test_a_cotangent_for_an_output_of_integers_is_refused():
    model = parser.parse_model(LABELS.replace("OUTPUTS", "int64[n] label"))
    with pytest.raises(ke.InputError, match="'label' holds int64, made by ArgMax"):
        ke.differentiate(model)


@pytest.mark.parametrize("loss", [None, "categorical"])
def test_the_only_output_of_real_numbers_is_differentiated(loss):
    model = parser.parse_model(LABELS.replace("OUTPUTS", "int64[n] label, float[n,2] logits"))
    gradient = ke.differentiate(model, loss=loss)
    made = [entry.name for entry in gradient.graph.output]
    assert made == ["loss" if loss else "logits", "gradient/w"]


def test_the_output_is_asked_for_before_a_model_runs():
    """No made-up input fits this model: its sample run would fail, and with another error."""
    model = dense_net("output = Relu (z)  other = Neg (act0)")
    model.graph.output.append(helper.make_tensor_value_info("other", 1, ["batch", 5]))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 9
    with pytest.raises(ke.InputError, match="has the outputs output, other; name the one"):
        ke.Engine.from_onnx(model, loss="categorical")
    with pytest.raises(ke.UnknownNameError, match="unknown loss 'catgorical'"):
        ke.Engine.from_onnx(model, loss="catgorical")
    with pytest.raises(ke.KfacError, match="fc0"):  # versions of ONNX Runtime differ in words
        ke.Engine.from_onnx(model, loss="categorical", output="output")
