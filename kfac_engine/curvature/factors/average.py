"""Moving averages of statistics, kept in place."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kfac_engine._types import Array
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.errors import InputError, NotReadyError


@dataclass(slots=True)
class MovingAverage:
    """An average over batches and the total weight behind it.

    A debiased average is ``Σ decayᵏ·wₖ·xₖ / Σ decayᵏ·wₖ``. Instead of the sum, its quotient is
    stored, so that reading costs nothing: with ``W' = decay·W + w`` the update is
    ``value ← (decay·W/W')·value + (w/W')·x``, which a rank-k BLAS update does in one pass.
    After the first update ``value == x`` exactly, whatever the decay.

    Attributes:
        value: The average; None before anything was averaged. Changed by ``blend`` and by whoever
            adds ``alpha·x`` after it.
        weight: Total weight, zero before the first update.
        rest: Writes what updates have left out of the value, a symmetric matrix's upper triangle;
            None where nothing is missing. Set after each update, called by the first ``read``.
    """

    value: Array | None = None
    weight: float = 0.0
    rest: Callable[[Array], None] | None = None

    def coefficients(
        self, decay: float, weight: float, config: CollectionConfig
    ) -> tuple[float, float]:
        """What the next update multiplies the old value and the new one by; counts the weight.

        Args:
            decay: In [0, 1]; 1 is a plain mean.
            weight: Of the new value.
            config: Says whether the average is debiased or classical.

        Returns:
            ``(beta, alpha)`` in ``value ← beta·value + alpha·x``.

        Raises:
            InputError: ``decay`` is outside [0, 1] or the weight is not a positive number.
        """
        if not (0.0 <= decay <= 1.0 and 0.0 < weight < inf):
            raise InputError(
                f"a moving average needs a decay in [0, 1] and a positive weight, got {decay} and "
                f"{weight}."
            )
        old, self.weight = self.weight, decay * self.weight + weight
        if not config.debias:
            return decay, 1.0 - decay
        return decay * old / self.weight, weight / self.weight

    def read(self, what: str) -> Array:
        """The average, complete.

        Args:
            what: Was averaged, for the message.

        Returns:
            The array itself, not a copy.

        Raises:
            NotReadyError: Nothing was averaged yet.
        """
        value = self.lower(what)
        rest = self.rest  # another thread that reads may write the same in the meantime
        if rest is not None:
            rest(value)
            self.rest = None
        return value

    def lower(self, what: str) -> Array:
        """The average as updates leave it: above the diagonal a symmetric one may hold anything.

        Args:
            what: Was averaged, for the message.

        Returns:
            The array itself, not a copy.

        Raises:
            NotReadyError: Nothing was averaged yet.
        """
        if self.value is None:
            raise NotReadyError(f"{what} has no statistics yet: update its covariance first.")
        return self.value
