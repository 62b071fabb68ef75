"""Names and types the inputs for targets and weights in a written file.

In Python, the shapes of the arrays say what the targets and weights of a batch are. The inputs of a
file have one meaning, which is chosen when the file is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from kfac_engine._types import DType
from kfac_engine.arguments import check_bool, check_choice
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.runtime.example_axis import ExampleAxis

# What has a weight.
Form: TypeAlias = Literal["targets", "predictions", "examples"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True, slots=True)
class TargetInputs:
    """The kind of a file's targets, and the weights or mask that they have.

    Raises:
        InputError: A value is unknown, or both weights and a mask are asked for.
    """

    # Whether the targets of a softmax loss are probabilities in the shape of the logits; otherwise
    # they are class numbers.
    probabilities: bool = False
    # What has a number in the input ``weights``: an entry of ``FORMS``; None without such an input.
    weights: Form | None = None
    # What has a Boolean in the input ``mask``, which says whether it counts.
    mask: Form | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_bool("probabilities", self.probabilities)
        for name, form in (("weights", self.weights), ("mask", self.mask)):
            if form is not None:
                check_choice(name, form, FORMS)
        if self.weights and self.mask:
            raise InputError(
                "a file cannot have inputs for both weights and a mask; leave weights or mask out."
            )

    def check(self, losses: Sequence[LossFunction]) -> None:
        """Raise an InputError if no loss can have these inputs."""
        if not losses and self != TargetInputs():
            raise InputError("without a loss, the file has no targets; name a loss.")
        classes = (
            isinstance(x, CategoricalLogitsNegativeLogProbLoss) and not x.predicts_inputs
            for x in losses
        )
        if self.probabilities and not any(classes):
            raise InputError(
                "probabilities in place of class numbers are targets of the loss 'categorical'; "
                "leave probabilities out: targets of 'multi_bernoulli' may be numbers from 0 to 1."
            )

    @property
    def form(self) -> Form | None:
        """What has a weight; None without weights."""
        return self.weights or self.mask

    def dtype(self, real: DType) -> DType:
        """Return the element type of the weights, for losses of a type."""
        return np.dtype(np.bool_) if self.mask else real

    def name(self, targets: str) -> str:
        """Return the name of the input with the weights of targets."""
        kind, prefix = "mask" if self.mask else "weights", "targets"
        place = targets.removeprefix(prefix) if targets.startswith(prefix) else f" of {targets}"
        return f"{kind}{place}"

    def are_classes(self, loss: LossFunction) -> bool:
        """Return whether the targets of a loss are class numbers, not rows of probabilities."""
        return isinstance(loss, CategoricalLogitsNegativeLogProbLoss) and not self.probabilities

    def axes(self, loss: LossFunction, rank: int, place: ExampleAxis) -> tuple[int, ...]:
        """Return the axes of a loss input that its weights have.

        ``rank`` is the rank of the input, and ``place`` is where its examples are. Weights of
        examples for an axis that has positions as well raise UnsupportedError.
        """
        if self.form == "examples":
            if place.repeats > 1:
                raise UnsupportedError(
                    f"an axis of '{loss.inputs[0]}' holds examples and positions, so that a file "
                    f"cannot have a weight for each example; choose 'predictions'."
                )
            return (place.axis,)
        entries = rank == 1 or (self.form == "targets" and loss.entrywise)
        return tuple(axis for axis in range(rank) if entries or axis != loss.class_axis % rank)
