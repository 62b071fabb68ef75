"""Stores the registered losses of a model by name."""

from itertools import chain

import numpy as np

from kfac_engine.errors import InputError, RegistrationError
from kfac_engine.losses.base import LossFunction, RegisteredLoss


class LossCollection:
    """Registered losses, in the order of registration; the total loss is their weighted sum."""

    def __init__(self) -> None:
        # By name, a loss for each part of the batch.
        self._losses: dict[str, tuple[RegisteredLoss, ...]] = {}
        self._finalized = False
        self._batch_value: str | None = None

    @property
    def losses(self) -> tuple[LossFunction, ...]:
        """The loss functions of all losses, one for each part of the batch."""
        return tuple(loss.function for loss in chain(*self._losses.values()))

    @property
    def registered_losses(self) -> tuple[RegisteredLoss, ...]:
        """The losses with their names and coefficients; losses of one name are adjacent.

        Raises:
            InputError: No loss is registered.
        """
        self._require_losses()
        return tuple(chain(*self._losses.values()))

    @property
    def batch_value(self) -> str | None:
        """Name of a value whose first axis is the batch; by default the first input of a loss."""
        first = self.losses[0].inputs[0] if self._losses else None
        return self._batch_value or first

    @property
    def batch_is_exact(self) -> bool:
        """Whether ``count_examples_by`` set the value; the input of a loss may have positions."""
        return self._batch_value is not None

    def count_examples_by(self, value: str) -> None:
        """Set the value whose first axis has one entry for each example."""
        self._require_open("the batch")
        self._batch_value = value

    def add_loss(self, loss: LossFunction, name: str, coefficient: float = 1.0) -> None:
        """Register a loss, or the loss function of a further part of the batch.

        Args:
            loss: The loss function of a part of the batch.
            name: Name of the loss.
            coefficient: Weight in the total.

        Raises:
            RegistrationError: The loss is registered with another distribution or coefficient, or
                the collection is closed.
            InputError: ``loss`` is not a loss object.
        """
        self._require_open("a loss")
        if not isinstance(loss, LossFunction):
            raise InputError(f"a loss object is needed, got {loss!r}.")
        known = self._losses.get(name, ())
        if known and known[0].coefficient != coefficient:
            raise RegistrationError(
                f"loss '{name}' has the coefficient {known[0].coefficient}, but its new part "
                f"has the coefficient {coefficient}; all parts need the same one."
            )
        if known and _distribution(known[0].function) != _distribution(loss):
            raise RegistrationError(
                f"loss '{name}' is a {type(known[0].function).__name__}; its new part must be of "
                f"the same distribution, with the same variance and class axis."
            )
        self._losses[name] = (*known, RegisteredLoss(name, loss, coefficient))

    def _require_losses(self) -> None:
        if not self._losses:
            raise InputError("Must have at least one registered loss.")

    def _require_open(self, what: str) -> None:
        """Raise a RegistrationError if the collection belongs to an estimator."""
        if self._finalized:
            raise RegistrationError(
                f"{what} cannot be added: the collection belongs to an estimator; create a new "
                f"collection."
            )


def _distribution(loss: LossFunction) -> tuple[type, dict[str, object]]:
    """Return the properties that the parts of a loss must share: all but names and the seed."""
    options = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(loss).items()
        if name not in {"inputs", "targets", "seed"}
    }
    return type(loss), {n: v for n, v in options.items() if v not in list(loss.inputs)}
