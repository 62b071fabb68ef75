"""Moving averages against sums written out batch by batch."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.factors.average import MovingAverage

ROUNDING = 1e-13  # relative: float64, a dozen additions


def averaged(numbers, decay, weights, config):
    """The values a moving average takes, one after each number."""
    average, seen = MovingAverage(np.zeros(())), []
    for x, weight in zip(numbers, weights, strict=True):
        beta, alpha = average.coefficients(decay, weight, config)
        average.value = beta * average.value + alpha * x
        seen.append(float(average.value))
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize(
    "weights", [[1.0] * 6, [1.0, 2.0, 0.5, 3.0, 1.0, 0.1]], ids=["equal", "unequal"]
)
def test_a_debiased_average_is_a_decayed_sum_over_its_decayed_weight(decay, weights):
    numbers = np.random.default_rng(0).normal(size=6)
    expected, var, total = [], 0.0, 0.0
    for x, weight in zip(numbers, weights, strict=True):
        var, total = decay * var + weight * x, decay * total + weight
        expected.append(var / total)
    found = averaged(numbers, decay, weights, ke.CollectionConfig())
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.95, 1.0])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_first_value_is_the_first_number_to_the_last_bit(decay, weight):
    assert averaged([1 / 3], decay, [weight], ke.CollectionConfig()) == [1 / 3]


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
def test_a_classical_average_is_decay_old_plus_the_rest_new(decay):
    numbers = np.random.default_rng(1).normal(size=5)
    expected, value = [], 0.0
    for x in numbers:
        value = decay * value + (1 - decay) * x
        expected.append(value)
    found = averaged(numbers, decay, [1.0] * 5, ke.CollectionConfig(debias=False))
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.parametrize(
    ("decay", "weight"),
    [(-0.1, 1), (1.1, 1), (np.nan, 1), (0.9, 0), (0.9, -1), (0.9, np.nan), (0.9, np.inf)],
)
def test_a_decay_or_weight_that_is_none_is_refused_and_not_counted(decay, weight):
    average = MovingAverage(weight=2.5)
    with pytest.raises(ValueError, match="decay in"):
        average.coefficients(decay, weight, ke.CollectionConfig())
    assert average.weight == 2.5


def test_an_average_of_nothing_cannot_be_read():
    with pytest.raises(ke.NotReadyError, match="a thing has no statistics yet"):
        MovingAverage(name="a thing").read()
