"""Laplace, Huber and Poisson losses are log-likelihoods: densities, information and samples."""

import numpy as np
import pytest
from scipy import integrate, stats

import kfac_engine as ke
from tests.losses.loss_cases import HUBER, LAPLACE, POISSON

LOCATIONS = {
    "Laplace": LAPLACE("z", 0.7, "t"),
    "Huber": HUBER("z", 0.7, "t"),
    "wide Huber": HUBER("z", 5.0, "t"),
}
of_location = pytest.mark.parametrize("loss", LOCATIONS.values(), ids=LOCATIONS)
MEAN = {"z": np.array([[0.3]])}


def density(loss, target):
    return np.exp(-loss.negative_log_probs(MEAN, np.array([[target]])).item())


@of_location
def test_density_has_the_integral_one_and_the_information_of_its_score(loss):
    def squared_score(target):
        score = loss.gradient_of(MEAN, np.array([[target]]))["z"].item()
        return score**2 * density(loss, target)

    kinks = [0.3 - 0.7, 0.3, 0.3 + 0.7]
    total, _ = integrate.quad(lambda t: density(loss, t), -40, 40, points=kinks, limit=200)
    assert total == pytest.approx(1, abs=1e-8)
    information, _ = integrate.quad(squared_score, -40, 40, points=kinks, limit=200)
    assert loss.information(MEAN)["z"].item() == pytest.approx(information, abs=1e-7)


@of_location
def test_samples_have_the_density(loss):
    many = {"z": np.full((4000, 1), 0.3)}
    samples = loss.sample(many, np.random.default_rng(0)).ravel()
    grid = np.linspace(-40, 40, 20001)
    terms = loss.negative_log_probs({"z": np.full((len(grid), 1), 0.3)}, grid[:, None])
    below = np.cumsum(np.exp(-terms.ravel())) * (grid[1] - grid[0])
    assert stats.kstest(samples, lambda x: np.interp(x, grid, below)).pvalue > 0.01


def test_values_are_the_errors_plus_a_constant():
    z, t = {"z": np.array([[0.0]])}, np.array([[3.0]])
    zero = np.zeros((1, 1))
    for loss, expected in ((LAPLACE("z"), 3), (HUBER("z", 1.0), 2.5), (HUBER("z", 5.0), 4.5)):
        terms = loss.negative_log_probs(z, t) - loss.negative_log_probs(z, zero)
        assert terms.item() == pytest.approx(expected)


def test_counts_have_the_distribution_of_poisson():
    z = {"z": np.array([[1.2]])}
    for count in range(8):
        nats = POISSON("z").negative_log_probs(z, np.array([[count]])).item()
        assert np.exp(-nats) == pytest.approx(stats.poisson.pmf(count, np.exp(1.2)))
    many = {"z": np.full((4000, 1), 1.2)}
    samples = POISSON("z").sample(many, np.random.default_rng(0)).ravel()
    observed = np.bincount(samples.astype(int), minlength=12)[:12] / 4000
    np.testing.assert_allclose(observed, stats.poisson.pmf(np.arange(12), np.exp(1.2)), atol=0.03)


@pytest.mark.parametrize(
    ("kind", "option"), [(ke.L1, "scale"), (ke.Huber, "delta"), (ke.Normal, "var")]
)
def test_options_that_are_not_positive_are_refused(kind, option):
    assert repr(kind()).startswith(kind.__name__)
    for wrong in (0, -1.0, np.nan, "a"):
        with pytest.raises(ke.InputError):
            kind(**{option: wrong})


def test_negative_counts_are_refused():
    values = {"z": np.zeros((2, 1)), "t": np.array([[1.0], [-1.0]])}
    with pytest.raises(ke.InputError, match="not a count"):
        POISSON("z", "t").value(values)
