"""The comparison is fair, and its methods do what they should on a loss known in closed form."""

import math

import numpy as np
import pytest

from kfac_engine.cli.comparison import (
    BATCH_SIZE,
    EPOCH,
    HELD_OUT,
    KL_CLIP,
    LEARNING_RATE,
    METHODS,
    Digits,
    Run,
    best,
)
from kfac_engine.data import digits
from kfac_engine.engine.result import Result

START = np.array([3.0, -0.5, 0.25])
CURVATURE = np.array([4.0, 1.0, 0.1])  # the loss is ½ Σ cᵢ wᵢ²
ROUNDING = 1e-6  # the learning rate is applied in float32
BATCH = np.zeros((1, 1)), np.zeros(1)


class Quadratic:
    """An engine whose loss is ½ Σ cᵢ wᵢ² and whose Fisher matrix is exact."""

    def __init__(self):
        self.parameters = {"w": START.copy()}

    def set_parameters(self, values):
        self.parameters = dict(values)

    def gradients(self, inputs, targets):
        w = self.parameters["w"]
        return Result(float(CURVATURE @ w**2 / 2), {"w": CURVATURE * w}, {})

    def step(self, inputs, targets):
        result = self.gradients(inputs, targets)
        return Result(result.loss, result.gradients, {"w": result.gradients["w"] / CURVATURE})


def train(name, steps, setting):
    engine = Quadratic()
    step = METHODS[name].start(engine, setting)
    for _ in range(steps):
        step(*BATCH)
    return engine.parameters["w"]


def test_sgd_contracts_each_direction_by_its_curvature():
    expected = START * (1 - 0.2 * CURVATURE) ** 5
    np.testing.assert_allclose(train("SGD", 5, {LEARNING_RATE: 0.2}), expected, rtol=ROUNDING)


def test_kfac_without_a_bound_solves_a_quadratic_in_one_step():
    np.testing.assert_allclose(train("K-FAC", 1, {KL_CLIP: 1e9}), 0, atol=ROUNDING)


def test_kfac_with_a_bound_goes_so_far_that_the_quadratic_form_of_the_step_is_the_bound():
    step = START - train("K-FAC", 1, {KL_CLIP: 0.25})
    assert CURVATURE @ step**2 == pytest.approx(0.25, rel=1e-5)


def test_the_first_step_of_adam_has_the_size_of_its_rate_in_each_coordinate():
    moved = START - train("Adam", 1, {LEARNING_RATE: 0.01})
    np.testing.assert_allclose(moved, 0.01 * np.sign(START), rtol=ROUNDING)


def test_two_steps_of_adam_follow_algorithm_1_of_kingma_and_ba():
    w, m, v = START.copy(), 0, 0
    for t in (1, 2):
        g = CURVATURE * w
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        w = w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(train("Adam", 2, {LEARNING_RATE: 0.01}), w, rtol=ROUNDING)


def test_sgd_and_adam_try_nine_learning_rates_and_kfac_its_defaults_alone():
    assert {name: len(method.grid) for name, method in METHODS.items()} == {
        "SGD": 9, "Adam": 9, "K-FAC": 1,
    }  # fmt: skip


def test_an_epoch_visits_every_training_example_once_and_no_held_out_one():
    identity = np.arange(len(digits()[1]))
    data = Digits.draw(identity, identity, 2 * EPOCH, seed=0)
    assert {len(labels) for _, labels in data.batches} == {BATCH_SIZE}
    held_out = set(data.held_out[1])
    for epoch in (data.batches[:EPOCH], data.batches[EPOCH:]):
        visited = [label for _, labels in epoch for label in labels]
        assert sorted([*visited, *held_out]) == list(identity)
    assert len(held_out) == HELD_OUT


def test_batches_depend_on_the_seed_alone():
    images, labels = digits()
    first, again, other = (Digits.draw(images, labels, 3, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.batches[2][1], again.batches[2][1])
    assert (first.batches[2][1] != other.batches[2][1]).any()


def run(*losses):
    return Run({LEARNING_RATE: 1.0}, losses, (0.1,) * len(losses), 0.0)


@pytest.mark.parametrize(
    ("target", "steps"), [(0.5, 2), (0.9, 1), (0.1, None)], ids=["reached", "at once", "never"]
)
def test_steps_are_counted_until_the_loss_is_reached(target, steps):
    assert run(1.0, 0.8, 0.5, 0.6).steps_to(target) == steps


def test_a_diverged_run_never_wins():
    diverged = run(0.1, math.inf)
    assert best([diverged, run(2.0, 1.0)]) is not diverged
