"""Registers losses by their distribution, and returns their sums as functions.

The signatures, including positional arguments, are those of TensorFlow's library, so they are not
generated from a table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from kfac_engine._types import Thunk, Values
from kfac_engine.errors import InputError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.collection import LossCollection, Reuse
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss

TargetMode: TypeAlias = Literal["data", "sample"]
CoefficientMode: TypeAlias = Literal["regular", "sqrt", "off"]

_COEFFICIENT: Mapping[str, Callable[[float], float]] = {
    "regular": lambda k: k,
    "sqrt": lambda k: k**0.5,
    "off": lambda k: 1.0,
}


class LossRegistrations(LossCollection):
    """The part of ``LayerCollection`` that registers losses by their distribution."""

    @property
    def towers_by_loss(self) -> tuple[tuple[LossFunction, ...], ...]:
        """The towers of each loss."""
        return tuple(loss.towers for loss in self._losses.values())

    @property
    def loss_colocation_ops(self) -> dict[LossFunction, str | None]:
        """Map from each tower of a loss to the value next to which it was registered."""
        return dict(self._colocation_ops)

    def register_categorical_predictive_distribution(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a softmax output with logits ``(n, …, classes)``, targets ``(n, …)``."""
        loss = CategoricalLogitsNegativeLogProbLoss(logits, targets, seed)
        base = "categorical_predictive_distribution"
        return self.register_loss_function(loss, logits, base, name, coeff, reuse)

    def register_normal_predictive_distribution(
        self,
        mean: str,
        var: float = 0.5,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a Gaussian output of fixed variance; ``var=0.5`` is the squared error."""
        loss = NormalMeanNegativeLogProbLoss(mean, var, targets, seed)
        base = "normal_predictive_distribution"
        return self.register_loss_function(loss, mean, base, name, coeff, reuse)

    def register_multi_bernoulli_predictive_distribution(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register independent binary outputs with logits and targets of one shape."""
        loss = MultiBernoulliNegativeLogProbLoss(logits, targets, seed)
        base = "multi_bernoulli_predictive_distribution"
        return self.register_loss_function(loss, logits, base, name, coeff, reuse)

    def register_softmax_cross_entropy_loss(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a softmax output, like ``register_categorical_predictive_distribution``."""
        loss = CategoricalLogitsNegativeLogProbLoss(logits, targets, seed)
        base = "sparse_softmax_cross_entropy_loss"
        return self.register_loss_function(loss, logits, base, name, coeff, reuse)

    def register_squared_error_loss(
        self,
        prediction: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a Gaussian output of variance ½, which is the squared error."""
        loss = NormalMeanNegativeLogProbLoss(prediction, 0.5, targets, seed)
        base = "squared_error_loss"
        return self.register_loss_function(loss, prediction, base, name, coeff, reuse)

    def register_sigmoid_cross_entropy_loss(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register binary outputs, like ``register_multi_bernoulli_predictive_distribution``."""
        loss = MultiBernoulliNegativeLogProbLoss(logits, targets, seed)
        base = "sigmoid_cross_entropy_loss"
        return self.register_loss_function(loss, logits, base, name, coeff, reuse)

    def eval_losses(
        self, target_mode: TargetMode = "data", coeff_mode: CoefficientMode = "regular"
    ) -> list[Thunk[float]]:
        """Return a function for each loss and tower, which computes the weighted sum over a batch.

        Args:
            target_mode: ``"data"`` for observed targets, ``"sample"`` for sampled targets.
            coeff_mode: Weight of a loss: its coefficient, the square root of it, or one.

        Returns:
            Functions of the values of a batch.

        Raises:
            InputError: A mode is unknown.
        """
        if target_mode not in ("data", "sample") or coeff_mode not in _COEFFICIENT:
            raise InputError(
                f"target_mode must be 'data' or 'sample', and coeff_mode one of "
                f"{', '.join(_COEFFICIENT)}; got '{target_mode}' and '{coeff_mode}'."
            )
        weighted: list[Thunk[float]] = []
        for loss in self._losses.values():
            k = _COEFFICIENT[coeff_mode](loss.coefficient)
            for tower in loss.towers:
                # Towers and losses without a seed draw independent samples.
                seed = len(weighted) if tower.seed is None else tower.seed
                sampled = target_mode == "sample"
                thunk = tower.evaluate_on_sample(seed) if sampled else tower.evaluate()
                weighted.append(_times(k, thunk))
        return weighted

    def eval_losses_on_samples(self) -> list[Thunk[float]]:
        """Return ``eval_losses`` on sampled targets."""
        return self.eval_losses("sample")

    def total_loss(self, coeff_mode: CoefficientMode = "regular") -> Thunk[float]:
        """Return a function that computes the sum of all losses on the data."""
        self._require_losses()
        return _sum(self.eval_losses("data", coeff_mode))

    def total_sampled_loss(self, coeff_mode: CoefficientMode = "regular") -> Thunk[float]:
        """Return a function that computes the sum of all losses on sampled targets."""
        self._require_losses()
        return _sum(self.eval_losses("sample", coeff_mode))


def _times(k: float, evaluate: Thunk[float]) -> Thunk[float]:
    return lambda values: k * evaluate(values)


def _sum(thunks: Sequence[Thunk[float]]) -> Thunk[float]:
    def total(values: Values) -> float:
        return sum(thunk(values) for thunk in thunks)

    return total
