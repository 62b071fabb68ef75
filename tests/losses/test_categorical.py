"""The categorical losses against SciPy, enumeration of all outcomes and counting."""

import numpy as np
import pytest
from scipy import special, stats

from kfac_engine.losses import (
    CategoricalLogitsNegativeLogProbLoss,
    OnehotCategoricalLogitsNegativeLogProbLoss,
)
from tests.losses.loss_cases import CASES, by_name, dense_fisher
from tests.oracle import predictive_fisher

EXACT = 1e-13  # The same few float64 operations in another order.
SIGNIFICANCE = 1e-4  # With a fixed seed a p-value is a constant; a wrong sampler drives it to 0.

LOSS = CategoricalLogitsNegativeLogProbLoss("z", "t")
ONE_HOT = OnehotCategoricalLogitsNegativeLogProbLoss("z", "t")


@pytest.mark.parametrize("case", CASES[:3], ids=by_name)
def test_value_is_the_sum_of_negative_log_softmax_at_the_targets(case):
    values = case.values()
    log_p = special.log_softmax(values["z"], axis=case.loss.class_axis)
    last = np.moveaxis(log_p, case.loss.class_axis, -1)
    expected = -sum(last[index][values["t"][index]] for index in np.ndindex(values["t"].shape))
    assert case.loss.value(values) == pytest.approx(expected, rel=EXACT)


def test_fisher_is_the_expected_outer_product_of_scores():
    values = CASES[0].values()
    expected = [predictive_fisher("categorical", z) for z in values["z"]]
    np.testing.assert_allclose(dense_fisher(CASES[0], values), expected, rtol=0, atol=EXACT)


def test_fisher_of_positions_is_block_diagonal():
    case = CASES[1]
    values = case.values()
    found = dense_fisher(case, values)
    for example, z in enumerate(values["z"]):
        blocks = [predictive_fisher("categorical", position) for position in z]
        expected = np.zeros((12, 12))
        for t, block in enumerate(blocks):
            expected[4 * t : 4 * t + 4, 4 * t : 4 * t + 4] = block
        np.testing.assert_allclose(found[example], expected, rtol=0, atol=EXACT)


def test_class_axis_only_permutes_axes():
    first = CASES[2]
    values = first.values()
    moved = {"z": np.moveaxis(values["z"], 1, -1), "t": values["t"]}

    def results(loss, values, to_last):
        u = np.random.default_rng(0).standard_normal((2, 2, 2, 3))
        v = {"z": u if to_last else np.moveaxis(u, -1, 1)}
        at = (1, 0, 2) if to_last else (2, 1, 0)
        made = [
            loss.gradient(values)["z"],
            loss.fisher(values, v)["z"],
            loss.fisher_factor(values, v["z"])["z"],
            loss.fisher_factor_transpose(values, v),
            loss.one_hot(values, at)["z"],
        ]
        return [a if to_last else np.moveaxis(a, 1, -1) for a in made]

    assert first.loss.value(values) == pytest.approx(LOSS.value(moved), rel=EXACT)
    for found, expected in zip(
        results(first.loss, values, False), results(LOSS, moved, True), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)
    draw = [
        loss.sample(batch, np.random.default_rng(0))
        for loss, batch in ((first.loss, values), (LOSS, moved))
    ]
    assert draw[0].shape == draw[1].shape == (2, 2, 2)


@pytest.mark.parametrize("class_axis", [-1, 1])
def test_samples_have_the_frequencies_of_the_softmax(class_axis):
    p = np.array([0.5, 0.3, 0.15, 0.05])
    n, positions = 4000, 3
    z = np.broadcast_to(np.log(p), (n, positions, 4))
    loss = CategoricalLogitsNegativeLogProbLoss("z", class_axis=class_axis)
    sample = loss.sample({"z": np.moveaxis(z, -1, class_axis)}, np.random.default_rng(0))
    assert sample.shape == (n, positions)
    assert sample.dtype == np.int64
    for position in range(positions):
        counts = np.bincount(sample[:, position], minlength=4)
        assert stats.chisquare(counts, n * p).pvalue > SIGNIFICANCE
    # Neighbouring positions are independent: the joint table is the product of the margins.
    joint = np.histogram2d(sample[:, 0], sample[:, 1], bins=4)[0]
    assert stats.chi2_contingency(joint).pvalue > SIGNIFICANCE


class Fixed:
    """A generator that always draws the same number."""

    def __init__(self, number):
        self.number = number

    def random(self, shape):
        return np.full(shape, self.number)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_classes_of_probability_zero_are_never_drawn(number, dtype):
    z = np.full((1, 1000), -1e4, dtype)
    z[0, 400:600] = np.linspace(-1, 1, 200)
    sample = LOSS.sample({"z": z}, Fixed(number))
    assert 400 <= sample[0] < 600


@pytest.mark.parametrize("number", [0.1, 0.5, 0.9], ids=str)
def test_cumulative_sums_of_many_classes_are_accurate(number):
    """Sums in float32 would be off by a hundred classes of 100,000."""
    sample = LOSS.sample({"z": np.zeros((1, 100_000), np.float32)}, Fixed(number))
    assert abs(sample[0] - 100_000 * number) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_give_finite_results(dtype, size):
    z = np.array([[size, 0, -size]], dtype)
    hit, miss = (int(np.argmax(z)), int(np.argmin(z)))
    values = {"z": z, "t": np.array([hit])}
    assert LOSS.value(values) == 0
    assert LOSS.value({**values, "t": np.array([miss])}) == pytest.approx(2e4)
    np.testing.assert_array_equal(LOSS.gradient(values)["z"], [[0, 0, 0]])
    v = {"z": np.ones_like(z)}
    for result in (
        LOSS.fisher(values, v)["z"],
        LOSS.fisher_factor(values, v["z"])["z"],
        LOSS.fisher_factor_transpose(values, v),
        LOSS.one_hot(values, (0,))["z"],
    ):
        np.testing.assert_array_equal(result, np.zeros((1, 3)))


def test_one_hot_rows_and_class_ids_are_the_same_loss():
    values = CASES[0].values()
    rows = {**values, "t": np.eye(4)[values["t"]]}
    assert ONE_HOT.value(rows) == pytest.approx(LOSS.value(values), rel=EXACT)
    np.testing.assert_array_equal(ONE_HOT.gradient(rows)["z"], LOSS.gradient(values)["z"])
    samples = [loss.sample(values, np.random.default_rng(3)) for loss in (ONE_HOT, LOSS)]
    np.testing.assert_array_equal(samples[0], np.eye(4)[samples[1]])
    assert samples[0].dtype == np.float64


@pytest.mark.parametrize("kind", ["int64", "bool", "float32"])
def test_one_hot_targets_may_have_any_real_type(kind):
    values = CASES[0].values()
    rows = np.eye(4)[values["t"]]
    expected = ONE_HOT.value({**values, "t": rows})
    assert ONE_HOT.value({**values, "t": rows.astype(kind)}) == expected


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "uint64"])
def test_class_ids_may_have_any_integer_type(kind):
    values = CASES[0].values()
    assert LOSS.value({**values, "t": values["t"].astype(kind)}) == LOSS.value(values)
