"""Defines losses as distributions of targets, with samples, gradients and Fisher matrices.

``LOSSES`` is the table of losses by name; each has one input.
"""

from kfac_engine.losses.base import ElementwiseLoss, LossFunction, RegisteredLoss
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import (
    CategoricalLogitsNegativeLogProbLoss,
    OnehotCategoricalLogitsNegativeLogProbLoss,
)
from kfac_engine.losses.causal import CausalNegativeLogProbLoss
from kfac_engine.losses.ctc import CTCNegativeLogProbLoss
from kfac_engine.losses.kinds import (
    CTC,
    L1,
    LOSSES,
    Categorical,
    CausalLM,
    Huber,
    LossKind,
    MultiBernoulli,
    Normal,
    Poisson,
)
from kfac_engine.losses.normal import (
    NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss,
)
from kfac_engine.losses.observed import Weighted
from kfac_engine.losses.outliers import (
    HuberNegativeLogProbLoss,
    LaplaceNegativeLogProbLoss,
    PoissonNegativeLogProbLoss,
)

__all__ = [
    "CTC",
    "L1",
    "LOSSES",
    "CTCNegativeLogProbLoss",
    "Categorical",
    "CategoricalLogitsNegativeLogProbLoss",
    "CausalLM",
    "CausalNegativeLogProbLoss",
    "ElementwiseLoss",
    "Huber",
    "HuberNegativeLogProbLoss",
    "LaplaceNegativeLogProbLoss",
    "LossFunction",
    "LossKind",
    "MultiBernoulli",
    "MultiBernoulliNegativeLogProbLoss",
    "Normal",
    "NormalMeanNegativeLogProbLoss",
    "NormalMeanVarianceNegativeLogProbLoss",
    "OnehotCategoricalLogitsNegativeLogProbLoss",
    "Poisson",
    "PoissonNegativeLogProbLoss",
    "RegisteredLoss",
    "Weighted",
]
