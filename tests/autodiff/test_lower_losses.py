"""Losses that are operators, rewritten: the same values, and true gradients, in every form."""

from itertools import product

import pytest

from tests.autodiff.harness import N, Operand, case, p, positive, x
from tests.autodiff.lowering_checks import BATCHES, check_gradients, check_values

CLASSES = 4


def _classes(*sides, first=0):
    """Fed targets; the first is never one, which some cases ignore."""

    def draw(rng, shape):
        classes = rng.integers(0, CLASSES, shape)
        classes.flat[0] = first
        return classes

    return Operand(sides, draw, active=False)


_PLACES = {"flat": (), "line": (3,), "image": (2, 3)}
_WEIGHTS = {"even": (), "weighted": (p(CLASSES, draw=positive),)}
_IGNORED = {"all": {}, "one_ignored": {"ignore_index": 1}}


def _cases(op, label, places, reduction, **further):
    for weights, ignored in product(_WEIGHTS, _IGNORED):
        yield case(
            op, f"{label}_{reduction}_{weights}_{ignored}",
            x(N, CLASSES, *places), _classes(N, *places), *_WEIGHTS[weights],
            reduction=reduction, **_IGNORED[ignored], **further,
        )  # fmt: skip


CASES = [
    *(
        tested
        for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for (label, places), reduction in product(_PLACES.items(), ("mean", "sum", "none"))
        for tested in _cases(op, label, places, reduction)
    ),
    *_cases("SoftmaxCrossEntropyLoss", "with_scores", (3,), "mean", outputs=2),
    case("SoftmaxCrossEntropyLoss", "only_scores", x(N, CLASSES), _classes(N), outputs=2,
         seen=(1,)),
    case("SoftmaxCrossEntropyLoss", "outside_ignored", x(N, CLASSES, 2),
         _classes(N, 2, first=-5), ignore_index=-5),
]  # fmt: skip


@pytest.mark.parametrize("tested", CASES, ids=str)
def test_lowered_loss_has_values_of_loss_operator(tested):
    for batch in BATCHES:
        check_values(tested, batch)


@pytest.mark.parametrize("tested", CASES, ids=str)
def test_lowered_loss_gradients_equal_finite_differences(tested):
    check_gradients(tested)
