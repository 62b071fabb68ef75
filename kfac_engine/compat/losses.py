"""Registers and evaluates losses with the methods of TensorFlow's K-FAC library."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any, Literal, TypeAlias

from kfac_engine._types import OfValues, Values
from kfac_engine.arguments import check_choice
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.collection import LossCollection
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss

# "VARIABLE_SCOPE": add a tower if the key is registered, else register the key.
Reuse: TypeAlias = bool | Literal["VARIABLE_SCOPE"]


TargetMode: TypeAlias = Literal["data", "sample"]
CoefficientMode: TypeAlias = Literal["regular", "sqrt", "off"]

_COEFFICIENT: Mapping[str, Callable[[float], float]] = {
    "regular": lambda k: k,
    "sqrt": lambda k: k**0.5,
    "off": lambda k: 1.0,
}


class LossMethods(LossCollection):
    """Losses in towers; signatures and positions of arguments are as in the library.

    Args:
        *args: Of the collection.
        **options: Likewise.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._colocation_ops: dict[LossFunction, str | None] = {}

    @property
    def towers_by_loss(self) -> tuple[tuple[LossFunction, ...], ...]:
        """The towers of each loss."""
        return tuple(tuple(loss.function for loss in towers) for towers in self._losses.values())

    @property
    def loss_colocation_ops(self) -> dict[LossFunction, str | None]:
        """Map from each tower of a loss to the value next to which it was registered."""
        return dict(self._colocation_ops)

    def register_loss_function(
        self,
        loss: LossFunction,
        colocation_op: str | None,
        base_name: str,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a loss object; the total loss is the weighted sum of all registered losses.

        Args:
            loss: The loss of one tower.
            colocation_op: Name of a value next to the loss, usually its input. It is stored for
                ``loss_colocation_ops``; losses are computed where their inputs are.
            base_name: Prefix of the name if ``name`` is omitted.
            name: Unique name.
            coeff: Weight in the total.
            reuse: False requires a new name. True requires a known name, and ``loss`` becomes its
                next tower. ``"VARIABLE_SCOPE"`` accepts either case.

        Returns:
            The name.

        Raises:
            UnknownNameError: ``reuse`` is True and the name is unknown, or False and the name is
                registered.
            RegistrationError: ``reuse`` is True without a name or with a seed (only the first
                tower of a loss may have one), distribution or coefficient differ, or the
                collection is closed.
            InputError: ``loss`` is not a loss object, or ``reuse`` has another value.
        """
        self._require_open("a loss")
        check_reuse(reuse)
        if reuse is True and name is None:
            raise RegistrationError("reuse=True needs the name of the loss that receives a tower.")
        if reuse is True and loss.seed is not None:
            raise RegistrationError(
                f"the new tower of loss '{name}' has a seed; only the first tower may have a seed."
            )
        name = name or self._unique(base_name)
        known = name in self._losses
        if reuse is True and not known:
            raise UnknownNameError(
                f"reuse=True, but no loss has the name '{name}'; registered: "
                f"{', '.join(self._losses)}."
            )
        if reuse is False and known:
            raise UnknownNameError(
                f"a loss '{name}' is registered already; add a tower to it with reuse=True."
            )
        self.add_loss(loss, name, coeff)
        self._colocation_ops[loss] = colocation_op
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
        """Register a Gaussian output of variance ½; its loss is the squared error."""
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
    ) -> list[OfValues[float]]:
        """Return a function for each loss and tower, which computes the weighted sum over a batch.

        Args:
            target_mode: ``"data"`` for observed targets, ``"sample"`` for sampled targets.
            coeff_mode: Weight of a loss: its coefficient, the square root of it, or one.

        Returns:
            Functions of the values of a batch.

        Raises:
            InputError: A mode is unknown.
        """
        check_choice("target_mode", target_mode, ("data", "sample"))
        check_choice("coeff_mode", coeff_mode, _COEFFICIENT)
        weighted: list[OfValues[float]] = []
        for loss in chain(*self._losses.values()):
            k, tower = _COEFFICIENT[coeff_mode](loss.coefficient), loss.function
            # Towers and losses without a seed draw independent samples.
            seed = len(weighted) if tower.seed is None else tower.seed
            sampled = target_mode == "sample"
            thunk = tower.evaluate_on_sample(seed) if sampled else tower.evaluate()
            weighted.append(_times(k, thunk))
        return weighted

    def eval_losses_on_samples(self) -> list[OfValues[float]]:
        """Return ``eval_losses`` on sampled targets."""
        return self.eval_losses("sample")

    def total_loss(self, coeff_mode: CoefficientMode = "regular") -> OfValues[float]:
        """Return a function that computes the sum of all losses on the data."""
        self._require_losses()
        return _sum(self.eval_losses("data", coeff_mode))

    def total_sampled_loss(self, coeff_mode: CoefficientMode = "regular") -> OfValues[float]:
        """Return a function that computes the sum of all losses on sampled targets."""
        self._require_losses()
        return _sum(self.eval_losses("sample", coeff_mode))

    def _unique(self, base: str) -> str:
        if base not in self._losses:
            return base
        names = (f"{base}_{index}" for index in count(1))
        return next(name for name in names if name not in self._losses)


def check_reuse(reuse: object) -> None:
    """Check that the argument ``reuse`` is True, False or ``"VARIABLE_SCOPE"``."""
    if not isinstance(reuse, bool) and reuse != "VARIABLE_SCOPE":
        raise InputError(f"reuse is True, False or 'VARIABLE_SCOPE', got {reuse!r}.")


def _times(k: float, evaluate: OfValues[float]) -> OfValues[float]:
    return lambda values: k * evaluate(values)


def _sum(thunks: Sequence[OfValues[float]]) -> OfValues[float]:
    def total(values: Values) -> float:
        return sum(thunk(values) for thunk in thunks)

    return total
