"""Methods of a factor that create variables and operations, as in TensorFlow's library.

The order of calls is: constructor, ``register_*``, ``instantiate_cov_variables``,
``make_covariance_update_op``, ``instantiate_inv_variables``, ``make_inverse_update_ops``, and then
reads. The estimator calls ``update`` and ``refresh`` instead.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kfac_engine._types import Array, Thunk, Values
from kfac_engine.errors import InputError, NotReadyError


class Factor(Protocol):
    """The part of ``FisherFactor`` that the mixin calls."""

    registrations_closed: bool
    _averages_created: bool

    @property
    def name(self) -> str:
        """The name for messages."""

    @property
    def cov(self) -> Array:
        """The current average."""

    @property
    def has_inverses(self) -> bool:
        """Whether an inverse or a power is registered."""

    def refresh(self) -> None:
        """Recompute all registered inverses and powers."""

    def read(self, values: Values) -> dict[str, Array]:
        """Return the values that the factor reads from a batch, after checks."""

    def update(self, values: Values, decay: float, weight: float = 1.0) -> None:
        """Update the average by a batch."""


class FactorOperations:
    """Methods that create the variables and operations of a factor."""

    _averages_created = False

    def instantiate_cov_variables(self: Factor) -> None:
        """Allow covariance updates.

        Raises:
            InputError: This method was called before.
        """
        if self._averages_created:
            raise InputError(
                f"the covariance variables of {self.name} exist already; call this method once."
            )
        self._averages_created = True

    def instantiate_inv_variables(self: Factor) -> None:
        """Prevent the registration of further powers.

        Raises:
            InputError: This method was called before.
        """
        if self.registrations_closed:
            raise InputError(
                f"the inverse variables of {self.name} exist already; call this method once."
            )
        self.registrations_closed = True

    def make_covariance_update_op(
        self: Factor, ema_decay: float, ema_weight: float = 1.0
    ) -> Thunk[Array]:
        """Return a function that updates the average by a batch and returns the new average.

        Args:
            ema_decay: Weight of the old average, in [0, 1].
            ema_weight: Weight of the new measurement.

        Returns:
            A function of the values of a batch by name. All factors of a collection must read the
            same number of examples.

        Raises:
            NotReadyError: ``instantiate_cov_variables`` was not called.
        """
        if not self._averages_created:
            raise NotReadyError(f"call instantiate_cov_variables of {self.name} first.")

        def update(values: Values) -> Array:
            self.update(self.read(values), ema_decay, ema_weight)
            return self.cov

        return update

    def make_inverse_update_ops(self: Factor) -> Sequence[Callable[[], None]]:
        """Return functions that recompute all registered inverses and powers."""
        return [self.refresh] if self.has_inverses else []

    def get_cov_var(self: Factor) -> Array:
        """Return the average in its stored form; ``get_cov`` returns the dense matrix."""
        return self.cov
