"""The losses of one model under their names, tower by tower.

``LossCollection`` keeps the specification's names; ``LayerCollection`` adds layers to it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Literal, TypeAlias

from kfac_engine._types import Thunk, Values
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.losses.base import LossFunction, RegisteredLoss
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss

# "VARIABLE_SCOPE": add a tower where the key is registered, else register it.
Reuse: TypeAlias = bool | Literal["VARIABLE_SCOPE"]
TargetMode: TypeAlias = Literal["data", "sample"]
CoefficientMode: TypeAlias = Literal["regular", "sqrt", "off"]

_COEFFICIENT: Mapping[str, Callable[[float], float]] = {
    "regular": lambda k: k,
    "sqrt": lambda k: k**0.5,
    "off": lambda k: 1.0,
}


class LossCollection:
    """Registered losses, in the order of registration; the loss to be optimized is their sum."""

    def __init__(self) -> None:
        self._losses: dict[str, RegisteredLoss] = {}

    @property
    def losses(self) -> tuple[LossFunction, ...]:
        """Every loss of every tower."""
        return tuple(tower for loss in self._losses.values() for tower in loss.towers)

    @property
    def towers_by_loss(self) -> tuple[tuple[LossFunction, ...], ...]:
        """For each loss, its towers."""
        return tuple(loss.towers for loss in self._losses.values())

    @property
    def registered_losses(self) -> tuple[RegisteredLoss, ...]:
        """Losses with their names and coefficients; at least one.

        Raises:
            InputError: There is none.
        """
        if not self._losses:
            raise InputError("Must have at least one registered loss.")
        return tuple(self._losses.values())

    @property
    def batch_value(self) -> str | None:
        """Name of a value whose first axis is the batch: the first loss's input, if any."""
        return self.losses[0].inputs[0] if self._losses else None

    def register_loss_function(
        self,
        loss: LossFunction,
        base_name: str,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a loss object; the total loss is the weighted sum over all.

        Args:
            loss: The loss of one tower.
            base_name: What to derive a name from when none is given.
            name: Unique name.
            coeff: Weight in the total.
            reuse: False: the name must be new. True: it must be there, and ``loss`` becomes its
                next tower. ``"VARIABLE_SCOPE"``: whichever applies.

        Returns:
            The name.

        Raises:
            UnknownNameError: ``reuse`` is True and the name is unknown, or False and it is taken.
            RegistrationError: ``reuse`` is True without a name, or the coefficient differs.
        """
        if reuse is True and name is None:
            raise RegistrationError("reuse=True needs the name of the loss that gets a tower.")
        name = name or self._unique(base_name)
        known = self._losses.get(name)
        if reuse is True and known is None:
            raise UnknownNameError(
                f"reuse=True, but no loss goes by '{name}'; registered: {', '.join(self._losses)}."
            )
        if reuse is False and known is not None:
            raise UnknownNameError(f"a loss '{name}' exists already; pass reuse=True for a tower.")
        if known is not None and known.coefficient != coeff:
            raise RegistrationError(
                f"loss '{name}' has coefficient {known.coefficient}, its new tower {coeff}."
            )
        self._losses[name] = RegisteredLoss(name, (*(known.towers if known else ()), loss), coeff)
        return name

    def register_categorical_predictive_distribution(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a softmax output: logits ``(n, …, classes)``, integer targets ``(n, …)``."""
        loss = CategoricalLogitsNegativeLogProbLoss(logits, targets, seed)
        base = "categorical_predictive_distribution"
        return self.register_loss_function(loss, base, name, coeff, reuse)

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
        return self.register_loss_function(loss, base, name, coeff, reuse)

    def register_multi_bernoulli_predictive_distribution(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register independent binary outputs: logits and targets of one shape."""
        loss = MultiBernoulliNegativeLogProbLoss(logits, targets, seed)
        base = "multi_bernoulli_predictive_distribution"
        return self.register_loss_function(loss, base, name, coeff, reuse)

    def eval_losses(
        self, target_mode: TargetMode = "data", coeff_mode: CoefficientMode = "regular"
    ) -> list[Thunk[float]]:
        """One callable a loss and tower, summed over the batch and weighted.

        Args:
            target_mode: Observed or sampled targets.
            coeff_mode: Weighted by the coefficient, its root, or one.

        Returns:
            Callables of the values of a batch.

        Raises:
            InputError: A mode is unknown.
        """
        if target_mode not in ("data", "sample") or coeff_mode not in _COEFFICIENT:
            raise InputError(
                f"target_mode is 'data' or 'sample', coeff_mode one of {', '.join(_COEFFICIENT)}; "
                f"got '{target_mode}' and '{coeff_mode}'."
            )
        weighted = []
        for loss in self._losses.values():
            k = _COEFFICIENT[coeff_mode](loss.coefficient)
            for tower in loss.towers:
                evaluate = tower.evaluate() if target_mode == "data" else tower.evaluate_on_sample()
                weighted.append(_times(k, evaluate))
        return weighted

    def eval_losses_on_samples(self) -> list[Thunk[float]]:
        """``eval_losses`` on sampled targets."""
        return self.eval_losses("sample")

    def total_loss(self, coeff_mode: CoefficientMode = "regular") -> Thunk[float]:
        """The sum of all losses on the data."""
        assert self.registered_losses  # refuses an empty collection
        return _sum(self.eval_losses("data", coeff_mode))

    def total_sampled_loss(self, coeff_mode: CoefficientMode = "regular") -> Thunk[float]:
        """The sum of all losses on sampled targets."""
        assert self.registered_losses  # refuses an empty collection
        return _sum(self.eval_losses("sample", coeff_mode))

    def _unique(self, base: str) -> str:
        if base not in self._losses:
            return base
        names = (f"{base}_{index}" for index in count(1))
        return next(name for name in names if name not in self._losses)


def _times(k: float, evaluate: Thunk[float]) -> Thunk[float]:
    return lambda values: k * evaluate(values)


def _sum(thunks: Sequence[Thunk[float]]) -> Thunk[float]:
    def total(values: Values) -> float:
        return sum(thunk(values) for thunk in thunks)

    return total
