"""Predictions and metrics in inference form, against ONNX's reference on the same form."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import kfac_engine as ke
from kfac_engine.losses.objective import REDUCTIONS
from tests import models, oracle
from tests.comparing import assert_near
from tests.engine.test_buffers import normalised
from tests.engine.test_evaluation import assert_same_state, made, state
from tests.engine.test_recurrent_engine import classifier

# float32 passes of small networks, relative to the largest entry.
CLOSE = 2e-5


def in_inference(model, values):
    """Return the model with inference normalizations, without dropout, with other constants."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for node in other.graph.node:
        if node.op_type == "BatchNormalization":
            kept = [a for a in node.attribute if a.name != "training_mode"]
            del node.attribute[:], node.output[1:]
            node.attribute.extend(kept)
        if node.op_type == "Dropout":
            del node.input[1:]
    for entry in other.graph.initializer:
        if entry.name in values:
            entry.CopyFrom(numpy_helper.from_array(np.array(values[entry.name]), entry.name))
    return other


def with_dropout(training):
    """Return a model with a dropout of one half behind its hidden layer."""
    net = models.Net()
    x = net.op("Tanh", net.dense("fc0", "input", 6, 40), to="hidden")
    ratio = net.constant("ratio", np.float32(0.5))
    mode = [net.constant("mode", np.array(True))] if training else []
    x = net.op("Dropout", x, ratio, *mode, to="dropped")
    net.op("Gemm", x, net.weight("fc1.weight", 40, 3), to="output")
    return net.model({"input": ["batch", 6]}, {"output": ["batch", 3]})


# -- predict ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "token_mlp", "cnn", "embedding", "layer_norm"])
def test_predictions_are_the_outputs_of_the_model(name):
    engine, model, inputs, _ = made(name)
    found = engine.predict(inputs)
    assert_near(found, oracle.evaluate(model, inputs, "output")[0], CLOSE)
    found[...] = 0  # belongs to the caller
    assert engine.predict(inputs).any()


def test_several_outputs_are_a_dictionary():
    model = models.two_outputs()
    inputs = models.random_inputs(model, batch=4)
    engine = ke.Engine.from_onnx(model, loss=["categorical", "normal"], output=["logits", "mean"])
    found = engine.predict(inputs)
    names = [output.name for output in model.graph.output]
    assert list(found) == names
    for name, expected in zip(names, oracle.evaluate(model, inputs, *names), strict=True):
        assert_near(found[name], expected, CLOSE, name)


@pytest.mark.parametrize("uses", [1, 2], ids=["one use", "shared statistics"])
def test_normalizations_use_their_running_statistics(uses):
    model = normalised(uses=uses)
    if uses == 2:
        del model.graph.node[3].output[1:]
    inputs = models.random_inputs(model, batch=7)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    for _ in range(2):
        values = {**engine.parameters, **engine.buffers}
        expected = oracle.evaluate(in_inference(model, values), inputs, "output")[0]
        assert_near(engine.predict(inputs), expected, CLOSE)
        # Examples do not depend on each other, as they do in training form.
        assert_near(engine.predict({"input": inputs["input"][:2]}), expected[:2], CLOSE)
        assert abs(engine.trace(inputs)["output"] - expected).max() > 0.01
        engine.step(inputs, np.arange(7) % 3)


def test_running_statistics_that_are_outputs_stay_as_they_are():
    model = normalised()
    for name in ("mean0", "var0"):
        info = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [5])
        model.graph.output.append(info)
    inputs = models.random_inputs(model, batch=7)
    engine = ke.Engine.from_onnx(model, loss="categorical", output="output")
    found = engine.predict(inputs)
    for output, name in (("mean0", "norm.mean"), ("var0", "norm.var")):
        np.testing.assert_array_equal(found[output], engine.buffers[name])


@pytest.mark.parametrize("training", [True, False])
def test_dropout_keeps_all_elements(training):
    model = with_dropout(training)
    inputs = models.random_inputs(model, batch=8)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    expected = oracle.evaluate(in_inference(model, {}), inputs, "output")[0]
    assert_near(engine.predict(inputs), expected, CLOSE)
    drops = abs(engine.trace(inputs)["output"] - expected).max() > 0.01
    assert drops == training


def test_a_recurrence_predicts_with_time_first():
    model = classifier("LSTM")
    x = np.random.default_rng(0).standard_normal((4, 6, 2)).astype(np.float32)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    assert_near(engine.predict({"x": x}), oracle.evaluate(model, {"x": x}, "logits")[0], CLOSE)


def test_predict_refuses_what_trace_refuses():
    engine, _, inputs, _ = made("mlp")
    with pytest.raises(ke.InputError, match="iterable of batches, got int"):
        engine.predict(3)
    with pytest.raises(ke.InputError, match="'input' is missing"):
        engine.predict({})
    with pytest.raises(ke.ShapeError, match="the model needs"):
        engine.predict({"input": inputs["input"][:, :2]})


# -- evaluate --------------------------------------------------------------------------------------


def batches(inputs, targets, cuts):
    parts = zip(np.split(inputs["input"], cuts), np.split(targets, cuts), strict=True)
    return [({"input": x}, t) for x, t in parts]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["mlp", "token_mlp"])
def test_metrics_of_batches_are_those_of_all_examples(name, reduction):
    engine, model, inputs, targets = made(name, batch=9, reduction=reduction)
    z = oracle.evaluate(model, inputs, "output")[0]
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, targets[..., None], -1)
    divisor = {"mean": targets.size, "batch_mean": len(targets), "sum": 1}[reduction]
    whole = engine.evaluate((inputs, targets))
    assert list(whole) == ["loss", "accuracy"]
    assert whole["loss"] == pytest.approx(nats.sum() / divisor, rel=1e-5)
    assert whole["accuracy"] == pytest.approx((z.argmax(-1) == targets).mean(), rel=1e-12)
    parts = engine.evaluate(iter(batches(inputs, targets, [1, 6])))
    assert parts == pytest.approx(whole, rel=1e-6)


def test_two_pairs_are_not_taken_for_one():
    engine, _, inputs, targets = made("mlp", batch=6)
    pairs = batches(inputs, targets, [2])
    expected = engine.evaluate((inputs, targets))
    assert engine.evaluate(pairs) == pytest.approx(expected, rel=1e-6)
    assert engine.evaluate(tuple(pairs)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("axis", [1, 3])
def test_accuracy_counts_along_the_class_axis(axis):
    net = models.Net()
    net.conv("output", "input", 3, 4, 1)
    model = net.model({"input": ["batch", 3, 5, 4]}, {"output": ["batch", 4, 5, 4]})
    inputs = models.random_inputs(model, batch=6)
    z = np.moveaxis(oracle.evaluate(model, inputs, "output")[0], axis, -1)
    targets = np.random.default_rng(0).integers(0, 4, z.shape[:-1])
    engine = ke.Engine.from_onnx(model, loss="categorical", class_axis=axis)
    found = engine.evaluate((inputs, targets), metrics=["accuracy"])
    assert found == {"accuracy": pytest.approx((z.argmax(-1) == targets).mean(), rel=1e-12)}


def test_accuracy_of_other_discrete_targets():
    model = models.mlp()
    inputs = models.random_inputs(model, batch=8)
    z = oracle.evaluate(model, inputs, "output")[0]
    answers = np.random.default_rng(0).integers(0, 2, z.shape).astype(np.float32)
    engine = ke.Engine.from_onnx(model, loss="multi_bernoulli")
    found = engine.evaluate((inputs, answers))["accuracy"]
    assert found == pytest.approx(((z > 0) == answers).mean(), rel=1e-12)
    ids = np.random.default_rng(1).integers(0, 3, 8)
    loss = ke.OnehotCategoricalLogitsNegativeLogProbLoss("output", "labels")
    engine = ke.Engine.from_onnx(model, loss=loss)
    found = engine.evaluate((inputs, np.eye(3, dtype=np.float32)[ids]))["accuracy"]
    assert found == pytest.approx((z.argmax(-1) == ids).mean(), rel=1e-12)


def test_evaluation_is_in_inference_form_and_changes_nothing():
    model = normalised()
    inputs, targets = models.random_inputs(model, batch=7), np.arange(7) % 3
    engine = ke.Engine.from_onnx(model, loss="categorical")
    engine.step(inputs, targets)
    before = state(engine)
    loss = engine.evaluate((inputs, targets))["loss"]
    assert_same_state(state(engine), before)
    values = {**engine.parameters, **engine.buffers}
    plain = ke.Engine.from_onnx(in_inference(model, values), loss="categorical")
    assert loss == pytest.approx(plain.loss(inputs, targets), rel=1e-5)
    assert abs(loss - engine.loss(inputs, targets)) > 1e-3


def test_evaluate_refuses_other_data_and_metrics():
    engine, _, inputs, targets = made("mlp")
    with pytest.raises(ke.UnknownNameError, match="unknown metric 'auc'"):
        engine.evaluate((inputs, targets), metrics=["auc"])
    with pytest.raises(ke.InputError, match="no batch"):
        engine.evaluate([])
    with pytest.raises(ke.InputError, match="the targets are missing"):
        engine.evaluate([inputs])
    with pytest.raises(ke.InputError, match="iterable of batches, got int"):
        engine.evaluate(3)
    continuous, _, inputs, targets = made("tied")
    assert list(continuous.evaluate((inputs, targets), ("loss",))) == ["loss"]
    assert list(continuous.evaluate((inputs, targets))) == ["loss"]
    with pytest.raises(ke.UnsupportedError, match="no accuracy"):
        continuous.evaluate((inputs, targets), ("loss", "accuracy"))
