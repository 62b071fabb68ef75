"""The estimators pass the checks that scikit-learn has for every estimator."""

import pytest
from sklearn.utils import estimator_checks

from kfac_engine.sklearn import OnnxClassifier, OnnxRegressor
from tests.sklearn.networks import double_network

# Each check that does not apply, with its reason.
ROUNDING = (
    "predictions in float32 differ by more than 1e-7 between batches of different sizes, because "
    "ONNX Runtime adds in another order; test_predictions_in_float64_do_not_depend_on_the_batch"
)
BATCHES = (
    "repeated examples fill other batches than weighted ones; "
    "engine/test_weighted_targets.py compares a batch"
)
NOT_APPLICABLE = {
    "check_methods_subset_invariance": ROUNDING,
    "check_methods_sample_order_invariance": ROUNDING,
    "check_sample_weight_equivalence_on_dense_data": BATCHES,
    "check_sample_weight_equivalence_on_sparse_data": BATCHES,
}
# Enough for the accuracy and R² that the checks demand of their small data sets.
ESTIMATORS = OnnxClassifier(epochs=30), OnnxRegressor(epochs=30)


def checks():
    """Each estimator with each of its checks."""
    for estimator in ESTIMATORS:
        yield from (
            pytest.param(estimator, check, id=f"{type(estimator).__name__}-{name_of(check)}")
            for estimator, check in estimator_checks.estimator_checks_generator(estimator)
        )


def name_of(check):
    """Name of the function under the partial applications."""
    while hasattr(check, "func"):
        check = check.func
    return check.__name__


@pytest.mark.filterwarnings("default")  # the checks judge warnings themselves
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    if name_of(check) in NOT_APPLICABLE:
        pytest.skip(NOT_APPLICABLE[name_of(check)])
    check(estimator)


def test_the_checks_include_those_that_do_not_apply():
    names = {name_of(parameter.values[1]) for parameter in checks()}
    assert set(NOT_APPLICABLE) <= names
    assert len(names) > 45


@pytest.mark.parametrize("name", [n for n, why in NOT_APPLICABLE.items() if why == ROUNDING])
@pytest.mark.parametrize("estimator", [OnnxClassifier, OnnxRegressor])
def test_predictions_in_float64_do_not_depend_on_the_batch(estimator, name):
    getattr(estimator_checks, name)(estimator.__name__, estimator(double_network, epochs=3))
