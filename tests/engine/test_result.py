"""The learning rate under a bound of the divergence, against the divergence itself."""

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.engine.result import Result

LINEAR_SOFTMAX = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4] x) => (float[n, 3] z) { z = MatMul(x, w) }
"""


def linear_model(rng):
    model = onnx.parser.parse_model(LINEAR_SOFTMAX)
    weight = rng.standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model, weight


def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.rounding
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_clipped_step_changes_the_predictions_by_half_the_bound(seed, reduction):
    # With one example the block of a dense layer is the exact Fisher matrix, so the quadratic form
    # is twice the divergence, up to terms of third order.
    rng = np.random.default_rng(seed)
    model, weight = linear_model(rng)
    x = rng.standard_normal((1, 4)).astype(np.float32)
    engine = ke.Engine.from_onnx(
        model, loss="categorical", damping=1e-10, estimation_mode="exact", reduction=reduction
    )
    result = engine.step({"x": x}, np.array([1]))
    bound = 1e-8
    moved = weight - result.clipped_rate(kl_clip=bound) * result.natural_gradients["w"]
    before, after = (
        log_softmax(x.astype(np.float64) @ w.astype(np.float64)) for w in (weight, moved)
    )
    divergence = float((np.exp(before) * (before - after)).sum())
    # The logits move by 1e-4 at least, by 1e-3 where a class has a probability of 1e-3.
    assert 2 * divergence == pytest.approx(bound, rel=1e-2)


def result_of(gradient, natural):
    return Result(1.0, {"w": gradient}, {"w": natural})


def test_a_rate_within_the_bound_stays_as_it_is():
    assert result_of(np.ones(4), np.full(4, 0.1)).clipped_rate(0.05, kl_clip=1.0) == 0.05


def test_half_precision_does_not_overflow_the_bound():
    gradient = np.full(1000, 300, np.float16)
    rate = result_of(gradient, gradient).clipped_rate(kl_clip=9.0)
    assert rate == pytest.approx(np.sqrt(9.0 / (1000 * 300.0**2)))


@pytest.mark.parametrize("gradient", [np.zeros(3), -np.ones(3)], ids=["zero", "an odd power"])
def test_a_product_that_is_not_positive_bounds_nothing(gradient):
    assert result_of(gradient, np.ones(3)).clipped_rate(0.5) == 0.5


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, "1", None])
@pytest.mark.parametrize("name", ["learning_rate", "kl_clip"])
def test_arguments_that_are_no_positive_numbers_are_refused(name, value):
    with pytest.raises(ke.KfacError, match=f"{name} must be a positive number"):
        result_of(np.ones(3), np.ones(3)).clipped_rate(**{name: value})


def test_a_result_without_natural_gradients_is_refused():
    with pytest.raises(ke.KfacError, match="no natural gradients"):
        Result(1.0, {"w": np.ones(3)}, {}).clipped_rate()
