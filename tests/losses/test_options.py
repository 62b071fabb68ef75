"""Options of losses against closed forms, and bad options."""

import numpy as np
import pytest
from scipy import special

import kfac_engine as ke
from kfac_engine.losses import LOSSES, LossKind
from kfac_engine.losses.base import weights_of
from tests.losses.loss_cases import BERNOULLI, CATEGORICAL, NORMAL
from tests.oracle import derivative

RNG = np.random.default_rng(0)
Z = RNG.standard_normal((5, 3))
IDS = np.array([0, 2, 1, -100, 2])
ROWS = RNG.dirichlet(np.ones(3), 5)
BITS = RNG.integers(0, 2, (5, 3)).astype(float)
W = np.array([0.5, 2.0, 3.0])
LOG_P = special.log_softmax(Z, axis=-1)
LOG_SIGMOID, LOG_OTHER = special.log_expit(Z), special.log_expit(-Z)
KEPT = (IDS >= 0)[:, None]
EYE = np.eye(3)[IDS.clip(0)] * KEPT
WEIGHT_OF_IDS = W[IDS[IDS >= 0]].sum()


def smooth(rows, part):
    return rows * (1 - part) + part / 3


def of_bits(targets, weight=1.0):
    return -(weight * targets * LOG_SIGMOID + (1 - targets) * LOG_OTHER)


CASES = {
    "ignored": (CATEGORICAL("z", "t"), IDS, -(EYE * LOG_P), 4),
    "class weights": (
        CATEGORICAL("z", "t", class_weights=W), IDS, -(EYE * W * LOG_P), WEIGHT_OF_IDS),
    "smoothing": (
        CATEGORICAL("z", "t", label_smoothing=0.2), IDS, -(smooth(EYE, 0.2) * KEPT * LOG_P), 4),
    "both": (
        CATEGORICAL("z", "t", label_smoothing=0.2, class_weights=W), IDS,
        -(smooth(EYE, 0.2) * KEPT * W * LOG_P), WEIGHT_OF_IDS),
    "probabilities": (CATEGORICAL("z", "t"), ROWS, -(ROWS * LOG_P), 5),
    "weighted probabilities": (
        CATEGORICAL("z", "t", class_weights=W), ROWS, -(ROWS * W * LOG_P), 5),
    "smooth probabilities": (
        CATEGORICAL("z", "t", label_smoothing=0.2), ROWS, -(smooth(ROWS, 0.2) * LOG_P), 5),
    "positive weights": (BERNOULLI("z", "t", positive_weights=W), BITS, of_bits(BITS, W), 5),
    "one positive weight of soft targets": (
        BERNOULLI("z", "t", positive_weights=2.5), ROWS, of_bits(ROWS, 2.5), 5),
    "smooth bits": (BERNOULLI("z", "t", label_smoothing=0.2), BITS, of_bits(BITS * 0.8 + 0.1), 5),
    "ignored bits": (
        BERNOULLI("z", "t", ignore_index=1), BITS, -((1 - BITS) * LOG_OTHER), (1 - BITS).sum() / 3),
    "ignored reals": (
        NORMAL("z", 0.5, "t", ignore_index=0), BITS * ROWS,
        (BITS > 0) * ((Z - ROWS) ** 2 + 0.5 * np.log(np.pi)), BITS.sum() / 3),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_value_gradient_and_divisor_are_those_of_the_closed_form(case):
    loss, targets, terms, total = case
    values = {"z": Z, "t": targets}
    assert loss.value(values) == pytest.approx(terms.sum(), rel=1e-12)
    assert loss.observe(values).total == pytest.approx(total)
    gradient = loss.gradient(values)["z"]
    for index in np.ndindex(Z.shape):
        slope = derivative(lambda z: np.array(loss.value({"z": z, "t": targets})), Z, index)
        assert gradient[index] == pytest.approx(slope, abs=1e-8)


@every_case
def test_weights_multiply_what_counts(case):
    loss, targets, terms, _ = case
    w = np.array([0.5, 0.0, 2.0, 1.0, 3.0])
    found = loss.value({"z": Z, "t": targets, weights_of("t"): w})
    assert found == pytest.approx((terms * w[:, None]).sum(), rel=1e-12)
    garbage = np.where(w.reshape([-1, *[1] * (targets.ndim - 1)]) == 0, 99, targets)
    assert loss.value({"z": Z, "t": garbage, weights_of("t"): w}) == pytest.approx(found, rel=1e-12)


@every_case
def test_the_gauss_newton_matrix_is_the_weighted_fisher_matrix(case):
    loss, targets, *_ = case
    observed = loss.observe({"z": Z, "t": targets})
    weights = 1.0 if observed.weights is None else observed.weights
    direction, step = np.random.default_rng(1).standard_normal(Z.shape), 1e-4
    ahead, behind = (
        loss.gradient({"z": Z + s * direction, "t": targets})["z"] for s in (step, -step)
    )
    fisher = weights * loss.fisher({"z": Z}, {"z": direction})["z"]
    np.testing.assert_allclose((ahead - behind) / (2 * step), fisher, atol=1e-6)


BAD = {
    "smoothing": (ke.Categorical, {"label_smoothing": 1.0}, r"\[0, 1\)"),
    "negative smoothing": (ke.MultiBernoulli, {"label_smoothing": -0.1}, r"\[0, 1\)"),
    "text": (ke.Categorical, {"label_smoothing": "a"}, "label_smoothing"),
    "index": (ke.Categorical, {"ignore_index": 0.5}, "ignore_index"),
    "negative weights": (ke.Categorical, {"class_weights": [1, -1]}, "not negative"),
    "infinite weights": (ke.Categorical, {"class_weights": [1, np.inf]}, "finite"),
    "weights of weights": (ke.Categorical, {"class_weights": [[1, 2]]}, "list of finite numbers"),
    "positive weights": (ke.MultiBernoulli, {"positive_weights": [np.nan]}, "finite"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_options_are_one_clear_error(case):
    kind, options, message = case
    with pytest.raises(ke.InputError, match=message):
        kind(**options)


def test_unknown_options_name_the_nearest():
    with pytest.raises(ke.UnknownNameError, match="class_weights"):
        LossKind("categorical", class_weight=[1])
    with pytest.raises(ke.UnknownNameError, match="no option 'label_smoothing'"):
        LossKind("normal", label_smoothing=0.1)


def test_wrong_targets_are_refused_with_the_index_that_does_not_count():
    with pytest.raises(ke.InputError, match=r"target 3 of example 1 .* Targets of -100 do not"):
        CATEGORICAL("z", "t").value({"z": Z, "t": np.array([0, 3, 1, -100, 2])})
    with pytest.raises(ke.ShapeError, match="2 numbers, but 'z' has 3 classes"):
        CATEGORICAL("z", "t", class_weights=[1, 2]).value({"z": Z, "t": IDS})
    with pytest.raises(ke.InputError, match="depends on the targets"):
        CATEGORICAL("z", "t", class_weights=W).observe({"z": Z}, targets=False)


def test_every_loss_by_name_ignores_targets():
    for name in {*LOSSES} - {"ctc"}:  # its sequences end with any negative number
        assert LossKind(name, ignore_index=7).on("z", targets="t").ignore_index == 7
