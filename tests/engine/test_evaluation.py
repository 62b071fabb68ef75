"""Traces, losses and predictions of an engine, against ONNX's reference and finite differences."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.objective import REDUCTIONS
from tests import models, oracle
from tests.engine.test_engine import LOSSES, random_targets

# float32 passes of small networks, relative to the largest entry.
CLOSE = 2e-5


def made(name, batch=5, **options):
    """Return an engine, a batch and its targets."""
    model, loss = models.MODELS[name](), LOSSES[name]
    inputs = models.random_inputs(model, batch=batch)
    targets = random_targets(model, inputs, loss)
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1, **options)
    return engine, model, inputs, targets


def state(engine):
    """Return all that a call may change: averages, parameters, buffers, counter, generator."""
    averages = [factor.average.value for factor in engine.estimator.factors]
    arrays = [*engine.parameters.values(), *engine.buffers.values(), *averages]
    generator = engine.estimator.rng.bit_generator.state["state"]
    return [None if a is None else a.copy() for a in arrays], engine.counter, generator


def assert_same_state(one, other):
    assert one[1:] == other[1:]
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(a, b)


# -- trace -----------------------------------------------------------------------------------------


def test_statistics_of_a_trace_of_a_part_are_those_of_a_step_on_that_part():
    engine, _, inputs, targets = made("mlp", batch=6, estimation_mode="empirical")
    part, labels = {"input": inputs["input"][:4]}, targets[:4]
    trace = engine.trace(part, labels)
    objective = engine.objective
    scales = objective.fisher_scales(objective.observe(trace))
    engine.estimator.update_covariances(trace, scales=scales)
    other, *_ = made("mlp", batch=6, estimation_mode="empirical")
    other.step(part, labels)
    for one, two in zip(engine.estimator.factors, other.estimator.factors, strict=True):
        # A step divides the gradient of the loss where this trace scales that of the likelihood.
        np.testing.assert_allclose(one.cov, two.cov, rtol=1e-5, atol=1e-7)
    assert engine.counter == 0


def test_a_trace_keeps_the_parameters_that_it_was_made_with():
    engine, _, inputs, _ = made("mlp")
    trace = engine.trace(inputs)
    before = trace["output"].copy()
    engine.set_parameters({name: value * 0 for name, value in engine.parameters.items()})
    np.testing.assert_array_equal(trace["output"], before)
    assert not engine.trace(inputs)["output"].any()


def test_a_trace_without_targets_has_none():
    engine, _, inputs, targets = made("mlp")
    (name,) = (loss.targets for loss in engine.collection.losses)
    with pytest.raises(ke.UnknownNameError, match="nor a target"):
        engine.trace(inputs)[name]
    np.testing.assert_array_equal(engine.trace(inputs, targets)[name], targets)


def test_trace_refuses_what_step_refuses():
    engine, _, inputs, targets = made("mlp")
    with pytest.raises(ke.InputError, match="'input' is missing"):
        engine.trace({})
    with pytest.raises(ke.ShapeError, match="the model needs"):
        engine.trace({"input": inputs["input"][:, :2]})
    with pytest.raises(ke.NonFiniteError, match="first at index"):
        engine.trace({"input": inputs["input"] * np.nan})
    with pytest.raises(ke.UnknownNameError, match="no loss is on an output"):
        engine.trace(inputs, {"elsewhere": targets})


# -- loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["token_mlp", "cnn", "tied"])
def test_loss_is_that_of_the_oracle_and_has_the_bits_of_gradients(name, reduction):
    engine, model, inputs, targets = made(name, reduction=reduction)
    smallest = min(engine.parameters, key=lambda n: engine.parameters[n].size)
    expected, _ = oracle.loss_and_gradient(
        model, inputs, "output", [smallest], LOSSES[name], targets,
        reduction=reduction,
    )  # fmt: skip
    loss = engine.loss(inputs, targets)
    assert isinstance(loss, float)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert loss == engine.gradients(inputs, targets).loss


def test_loss_changes_nothing():
    engine, _, inputs, targets = made("cnn")
    engine.step(inputs, targets)
    before = state(engine)
    engine.loss(inputs, targets)
    assert_same_state(state(engine), before)


def test_loss_refuses_missing_targets_and_an_overflow():
    engine, _, inputs, targets = made("tied")
    with pytest.raises(ke.InputError, match="target"):
        engine.loss(inputs, None)
    large = {name: value * np.float32(1e30) for name, value in engine.parameters.items()}
    engine.set_parameters(large)
    with pytest.raises(ke.NonFiniteError):
        engine.loss(inputs, targets)
