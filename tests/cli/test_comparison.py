"""The comparison is fair: equal data, equal CPU time, held-out data that select nothing."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.cli.comparison import (
    BATCH_SIZE,
    EPOCH,
    EVALUATE_EVERY,
    HELD_OUT,
    METHODS,
    Run,
    best_rate,
    compared,
    train,
)
from kfac_engine.cli.demo import median_or_never, verdicts
from kfac_engine.cli.loss_curves import median_curve
from kfac_engine.data import demo_model, digits

SECONDS = 0.05


@pytest.fixture
def batches(monkeypatch):
    """The batches of all steps, by the id of the optimizer."""
    seen = {}
    original = ke.SGD.step

    def step(self, inputs, targets, scale=1.0):
        seen.setdefault(id(self), []).append((targets.copy(), scale))
        return original(self, inputs, targets, scale)

    monkeypatch.setattr(ke.SGD, "step", step)
    return seen


def sgd(rate):
    return lambda engine: ke.SGD(engine, rate)


def test_runs_of_one_seed_read_the_same_batches(batches):
    images, _ = digits()
    identity = np.arange(len(images)) % 10
    one, other = (
        train(demo_model("mlp"), sgd(rate), (images, identity), 3, SECONDS) for rate in (0.1, 0.01)
    )
    first, second = batches.values()
    for (left, _), (right, _) in zip(first, second, strict=False):
        np.testing.assert_array_equal(left, right)
    assert {len(labels) for labels, _ in first} == {BATCH_SIZE}
    assert one.evaluations.keys() != set()
    assert other.losses[0] == one.losses[0], "the runs start from the same weights"


def test_the_budget_is_cpu_time_and_the_schedule_follows_it(batches):
    run = train(demo_model("mlp"), sgd(0.1), digits(), 0, SECONDS)
    (steps,) = batches.values()
    assert run.seconds[-2] < SECONDS <= run.seconds[-1]
    assert (np.diff(run.seconds) >= 0).all()
    scales = [scale for _, scale in steps]
    spent = [0.0, *run.seconds[:-1]]
    for scale, seconds in zip(scales, spent, strict=True):
        # Constant to 60 % of the budget, then linear to zero.
        assert scale == pytest.approx(min(1, (1 - seconds / SECONDS) / 0.4), abs=1e-9)


def test_the_held_out_data_are_evaluated_after_every_fifth_step_and_the_last():
    make, engines = sgd(0.1), []
    run = train(demo_model("mlp"), lambda e: engines.append(e) or make(e), digits(), 0, SECONDS)
    count = len(run.losses)
    assert list(run.evaluations) == sorted(
        {*range(EVALUATE_EVERY, count + 1, EVALUATE_EVERY), count}
    )
    inputs, targets = run.held_out
    assert len(targets) == HELD_OUT
    assert run.held_out_loss == pytest.approx(engines[0].loss(inputs, targets), rel=1e-5)
    assert engines[0].example_axes.check(inputs, targets) == HELD_OUT


def test_every_method_runs_with_all_its_rates_for_each_seed():
    runs = list(compared(demo_model("mlp"), digits(), (0, 1), 0.01))
    expected = [(name, rate) for name, method in METHODS.items() for rate in method.rates]
    assert [(name, rate) for name, rate, _ in runs] == expected * 2
    assert {name: len(method.rates) for name, method in METHODS.items()} == {
        "K-FAC": 1, "Muon": 1, "Adam": 3, "SGD": 3,
    }  # fmt: skip


def run(losses, evaluations=None, seconds=None):
    seconds = seconds or [0.5 * (i + 1) for i in range(len(losses))]
    return Run(1.0, ({}, np.empty(0)), seconds, list(losses), dict(evaluations or {}))


def test_the_training_loss_is_the_mean_of_the_last_epoch():
    assert run([100.0, *range(EPOCH)]).training_loss == np.mean(range(EPOCH))


@pytest.mark.parametrize(
    ("target", "steps", "seconds"), [(0.5, 4, 2.0), (0.9, 2, 1.0), (0.1, None, None)]
)
def test_steps_and_seconds_are_those_of_the_first_evaluation_below_a_loss(target, steps, seconds):
    course = run([1.0] * 6, {2: 0.8, 4: 0.5, 6: 0.6})
    assert course.steps_to(target) == steps
    assert course.seconds_to(target) == seconds


def test_the_best_rate_has_the_lowest_median_training_loss():
    nan = float("nan")
    runs = {
        0.1: [run([1.0]), run([9.0]), run([2.0])],
        0.2: [run([3.0]), run([3.0]), run([0.1])],
        0.3: [run([nan]), run([nan]), run([0.1])],
    }
    assert best_rate(runs) == 0.1


def test_never_is_larger_than_any_number_in_a_median():
    assert median_or_never([1, None, 3]) == 3
    assert median_or_never([1, None, None]) is None


def test_a_verdict_names_the_best_method_and_the_number_of_kfac():
    winners = {
        "K-FAC": [run([0.2] * 4, {2: 0.3, 4: 0.05})],
        "Adam": [run([0.1] * 4, {1: 0.4, 2: 0.15, 4: 0.15})],
    }
    assert verdicts(winners) == [
        "training loss: Adam is ahead, 0.1000; K-FAC: 0.2000",
        "held-out loss: K-FAC is ahead, 0.0500",
        "steps to 0.5: Adam is ahead, 1; K-FAC: 2",
        "steps to 0.2: Adam is ahead, 2; K-FAC: 4",
        "steps to 0.1: K-FAC is ahead, 4",
        "seconds to 0.5: Adam is ahead, 0.50; K-FAC: 1.00",
        "seconds to 0.2: Adam is ahead, 1.00; K-FAC: 2.00",
        "seconds to 0.1: K-FAC is ahead, 2.00",
    ]


def test_the_median_of_curves_is_that_of_their_interpolations():
    x, y = median_curve([[0, 2], [1, 3], [0, 4]], [[0.0, 2.0], [5.0, 5.0], [4.0, 0.0]])
    np.testing.assert_allclose((x[0], x[-1]), (1, 2))
    np.testing.assert_allclose(y, np.median([x, np.full_like(x, 5), 4 - x], axis=0))
