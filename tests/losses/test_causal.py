"""The loss of a causal language model: logits of a position and the token after it."""

import numpy as np
import onnx
import pytest
from onnx import helper
from scipy.special import log_softmax

import kfac_engine as ke
from kfac_engine.losses import CausalNegativeLogProbLoss
from tests.graph.running import outputs
from tests.models import VOCABULARY, parsed, tied_table
from tests.training_files.parity import differences

N, LENGTH = 5, 6


def expected(z, ids, counts, smoothing=0.0):
    """Sum and gradient of the loss of logits ``(n, positions, tokens)``, and the sum of counts."""
    total, gradient = 0.0, np.zeros_like(z)
    for i, t in np.ndindex(len(z), z.shape[1] - 1):
        target = np.full(z.shape[2], smoothing / z.shape[2])
        target[ids[i, t + 1]] += 1 - smoothing
        log_p = log_softmax(z[i, t])
        total -= counts[i, t + 1] * target @ log_p
        gradient[i, t] = counts[i, t + 1] * (np.exp(log_p) - target)
    return total, gradient, counts[:, 1:].sum()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradient_are_those_of_the_next_token(order, smoothing):
    rng = np.random.default_rng(0)
    z, ids = rng.standard_normal((N, LENGTH, 4)), rng.integers(0, 4, (N, LENGTH))
    ids[1, 3:], ids[2, 0] = -100, -100
    weights = rng.integers(0, 3, (N, LENGTH)).astype(float)
    ids[3, 2], weights[3, 2] = 99, 0  # it is not read
    loss = CausalNegativeLogProbLoss(
        "z", "t", batch_axis=order.index(0), class_axis=order.index(2), label_smoothing=smoothing
    )
    known = np.where((ids < 0) | (ids == 99), 0, ids)
    swapped = order == (1, 0, 2)
    values = {"z": z.transpose(order), "t": ids.T if swapped else ids}
    for counts in (weights, rng.integers(0, 3, N).astype(float), None):
        if counts is None or counts.ndim == 1:
            values["t"] = np.where(values["t"] == 99, -100, values["t"])
        one = np.ones((N, LENGTH)) if counts is None else counts.reshape(N, -1) * np.ones(LENGTH)
        one = one * (ids >= 0) * (ids < 99)
        array = counts.T if counts is not None and swapped else counts
        if counts is not None and counts.ndim == 1 and swapped:
            continue  # an engine gives weights of examples to logits that have them first
        named = values if counts is None else {**values, "weights of t": array}
        seen = loss.observe(named)
        value, gradient = loss.value_and_gradient(named, seen)
        total, scores, number = expected(z, known, one, smoothing)
        assert value == pytest.approx(total)
        assert seen.total == pytest.approx(number)
        np.testing.assert_allclose(gradient["z"], scores.transpose(order), atol=1e-13)


def decoder(masked=False):
    """Logits of the ids read so far: means of rows of a table, times its transpose."""
    net = tied_table(length=LENGTH)
    if masked:
        shape = [
            entry.dim_param or entry.dim_value
            for entry in net.graph.input[0].type.tensor_type.shape.dim
        ]
        net.graph.input[0].name = "input_ids"
        for node in net.graph.node:
            node.input[:] = ["input_ids" if name == "input" else name for name in node.input]
        net.graph.input.append(
            helper.make_tensor_value_info("attention_mask", onnx.TensorProto.INT64, shape)
        )
    return net


def text(rng, n):
    return rng.integers(0, VOCABULARY, (n, LENGTH))


def test_the_ids_are_targets_if_none_are_given():
    ids = text(np.random.default_rng(0), N)
    engine = ke.Engine.from_onnx(decoder(), loss="causal_lm")
    z = engine.predict(ids).astype(float)
    total, _, number = expected(z, ids, np.ones(ids.shape))
    for inputs, targets in ((ids, ids), (ids, None), ({"input": ids}, None)):
        assert engine.loss(inputs, targets) == pytest.approx(total / number, rel=1e-5)
    for data in (
        ids,
        {"input": ids},
        ({"input": ids}, None),
        [(ids[:2], None), {"input": ids[2:]}],
    ):
        assert engine.evaluate(data)["loss"] == pytest.approx(total / number, rel=1e-5)
    gradients = engine.gradients(ids, ids).gradients
    for name, array in engine.step(ids, None).gradients.items():
        np.testing.assert_allclose(array, gradients[name], atol=1e-6)
    parts = engine.gradients([(ids[:2], None), (ids[2:], ids[2:])])
    for name, array in parts.gradients.items():
        np.testing.assert_allclose(array, gradients[name], atol=1e-6)
    history = ke.fit(decoder(), ids, loss="causal_lm", epochs=3, batch_size=2, validation=0.4)
    assert history.records[-1]["validation_loss"] > 0
    assert ke.verify(decoder(), {"input": ids}, ids, loss="causal_lm").passed


def test_the_attention_mask_says_which_ids_count():
    rng = np.random.default_rng(1)
    ids, mask = text(rng, N), (np.arange(LENGTH) < rng.integers(2, LENGTH, N)[:, None]).astype(int)
    engine = ke.Engine.from_onnx(decoder(masked=True), loss="causal_lm")
    inputs = {"input_ids": ids, "attention_mask": mask}
    z = engine.predict(inputs).astype(float)
    total, _, number = expected(z, ids, mask.astype(float))
    assert engine.loss(inputs, None) == pytest.approx(total / number, rel=1e-5)
    assert engine.loss(inputs, np.where(mask, ids, -100)) == pytest.approx(total / number, rel=1e-5)
    every, _, number = expected(z, ids, np.ones(ids.shape))
    assert engine.loss(inputs, ids) == pytest.approx(every / number, rel=1e-5)


@pytest.mark.parametrize("ignore_index", [-100, None])
def test_the_gradient_of_a_file_is_that_of_the_engine(ignore_index):
    ids = text(np.random.default_rng(2), N)
    loss = ke.CausalLM(ignore_index=ignore_index)
    model = ke.differentiate(decoder(), loss)
    targets = np.where(ids == 3, -100, ids) if ignore_index else ids
    found = outputs(model, {"input": ids, "targets": targets})
    engine = ke.Engine.from_onnx(decoder(), loss=loss)
    result = engine.gradients(ids, targets)
    assert found["loss"] == pytest.approx(result.loss, rel=1e-5)
    for name, array in result.gradients.items():
        np.testing.assert_allclose(found[f"gradient/{name}"], array, atol=1e-6)


def some(rng, n):
    ids = text(rng, n)
    ids[0, 2:] = -100
    return ids


def weighted(rng, n):
    return ke.Weighted(text(rng, n), rng.integers(0, 2, (n, LENGTH)).astype(bool))


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize(
    ("draw", "inputs"), [(some, {}), (weighted, {"mask": "predictions"})], ids=["ignored", "mask"]
)
def test_steps_of_training_files_equal_those_of_the_optimizer(draw, inputs, optimizer, tmp_path):
    found = differences(decoder(), optimizer, tmp_path, draw, "causal_lm", steps=8, **inputs)
    assert found[0] < 1e-5
    assert found[-1] < 1e-3


def test_statistics_leave_the_last_position_out():
    """K-FAC samples a target for each position; those of the last one do not count."""
    ids = text(np.random.default_rng(3), 400)
    shifted = np.concatenate([ids[:, 1:], np.full((400, 1), -100)], axis=1)
    averages = []
    for loss, targets in (("causal_lm", ids), ("categorical", shifted)):
        engine = ke.Engine.from_onnx(decoder(), loss=loss, seed=1)
        engine.observe(ids, targets)
        averages.append([factor.cov for factor in engine.collection.get_factors()])
    for first, second in zip(*averages, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-8)


def test_wrong_targets_and_models_are_refused():
    ids = text(np.random.default_rng(4), 2)
    engine = ke.Engine.from_onnx(decoder(), loss="causal_lm")
    for wrong, message in (
        (ids[:, 1:], "the loss itself shifts them"),
        (np.where(ids == ids[0, 0], 99, ids), "99 of example 0, position"),
        (ids + 0.5, "the loss itself|integer"),
    ):
        with pytest.raises(ke.InputError, match=message):
            engine.loss(ids, wrong)
    flat = parsed(
        "g (int64[n,3] input) => (float[m,4] output) "
        "{ rows = Gather(table, input) output = Reshape(rows, shape) }",
        {"table": np.ones((7, 4), "float32"), "shape": np.array([-1, 4])},
    )
    with pytest.raises(ke.ShapeError):
        ke.Engine.from_onnx(flat, loss="causal_lm")
    with pytest.raises(ke.InputError, match="probabilities"):
        ke.differentiate(decoder(), "causal_lm", probabilities=True)
