"""The Bernoulli loss against SciPy, enumeration of both outcomes and counting."""

import numpy as np
import pytest
from scipy import special, stats

from kfac_engine.losses import MultiBernoulliNegativeLogProbLoss
from tests.losses.loss_cases import CASES, by_name, dense_fisher
from tests.oracle import predictive_fisher

EXACT = 1e-13  # The same few float64 operations in another order.
SIGNIFICANCE = 1e-4  # With a fixed seed a p-value is a constant; a wrong sampler drives it to 0.

LOSS = MultiBernoulliNegativeLogProbLoss("z", "t")
BERNOULLI = tuple(case for case in CASES if type(case.loss) is MultiBernoulliNegativeLogProbLoss)


@pytest.mark.parametrize("case", BERNOULLI, ids=by_name)
def test_value_is_the_negative_log_probability(case):
    values = case.values()
    log_p = stats.bernoulli.logpmf(values["t"].astype(int), special.expit(values["z"]))
    assert case.loss.value(values) == pytest.approx(-log_p.sum(), rel=EXACT)


@pytest.mark.parametrize("case", BERNOULLI, ids=by_name)
def test_fisher_is_the_expected_outer_product_of_scores(case):
    values = case.values()
    expected = [predictive_fisher("multi_bernoulli", z.ravel()) for z in values["z"]]
    np.testing.assert_allclose(dense_fisher(case, values), expected, rtol=0, atol=EXACT)


def test_samples_have_the_frequencies_of_the_sigmoid():
    p, n = np.array([0.9, 0.5, 0.02]), 4000
    z = np.broadcast_to(special.logit(p), (n, 3))
    sample = LOSS.sample({"z": z}, np.random.default_rng(0))
    assert set(np.unique(sample)) == {0, 1}
    for yes, probability in zip(sample.sum(axis=0), p, strict=True):
        assert stats.binomtest(int(yes), n, probability).pvalue > SIGNIFICANCE
    assert stats.pearsonr(sample[:, 0], sample[:, 1]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("z", [1e4, -1e4], ids=str)
def test_extreme_logits_give_finite_results(z, dtype):
    values = {"z": np.array([[z]], dtype), "t": np.array([[z > 0]], dtype)}
    assert LOSS.value(values) == 0
    assert LOSS.gradient(values)["z"] == 0
    wrong = {**values, "t": 1 - values["t"]}
    assert LOSS.value(wrong) == 1e4
    assert LOSS.gradient(wrong)["z"] == np.sign(z)
    assert LOSS.fisher(values, values)["z"] == 0
    assert LOSS.one_hot(values, (0,))["z"] == 0
    assert LOSS.sample(values, np.random.default_rng(0)) == values["t"]


TAIL = pytest.approx(np.exp(-30.0), rel=1e-5, abs=0)  # float32, with |z| roundings in exp(−|z|)


@pytest.mark.parametrize("z", [30.0, -30.0], ids=str)
def test_tail_gradients_have_float32_accuracy(z):
    """Both p − t and p (1 − p) are about e⁻³⁰, far below one rounding of p."""
    values = {"z": np.array([[z]], np.float32), "t": np.array([[z > 0]], np.float32)}
    ones = {"z": np.ones((1, 1), np.float32)}
    assert abs(LOSS.gradient(values)["z"][0, 0]) == TAIL
    assert LOSS.fisher(values, ones)["z"][0, 0] == TAIL
    assert LOSS.value(values) == TAIL


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "float32"])
def test_targets_may_have_any_real_type(kind):
    values = BERNOULLI[0].values()
    assert LOSS.value({**values, "t": values["t"].astype(kind)}) == LOSS.value(values)


def test_probability_targets_give_cross_entropy():
    z, t = np.array([[0.3, -2.0]]), np.array([[0.25, 0.9]])
    p = special.expit(z)
    expected = -(t * np.log(p) + (1 - t) * np.log(1 - p)).sum()
    assert LOSS.value({"z": z, "t": t}) == pytest.approx(expected, rel=EXACT)
    np.testing.assert_allclose(LOSS.gradient({"z": z, "t": t})["z"], p - t, rtol=0, atol=EXACT)
