"""The comparison is fair: equal data, equal CPU time, held-out data that select nothing."""

import numpy as np

from kfac_engine.cli.comparison import (
    METHODS,
    Run,
    best_rate,
    compared,
    median_curve,
)
from kfac_engine.cli.demo import verdicts
from kfac_engine.data import demo_model, digits


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


def test_the_best_rate_has_the_lowest_median_training_loss():
    nan = float("nan")
    runs = {
        0.1: [run([1.0]), run([9.0]), run([2.0])],
        0.2: [run([3.0]), run([3.0]), run([0.1])],
        0.3: [run([nan]), run([nan]), run([0.1])],
    }
    assert best_rate(runs) == 0.1


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
