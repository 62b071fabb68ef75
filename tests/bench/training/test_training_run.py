"""A run: its clock, its evaluations, and the equal start of all methods."""

import itertools
from math import inf, nan

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training import run as module
from kfac_engine.bench.training.data import load_digits
from kfac_engine.bench.training.methods import METHODS
from kfac_engine.bench.training.run import MARKS, Run, train
from kfac_engine.bench.training.tasks import TASKS


def ticking(step):
    """A clock that advances by ``step`` at each second reading: a training step takes that long."""
    readings = itertools.count()
    return lambda: step * ((next(readings) + 1) // 2)


def trained(method, rate=None, *, task="digits", seconds=4.0, seed=0):
    settings = Run(task, method, rate, "tail", seed, seconds)
    return train(settings, None, cpu_clock=ticking(1.0), wall_clock=ticking(1.5))


OURS = list(METHODS)


@pytest.mark.parametrize("method", OURS)
def test_every_method_lowers_the_loss(method):
    rate = METHODS[method].usual_rates[0]
    outcome = trained(method, rate, seconds=12.0)
    assert not outcome.died
    assert (outcome.steps, outcome.cpu, outcome.wall) == (12, 12.0, 18.0)
    first, last = outcome.curve[0], outcome.curve[-1]
    # L-BFGS fits each batch to its end, and is far off on a few of the other examples.
    assert last.accuracy > first.accuracy if method == "lbfgs" else last.loss < first.loss
    assert last.step == 12


def test_evaluations_are_those_of_the_marks():
    outcome = trained("sgd", 0.01, seconds=100.0)
    assert [point.cpu for point in outcome.curve] == [0, *(100 * mark for mark in MARKS)]
    assert [point.wall for point in outcome.curve] == [1.5 * p.cpu for p in outcome.curve]
    # A step may pass several marks at once.
    assert [point.cpu for point in trained("sgd", 0.01, seconds=2.5).curve] == [0, 1, 2, 3]


def test_a_budget_of_steps_has_that_many_and_its_part_of_the_schedule():
    outcome = train(Run("moons", "adam", 0.01, "tail", 0, 0.0, 20), None)
    assert outcome.steps == 20
    assert [point.step for point in outcome.curve] == [0, *(round(20 * mark) for mark in MARKS)]
    assert outcome.curve[-1].loss < outcome.curve[0].loss


def test_validation_losses_of_a_regression_are_squared_errors():
    """The loss "normal" has a constant, which no prediction lowers, for each output."""
    outcome = train(Run("unet", "adam", 0.001, "tail", 0, 0.0, 1), None)
    task, images = TASKS["unet"], load_digits()
    data = task.data(images)
    engine = ke.Engine.from_onnx(task.model(8, 0).data, loss="normal", threads=1)
    errors = engine.predict({"x": data.held_x}) - data.held_y
    assert outcome.curve[0].loss == pytest.approx((errors**2).sum(axis=1).mean(), rel=1e-5)


def test_the_steps_are_those_of_the_optimizer():
    """SGD by hand on the same batches, with the rise and the fall of the rate."""
    task, images = TASKS["digits"], load_digits()
    data = task.data(images)
    engine = ke.Engine.from_onnx(task.model(8, 3).data, loss="categorical", threads=1)
    values, velocity = dict(engine.parameters), {}
    for t, (inputs, targets) in enumerate(itertools.islice(data.batches(128, 3), 10)):
        gradients = engine.gradients(inputs, targets).gradients
        spent = t / 10
        scale = min(1, (spent + 1e-3) / 0.02) * min(1, (1 - spent) / 0.4)
        for name, g in gradients.items():
            velocity[name] = 0.9 * velocity.get(name, 0) + g
            values[name] = values[name] - np.float32(0.1 * scale) * velocity[name]
        engine.set_parameters(values)
    losses = engine.evaluate(({"x": data.held_x}, data.held_y))
    last = trained("sgd", 0.1, seconds=10.0, seed=3).curve[-1]
    # Ten float32 steps in another order of operations.
    assert last.loss == pytest.approx(losses["loss"], rel=1e-4)
    assert last.accuracy == pytest.approx(losses["accuracy"], abs=1.5 / len(data.held_x))


def test_normalizations_are_evaluated_with_the_statistics_of_batches():
    outcome = trained("sgd", 0.01, task="resnet", seconds=1.0)
    task, images = TASKS["resnet"], load_digits()
    data = task.data(images)
    engine = ke.Engine.from_onnx(task.model(8, 0).data, loss="categorical", threads=1)
    assert outcome.curve[0].loss == pytest.approx(engine.loss({"x": data.held_x}, data.held_y))
    running = engine.evaluate(({"x": data.held_x}, data.held_y))["loss"]
    assert outcome.curve[0].loss != pytest.approx(running, rel=1e-3)


@pytest.mark.parametrize("loss", [nan, inf, 500.0])
def test_a_loss_that_explodes_ends_the_run(monkeypatch, loss):
    losses = iter([2.0, 3.0, loss])
    monkeypatch.setattr(module.Trainer, "step", lambda *arguments: next(losses))
    outcome = trained("sgd", 0.1, seconds=9.0)
    assert outcome.died.startswith("the loss of a batch grew from 2 to ")
    assert outcome.steps == 3
