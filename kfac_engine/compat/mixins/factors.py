"""Methods of a factor that create variables and operations, as TensorFlow's library names them.

Life cycle: construct → ``register_*`` → ``instantiate_cov_variables`` →
``make_covariance_update_op`` → ``instantiate_inv_variables`` → ``make_inverse_update_ops`` → read.
The estimator calls ``update`` and ``refresh`` instead.
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
        """Name for messages."""

    @property
    def cov(self) -> Array:
        """The current average."""

    @property
    def has_inverses(self) -> bool:
        """Whether ``refresh`` computes anything."""

    def refresh(self) -> None:
        """Recompute everything registered."""

    def read(self, values: Values) -> dict[str, Array]:
        """Check the values of a batch."""

    def update(self, values: Values, decay: float, weight: float = 1.0) -> None:
        """Update the average by a batch."""


class FactorOperations:
    """Variables and operations of a factor."""

    _averages_created = False

    def instantiate_cov_variables(self: Factor) -> None:
        """Allow covariance updates; can be called once.

        Raises:
            InputError: It was called before.
        """
        if self._averages_created:
            raise InputError(f"the covariance variables of {self.name} exist already.")
        self._averages_created = True

    def instantiate_inv_variables(self: Factor) -> None:
        """Close the set of registered powers; can be called once.

        Raises:
            InputError: It was called before.
        """
        if self.registrations_closed:
            raise InputError(f"the inverse variables of {self.name} exist already.")
        self.registrations_closed = True

    def make_covariance_update_op(
        self: Factor, ema_decay: float, ema_weight: float = 1.0
    ) -> Thunk[Array]:
        """Return a callable that updates the average by a batch and returns the new average.

        Args:
            ema_decay: Weight of the old average, in [0, 1].
            ema_weight: Weight of the new measurement.

        Returns:
            A function of the batch's values by name. Values of factors of one collection must have
            the same number of examples.

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
        """Return callables that recompute everything registered; empty if nothing is stored."""
        return [self.refresh] if self.has_inverses else []

    def get_cov_var(self: Factor) -> Array:
        """Return the average as it is stored; see ``get_cov`` for the dense matrix."""
        return self.cov
