"""Running statistics of normalizations in training form, against ONNX's own reference."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal

STATISTICS = ("norm.mean", "norm.var")
# float32 averages over a batch in another order of addition.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


def normalised(momentum=0.8, uses=1):
    """A dense layer, normalizations by the statistics of the batch, a dense layer."""
    net = models.Net(seed=4)
    x = net.dense("fc0", "input", 4, 5)
    scale, shift = net.positive("norm.scale", 5), net.weight("norm.shift", 5)
    mean, var = net.weight("norm.mean", 5), net.positive("norm.var", 5)
    for index in range(uses):
        x = net.op(
            "BatchNormalization", x, scale, shift, mean, var, to=f"norm{index}",
            further=[f"mean{index}", f"var{index}"], training_mode=1, momentum=momentum,
        )  # fmt: skip
        x = net.op("Tanh", x, to=f"act{index}")
    net.op("Gemm", x, net.weight("fc1.weight", 5, 3), to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return {"input": rng.standard_normal((7, 4)).astype(np.float32)}, rng.integers(0, 3, 7)


def reference(model, inputs, names):
    wanted = onnx.ModelProto()
    wanted.CopyFrom(model)
    return ReferenceEvaluator(wanted).run(list(names), inputs)


@pytest.mark.parametrize("named", [True, False], ids=["named results", "results left out"])
def test_step_leaves_the_statistics_that_onnx_defines(data, named):
    inputs, targets = data
    model = normalised()
    if not named:
        del model.graph.node[1].output[1:]
    engine = ke.Engine.from_onnx(model, loss="categorical")
    assert set(engine.buffers) == set(STATISTICS)
    assert not set(engine.buffers) & set(engine.parameters)
    engine.step(inputs, targets)
    expected = reference(normalised(), inputs, ["mean0", "var0"])
    for name, value in zip(STATISTICS, expected, strict=True):
        np.testing.assert_allclose(engine.buffers[name], value, **ROUNDING)


def test_statistics_move_with_every_step_but_not_on_request(data):
    inputs, targets = data
    engine = ke.Engine.from_onnx(normalised(momentum=0.75), loss="categorical")
    start = engine.buffers["norm.mean"]
    engine.gradients(inputs, targets)
    engine.observe(inputs)
    engine.step(inputs, targets, update_buffers=False)
    np.testing.assert_array_equal(engine.buffers["norm.mean"], start)
    (before,) = reference(normalised(), inputs, ["fc0"])
    for _ in range(3):
        engine.step(inputs, targets)
    # Three steps of one batch: what is left of the start is 0.75³.
    expected = before.mean(0) + 0.75**3 * (start - before.mean(0))
    np.testing.assert_allclose(engine.buffers["norm.mean"], expected, **ROUNDING)


def test_a_step_whose_statistics_overflow_is_refused_and_changes_nothing(data):
    inputs, targets = data
    engine = ke.Engine.from_onnx(normalised(), loss="categorical")
    engine.step(inputs, targets)
    before = {name: array.copy() for name, array in engine.buffers.items()}
    average = engine.estimator.factors[0].cov
    # The squares of these exceed float32, the normalized values do not.
    huge = {"input": inputs["input"] * np.float32(1e25)}
    with pytest.raises(ke.NonFiniteError, match=r"running statistic 'norm\.var' holds NaN or inf"):
        engine.step(huge, targets)
    assert engine.counter == 1
    np.testing.assert_array_equal(engine.estimator.factors[0].cov, average)
    assert_arrays_equal(engine.buffers, before)


def test_shared_statistics_move_once_for_each_use(data):
    inputs, targets = data
    model = normalised(momentum=0.5, uses=2)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    start = engine.buffers["norm.mean"]
    engine.step(inputs, targets)
    first, second = (x.mean(0) for x in reference(model, inputs, ["fc0", "act0"]))
    expected = 0.5 * (0.5 * start + 0.5 * first) + 0.5 * second
    np.testing.assert_allclose(engine.buffers["norm.mean"], expected, **ROUNDING)


def test_examples_that_share_statistics_are_reported():
    engine = ke.Engine.from_onnx(normalised(), loss="categorical")
    assert engine.losses[0].coupling == "BatchNormalization node 'node_norm0'"


def test_gradients_update_the_statistics_on_request_as_step_does(data):
    stepped, other = (ke.Engine.from_onnx(normalised(), loss="categorical") for _ in range(2))
    stepped.step(*data)
    other.gradients(*data)
    assert not np.array_equal(other.buffers["norm.mean"], stepped.buffers["norm.mean"])
    other.gradients(*data, update_buffers=True)
    for name, value in stepped.buffers.items():
        assert np.array_equal(other.buffers[name], value)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"norm.scale": np.zeros(5)}, ke.UnknownNameError, "is not a running statistic; there are"),
        ({"norm.mean": np.zeros(4)}, ke.ShapeError, r"has shape \(4,\), not \(5,\)"),
        ({"norm.mean": np.full(5, np.nan)}, ke.NonFiniteError, "'norm.mean' holds NaN"),
    ],
)
def test_wrong_running_statistics_are_refused_and_change_nothing(values, error, message):
    engine = ke.Engine.from_onnx(normalised(), loss="categorical")
    before = engine.buffers
    with pytest.raises(error, match=message):
        engine.set_buffers({"norm.var": np.ones(5)} | values)
    for name, value in before.items():
        assert np.array_equal(engine.buffers[name], value)
