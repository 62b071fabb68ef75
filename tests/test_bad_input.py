"""Everything a user can get wrong with a batch: one clear error, and the state stays as it was."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal

TARGETS = np.array([0, 2, 1, 1])


@pytest.fixture
def engine():
    return ke.Engine.from_onnx(models.mlp(), loss="categorical")


@pytest.fixture
def inputs():
    return models.random_inputs(models.mlp(), batch=4)


def snapshot(engine):
    return [
        (f.average.weight, None if f.average.value is None else f.average.value.copy())
        for f in engine.estimator.factors
    ]


BATCHES = {
    "unknown input": (lambda x: {"image": x["input"]}, TARGETS, ke.UnknownNameError, "'image'"),
    "inputs without names": (lambda x: [*x["input"]], TARGETS, ke.InputError, "parts of a batch"),
    "missing input": (lambda x: {}, TARGETS, ke.InputError, "'input' is missing"),
    "wrong dtype": (
        lambda x: {"input": x["input"].astype(np.int64)}, TARGETS, ke.InputError, "int64.*float32"),
    "wrong rank": (lambda x: {"input": x["input"][0]}, TARGETS, ke.ShapeError, r"\(6,\)"),
    "wrong side": (lambda x: {"input": x["input"][:, :5]}, TARGETS, ke.ShapeError, r"\(4, 5\)"),
    "empty batch": (lambda x: {"input": x["input"][:0]}, TARGETS[:0], ke.ShapeError, "empty"),
    "nan input": (
        lambda x: {"input": np.where(x["input"] > 1, np.nan, x["input"]).astype(np.float32)},
        TARGETS, ke.NonFiniteError, "NaN or infinity"),
    "too few targets": (lambda x: x, TARGETS[:3], ke.InputError, "3"),
    "class too large": (lambda x: x, np.array([0, 3, 1, 1]), ke.InputError, "3"),
    "negative class": (lambda x: x, np.array([0, -1, 1, 1]), ke.InputError, "-1"),
    "float classes": (lambda x: x, TARGETS.astype(np.float32), ke.InputError, "integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_invalid_batch_raises_error_and_changes_nothing(engine, inputs, name):
    change, targets, error, message = BATCHES[name]
    engine.step(inputs, TARGETS)
    before, parameters = snapshot(engine), engine.parameters
    with pytest.raises(error, match=message):
        engine.step(change(inputs), targets)
    assert engine.counter == 1
    for (w0, v0), (w1, v1) in zip(before, snapshot(engine), strict=True):
        assert w0 == w1
        np.testing.assert_array_equal(v0, v1)
    assert_arrays_equal(parameters, engine.parameters)


@pytest.mark.parametrize("call", ["gradients", "step"])
def test_infinite_gradient_of_finite_loss_raises_error(call):
    net = models.Net()
    net.op("Sqrt", net.op("Add", "input", net.weight("b", 3), to="s"), to="output")
    model = net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})
    later = ke.Schedule(covariance_every=100, refresh_every=100)
    engine = ke.Engine.from_onnx(model, loss="normal", schedule=later)
    fine = {"input": np.full((2, 3), 4, np.float32)}
    zeros = np.zeros((2, 3), np.float32)
    engine.step(fine, zeros)
    edge = {"input": np.repeat(-engine.parameters["b"][None], 2, axis=0)}
    before = snapshot(engine)
    with pytest.raises(ke.NonFiniteError, match="'b'"):
        getattr(engine, call)(edge, np.ones((2, 3), np.float32))
    assert engine.counter == 1
    np.testing.assert_array_equal(snapshot(engine)[0][1], before[0][1])


@pytest.mark.parametrize("axis", [7, 0, -3])
def test_invalid_class_axis_raises_error(axis):
    with pytest.raises(ke.ShapeError, match=f"class_axis={axis}"):
        ke.Engine.from_onnx(models.mlp(), loss="categorical", class_axis=axis)


def test_feeding_constant_listed_as_input_raises_error(inputs):
    model = models.mlp()
    model.graph.input.append(onnx.helper.make_tensor_value_info("fc0.bias", 1, [5]))
    engine = ke.Engine.from_onnx(model, loss="categorical")
    fed = {**inputs, "fc0.bias": np.zeros(5, np.float32)}
    with pytest.raises(ke.UnknownNameError, match=r"'fc0.bias' is a constant .* set_parameters"):
        engine.gradients(fed, TARGETS)


def test_invalid_parameter_values_change_nothing(engine):
    before = engine.parameters
    bad = {"fc0.bias": np.ones(5, np.float32), "fc1.bias": np.full(4, np.inf, np.float32)}
    with pytest.raises(ke.NonFiniteError, match=r"fc1\.bias"):
        engine.set_parameters(bad)
    np.testing.assert_array_equal(engine.parameters["fc0.bias"], before["fc0.bias"])


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool"])
def test_parameter_takes_real_numbers_of_any_type(engine, dtype):
    values = np.arange(5).astype(dtype)
    engine.set_parameters({"fc0.bias": values})
    found = engine.parameters["fc0.bias"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize(
    "values",
    [np.ones(5, complex), np.full(5, "1"), np.full(5, None), np.ones(5, "M8[s]"), np.full(5, 1e300),
     np.full(5, np.nan)],
)  # fmt: skip
def test_parameter_takes_nothing_but_finite_real_numbers(engine, values):
    before = engine.parameters
    with pytest.raises(ke.InputError, match=r"parameter 'fc0\.bias' contains"):
        engine.set_parameters({"fc0.bias": values})
    np.testing.assert_array_equal(engine.parameters["fc0.bias"], before["fc0.bias"])
