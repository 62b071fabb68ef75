"""Lists losses by name, and describes losses with options before an output is chosen.

``ke.Categorical(ignore_index=255)`` is accepted wherever the name ``"categorical"`` is.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from kfac_engine._types import Array
from kfac_engine.arguments import check_bool
from kfac_engine.backend.namespace import array_module, as_array
from kfac_engine.errors import ShapeError, UnknownNameError, suggestion
from kfac_engine.losses.base import LossFunction, checked_weight
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.causal import CausalNegativeLogProbLoss
from kfac_engine.losses.checks import require_shape
from kfac_engine.losses.ctc import CTCNegativeLogProbLoss, collapsed
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.losses.outliers import (
    HuberNegativeLogProbLoss,
    LaplaceNegativeLogProbLoss,
    PoissonNegativeLogProbLoss,
)
from kfac_engine.losses.output import OutputLoss
from kfac_engine.registry import Registry

# Functions that create a loss on an output of a model, with options by keyword.
LOSSES: Registry[Callable[..., LossFunction]] = Registry(
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
        "causal_lm": CausalNegativeLogProbLoss,
        "ctc": CTCNegativeLogProbLoss,
    },
)


# Name of the loss that the file computes itself.
OUTPUT = "output"
# Arguments that say where a loss is, instead of what it is.
_PLACE = ("targets", "seed", "class_axis", "batch_axis")
# The options of every loss by name, with their defaults.
_OF_ALL = {"weight": 1.0, "find_logits": True}


class LossKind:
    """A loss by name with its options; see ``Categorical`` and the other losses of this module.

    Args:
        name: A name of ``LOSSES``.
        weight: Factor ≥ 0 of the loss.
        find_logits: Whether the loss, on an output of probabilities, reads the logits from which
            the model computes them.
        **options: Options of the loss.

    Raises:
        UnknownNameError: There is no loss of this name, or it does not have an option.
        InputError: An option has a wrong value.
    """

    def __init__(
        self, name: str, *, weight: float = 1.0, find_logits: bool = True, **options: Any
    ) -> None:
        self.name, self.options = name, options
        self.weight, self.find_logits = (
            checked_weight(weight),
            check_bool("find_logits", find_logits),
        )
        known = list(signature(LOSSES[name]).parameters)[1:]
        for option in options:
            if option not in known or option in _PLACE:
                its = [*(other for other in known if other not in _PLACE), *_OF_ALL]
                raise UnknownNameError(
                    f"the loss '{name}' has no option '{option}'{suggestion(option, its)}; its "
                    f"options: {', '.join(its)}."
                )
        self.on("output")

    def __repr__(self) -> str:
        """Return the call that creates the object."""
        chosen = {"weight": self.weight, "find_logits": self.find_logits}
        common = {name: value for name, value in chosen.items() if value != _OF_ALL[name]}
        every = {**self.options, **common}
        options = ", ".join(f"{name}={value!r:.80}" for name, value in every.items())
        kind = type(self)
        return f"LossKind({self.name!r}, {options})" if kind is LossKind else (
            f"{kind.__name__}({options})"
        )  # fmt: skip

    def on(self, output: str, *, targets: str | None = None, class_axis: int = -1) -> LossFunction:
        """Return the loss that compares a model's ``output`` with the targets named ``targets``."""
        place: dict[str, Any] = {"targets": targets, "class_axis": class_axis}
        return LOSSES[self.name](output, **place, **self.options)


class FileOutput(LossKind):
    """The loss that the file computes itself, times a weight; see ``OutputLoss``."""

    def __init__(self, *, weight: float = 1.0) -> None:
        self.name, self.options = OUTPUT, {}
        self.weight, self.find_logits = checked_weight(weight), False

    def on(self, output: str, *, targets: str | None = None, class_axis: int = -1) -> LossFunction:
        """Return the loss on an output with losses."""
        return OutputLoss(output)


def loss_named(name: str, **options: Any) -> LossKind:
    """Return the loss of a name, one of ``LOSSES`` or ``"output"``; raises as ``LossKind``."""
    if name != OUTPUT:
        return LossKind(name, **options)
    for option in options:
        if option != "weight":
            raise UnknownNameError(
                f"the loss '{OUTPUT}', which the file computes itself, has no option '{option}'; "
                f"its option: weight."
            )
    return FileOutput(**options)


class Categorical(LossKind):
    """Softmax cross-entropy, with class numbers or probabilities as targets.

    Args:
        ignore_index: Class number that does not count, such as the number for padding; None for
            none.
        class_weights: A number ≥ 0 for each class, the weight of its targets.
        label_smoothing: Part of each target, in [0, 1), that is divided among all classes.
        weight: Factor ≥ 0 of the loss.
        find_logits: Whether the loss, on an output of probabilities, reads the logits from which
            the model computes them.
    """

    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        class_weights: Sequence[float] | Array | None = None,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        find_logits: bool = True,
    ) -> None:
        super().__init__(
            "categorical",
            ignore_index=ignore_index,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
            weight=weight,
            find_logits=find_logits,
        )


class MultiBernoulli(LossKind):
    """Sigmoid cross-entropy, with a target of 0, 1 or a probability for each logit.

    Args:
        ignore_index: Target that does not count; None for none.
        positive_weights: A number ≥ 0, or one for each feature: the weight of targets of 1. Targets
            of 0 have the weight 1.
        label_smoothing: Part of each target, in [0, 1), that is divided among 0 and 1.
        weight: Factor ≥ 0 of the loss.
        find_logits: Whether the loss, on an output of probabilities, reads the logits from which
            the model computes them.
    """

    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        positive_weights: float | Sequence[float] | Array | None = None,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        find_logits: bool = True,
    ) -> None:
        super().__init__(
            "multi_bernoulli",
            ignore_index=ignore_index,
            positive_weights=positive_weights,
            label_smoothing=label_smoothing,
            weight=weight,
            find_logits=find_logits,
        )


class Normal(LossKind):
    """Gaussian targets with a fixed variance; for ``var=0.5`` the squared error plus a constant.

    Args:
        var: The variance > 0.
        ignore_index: Target that does not count; None for none.
        weight: Factor ≥ 0 of the loss.
    """

    def __init__(
        self, *, var: float = 0.5, ignore_index: int | None = None, weight: float = 1.0
    ) -> None:
        super().__init__("normal", var=var, ignore_index=ignore_index, weight=weight)


class L1(LossKind):
    """Targets of a Laplace distribution; for ``scale=1`` the absolute error plus a constant.

    Args:
        scale: The scale > 0.
        ignore_index: Target that does not count; None for none.
        weight: Factor ≥ 0 of the loss.
    """

    def __init__(
        self, *, scale: float = 1.0, ignore_index: int | None = None, weight: float = 1.0
    ) -> None:
        super().__init__("l1", scale=scale, ignore_index=ignore_index, weight=weight)


class Huber(LossKind):
    """Huber loss: half the squared error up to ``delta``, linear beyond it, plus a constant.

    Args:
        delta: The error > 0 from which the loss is linear.
        ignore_index: Target that does not count; None for none.
        weight: Factor ≥ 0 of the loss.
    """

    def __init__(
        self, *, delta: float = 1.0, ignore_index: int | None = None, weight: float = 1.0
    ) -> None:
        super().__init__("huber", delta=delta, ignore_index=ignore_index, weight=weight)


class Poisson(LossKind):
    """Counts, of which the model predicts the logarithm of the rate.

    Args:
        ignore_index: Target that does not count; None for none.
        weight: Factor ≥ 0 of the loss.
    """

    def __init__(self, *, ignore_index: int | None = -100, weight: float = 1.0) -> None:
        super().__init__("poisson", ignore_index=ignore_index, weight=weight)


class CausalLM(LossKind):
    """The loss of a causal language model: the logits of each position predict the next token.

    Targets are the token ids ``(n, positions)`` that the model reads, without a shift; they are
    the default where the model has an input for them. The weight of a token counts where the token
    is predicted; the default is the input ``attention_mask``, if targets are the default, too.

    Args:
        ignore_index: Token id that does not count, such as the number for padding; None for none.
        label_smoothing: Part of each target, in [0, 1), that is divided among all tokens.
        weight: Factor ≥ 0 of the loss.
        find_logits: Whether the loss, on an output of probabilities, reads the logits from which
            the model computes them.
    """

    def __init__(
        self,
        *,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        find_logits: bool = True,
    ) -> None:
        super().__init__(
            "causal_lm",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            weight=weight,
            find_logits=find_logits,
        )


class CTC(LossKind):
    """Sequences of labels for frames without an alignment: connectionist temporal classification.

    An output of the model has logits ``(n, frames, classes)``, also in another order of the axes.
    Targets are class ids ``(n, labels)``, with -1 or another negative number after the last label
    of a shorter sequence. Weights of a batch ``(n, frames)`` are 0 for frames after the end of an
    example; weights ``(n,)`` are those of the examples.

    Source: Graves, Fernández, Gomez & Schmidhuber 2006, "Connectionist temporal classification".

    Args:
        blank: Class that stands for no label.
        weight: Factor ≥ 0 of the loss.
        find_logits: Whether the loss, on an output of probabilities, reads the logits from which
            the model computes them.
    """

    def __init__(self, *, blank: int = 0, weight: float = 1.0, find_logits: bool = True) -> None:
        super().__init__("ctc", blank=blank, weight=weight, find_logits=find_logits)

    def decode(self, logits: Array, frames: Array | None = None) -> Array:
        """Return the labels of the most probable path of each example.

        Args:
            logits: Logits or probabilities ``(n, frames, classes)``.
            frames: Booleans or weights ``(n, frames)``, 0 for frames that do not count; None if all
                count.

        Returns:
            Class ids ``(n, labels)``, with -1 after the last label.

        Raises:
            ShapeError: The arrays have other shapes.
        """
        array = as_array(logits)
        if array.ndim != 3:
            raise ShapeError(
                f"the logits have shape {array.shape}; decode needs (n, frames, classes)."
            )
        if frames is not None:
            frames = array_module(array).asarray(frames)
            require_shape("frames", frames.shape, array.shape[:2], "a number for each frame")
        return collapsed(array.argmax(axis=2), frames, self.options["blank"])
