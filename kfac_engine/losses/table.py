"""``LOSSES``: the losses by name, each on one value of a model."""

from typing import Protocol

from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.losses.outliers import (
    HuberNegativeLogProbLoss,
    LaplaceNegativeLogProbLoss,
    PoissonNegativeLogProbLoss,
)
from kfac_engine.registry import Registry


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
        "laplace": LaplaceNegativeLogProbLoss,
        "absolute_error": LaplaceNegativeLogProbLoss,
        "l1": LaplaceNegativeLogProbLoss,
        "huber": HuberNegativeLogProbLoss,
        "poisson": PoissonNegativeLogProbLoss,
        "multi_bernoulli": MultiBernoulliNegativeLogProbLoss,
        "sigmoid_cross_entropy": MultiBernoulliNegativeLogProbLoss,
        "bce": MultiBernoulliNegativeLogProbLoss,
    },
)
