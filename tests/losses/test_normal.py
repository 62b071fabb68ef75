"""The normal losses against SciPy's density, closed forms and quadrature."""

import numpy as np
import pytest
from scipy import stats

from kfac_engine.losses import NormalMeanNegativeLogProbLoss, NormalMeanVarianceNegativeLogProbLoss
from tests.losses.loss_cases import CASES, by_name, dense_fisher
from tests.oracle import derivative

EXACT = 1e-13  # The same few float64 operations in another order.
NUMERICAL = 1e-9  # Extrapolated finite differences of analytic functions.
SIGNIFICANCE = 1e-4  # With a fixed seed a p-value is a constant; a wrong sampler drives it to 0.

FIXED = tuple(case for case in CASES if type(case.loss) is NormalMeanNegativeLogProbLoss)
PREDICTED = tuple(
    case for case in CASES if type(case.loss) is NormalMeanVarianceNegativeLogProbLoss
)
BOTH = NormalMeanVarianceNegativeLogProbLoss("m", "s", "t")


@pytest.mark.parametrize("case", [*FIXED, *PREDICTED], ids=by_name)
def test_value_is_the_negative_log_density(case):
    values = case.values()
    variance = values["s"] if case in PREDICTED else case.loss.var
    density = stats.norm.logpdf(values["t"], values["z"], variance**0.5)
    assert case.loss.value(values) == pytest.approx(-density.sum(), rel=EXACT)


@pytest.mark.parametrize("case", FIXED, ids=by_name)
def test_fisher_is_the_inverse_variance(case):
    size = int(np.prod(case.shape[1:]))
    expected = np.broadcast_to(np.eye(size) / case.loss.var, (case.shape[0], size, size))
    np.testing.assert_allclose(dense_fisher(case, case.values()), expected, rtol=EXACT)


def test_squared_error_has_the_fisher_two_and_the_gradient_of_the_square():
    loss = NormalMeanNegativeLogProbLoss("z", targets="t")
    z, t = np.array([[1.0, -2.0]]), np.array([[0.5, 1.0]])
    np.testing.assert_array_equal(loss.fisher({"z": z}, {"z": z})["z"], 2 * z)
    np.testing.assert_array_equal(loss.gradient({"z": z, "t": t})["z"], 2 * (z - t))


@pytest.mark.parametrize("var", [2, np.float32(2), np.int64(2), np.float64(2)], ids=repr)
def test_variance_type_does_not_change_element_type(var):
    loss = NormalMeanNegativeLogProbLoss("z", var, "t")
    values = {name: np.ones((2, 3), np.float32) for name in "zt"}
    assert loss.gradient(values)["z"].dtype == np.float32
    assert loss.fisher(values, values)["z"].dtype == np.float32
    assert loss.sample(values, np.random.default_rng(0)).dtype == np.float32


def test_variance_is_not_rounded_to_float32():
    z = np.ones((1, 1))
    found = NormalMeanNegativeLogProbLoss("z", 0.1).fisher({"z": z}, {"z": z})["z"]
    assert found[0, 0] == pytest.approx(10, rel=1e-15)


def test_fisher_of_mean_and_variance_is_the_expected_outer_product_of_scores():
    """By Gauss-Hermite quadrature, exact here: the scores are polynomials of degree 2 in t."""
    mean, variance = 0.7, 1.3
    nodes, weights = np.polynomial.hermite_e.hermegauss(10)
    expected = np.zeros((2, 2))
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        t = mean + variance**0.5 * node
        score = [
            derivative(
                lambda x, t=t: np.array(stats.norm.logpdf(t, x[0], x[1] ** 0.5)),
                np.array([mean, variance]),
                (i,),
            )
            for i in (0, 1)
        ]
        expected += weight * np.outer(score, score)
    values = {"m": np.full((1, 1), mean), "s": np.full((1, 1), variance)}
    found = [
        np.concatenate(BOTH.multiply_fisher(tuple(e.reshape(2, 1, 1)))(values)).ravel()
        for e in np.eye(2)
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=NUMERICAL)


def test_inner_vectors_have_means_before_variances():
    m, s = np.zeros((1, 2)), np.full((1, 2), 4.0)
    u = np.array([[1.0, 2.0, 3.0, 4.0]])
    to_mean, to_variance = BOTH.multiply_fisher_factor(u)({"m": m, "s": s})
    np.testing.assert_allclose(to_mean, [[0.5, 1.0]], rtol=EXACT)  # u / √s
    np.testing.assert_allclose(to_variance, u[:, 2:] / (4 * 2**0.5), rtol=EXACT)  # u / (√2 s)
    assert BOTH.inner_shape({"m": m, "s": s}) == (1, 4)


@pytest.mark.parametrize("predicted", [False, True], ids=["fixed", "predicted"])
def test_samples_follow_the_distribution(predicted):
    n = 4000
    values = {"m": np.full((n, 2), [1.0, -3.0]), "s": np.full((n, 2), [0.25, 4.0])}
    loss = BOTH if predicted else NormalMeanNegativeLogProbLoss("m", 0.25)
    sample = loss.sample(values, np.random.default_rng(0))
    for column, mean, deviation in ((0, 1, 0.5), (1, -3, 2 if predicted else 0.5)):
        law = stats.norm(mean, deviation)
        assert stats.kstest(sample[:, column], law.cdf).pvalue > SIGNIFICANCE
    assert stats.pearsonr(*sample.T).pvalue > SIGNIFICANCE


def test_large_errors_give_finite_float32_results():
    loss = NormalMeanNegativeLogProbLoss("z", targets="t")
    values = {"z": np.array([[1e4]], np.float32), "t": np.array([[-1e4]], np.float32)}
    assert loss.value(values) == pytest.approx(4e8, rel=1e-6)
    assert loss.gradient(values)["z"][0, 0] == 4e4
