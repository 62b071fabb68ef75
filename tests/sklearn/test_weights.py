"""``sample_weight`` and ``class_weight`` of the estimators."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_sample_weight

import kfac_engine as ke
from kfac_engine.sklearn import OnnxClassifier, OnnxRegressor

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4))
Y = (X[:, 0] + 0.3 * RNG.standard_normal(60) > 0.8).astype(int)
OPTIONS = {"hidden": (8,), "epochs": 3, "batch_size": 20, "optimizer": "adam"}


def probabilities(sample_weight=None, **options):
    return (
        OnnxClassifier(**OPTIONS, **options).fit(X, Y, sample_weight=sample_weight).predict_proba(X)
    )


def test_balanced_classes_are_weights_of_examples():
    weights = compute_sample_weight("balanced", Y)
    balanced = probabilities(class_weight="balanced")
    np.testing.assert_array_equal(balanced, probabilities(weights))
    np.testing.assert_array_equal(
        balanced, probabilities(class_weight={0: weights[Y == 0][0], 1: weights[Y == 1][0]})
    )
    assert abs(balanced - probabilities()).max() > 1e-3
    np.testing.assert_array_equal(
        probabilities(RNG.random(60) * 0 + 2, class_weight="balanced"), balanced
    )


@pytest.mark.parametrize("zero", [(), (0, 3, 7)])
def test_balanced_classes_count_the_weights_of_examples(zero):
    weights = RNG.random(60) + 0.1
    weights[list(zero)] = 0
    of_class = weights.sum() / 2 / np.array([weights[Y == 0].sum(), weights[Y == 1].sum()])
    expected = probabilities(weights * of_class[Y])
    found = probabilities(weights, class_weight="balanced")
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 weights of the loss
    without = probabilities(weights * compute_sample_weight("balanced", Y))
    assert abs(expected - without).max() > 1e-3


def test_a_class_without_weight_does_not_count():
    weights = np.where(Y == 1, 1.0, 0.0)
    assert np.isfinite(probabilities(weights, class_weight="balanced")).all()


def test_examples_of_weight_zero_are_no_examples():
    weights = (np.arange(60) % 3 > 0).astype(float)
    left_out = OnnxClassifier(**OPTIONS).fit(X[weights > 0], Y[weights > 0])
    np.testing.assert_array_equal(probabilities(weights), left_out.predict_proba(X))


def test_the_regressor_fits_heavy_examples():
    y = np.where(np.arange(60) % 2, 1.0, -1.0)
    weights = np.where(y > 0, 100.0, 1.0)
    options = OPTIONS | {"batch_size": 60, "epochs": 200}
    options |= {"optimizer_options": {"learning_rate": 0.03}}
    heavy = OnnxRegressor(**options).fit(np.zeros((60, 4)), y, sample_weight=weights)
    mean = (weights * y).sum() / weights.sum()
    assert heavy.predict(np.zeros((1, 4)))[0] == pytest.approx(mean, abs=0.02)


def test_weights_survive_a_split_for_validation():
    estimator = OnnxClassifier(**OPTIONS, early_stop=2, class_weight="balanced")
    assert estimator.fit(X, Y).records_[-1]["validation_loss"] > 0


@pytest.mark.parametrize("weights", [np.full(60, -1.0), np.zeros(60)])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match=r"(?i)sample.weight"):
        probabilities(weights)


def test_one_epoch_cannot_balance_classes():
    with pytest.raises(ke.InputError, match="all data"):
        OnnxClassifier(**OPTIONS, class_weight="balanced").partial_fit(X, Y, classes=[0, 1])
