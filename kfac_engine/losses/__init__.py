"""Predictive distributions: loss, samples, gradient, Fisher and its factors.

``LOSSES`` is the table of losses by name; each has one input.
"""

from typing import Protocol

from kfac_engine.losses.base import LossFunction, RegisteredLoss
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import (
    CategoricalLogitsNegativeLogProbLoss,
    OnehotCategoricalLogitsNegativeLogProbLoss,
)
from kfac_engine.losses.normal import (
    NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss,
)
from kfac_engine.registry import Registry

__all__ = [
    "LOSSES",
    "CategoricalLogitsNegativeLogProbLoss",
    "LossFactory",
    "LossFunction",
    "MultiBernoulliNegativeLogProbLoss",
    "NormalMeanNegativeLogProbLoss",
    "NormalMeanVarianceNegativeLogProbLoss",
    "OnehotCategoricalLogitsNegativeLogProbLoss",
    "RegisteredLoss",
]


class LossFactory(Protocol):
    """A function that creates a loss on an output of a model."""

    def __call__(
        self,
        output: str,
        /,
        *,
        targets: str | None = None,
        seed: int | None = None,
        class_axis: int = -1,
    ) -> LossFunction:
        """Return the loss on the value ``output``."""


LOSSES: Registry[LossFactory] = Registry(
    "loss",
    {
        "categorical": CategoricalLogitsNegativeLogProbLoss,
        "softmax_cross_entropy": CategoricalLogitsNegativeLogProbLoss,
        "cross_entropy": CategoricalLogitsNegativeLogProbLoss,
        "normal": NormalMeanNegativeLogProbLoss,
        "squared_error": NormalMeanNegativeLogProbLoss,
        "mse": NormalMeanNegativeLogProbLoss,
        "multi_bernoulli": MultiBernoulliNegativeLogProbLoss,
        "sigmoid_cross_entropy": MultiBernoulliNegativeLogProbLoss,
        "bce": MultiBernoulliNegativeLogProbLoss,
    },
)
