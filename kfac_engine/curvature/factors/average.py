"""Updates the moving averages of statistics in place."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kfac_engine._types import Array
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.errors import InputError, NotReadyError


@dataclass(slots=True)
class MovingAverage:
    """An average over batches with the total weight of the batches.

    A debiased average is ``Σ decayᵏ·wₖ·xₖ / Σ decayᵏ·wₖ``. The quotient is stored, not
    the sum, so that a read computes nothing. With ``W' = decay·W + w`` the update is
    ``value ← (decay·W/W')·value + (w/W')·x``, one rank-k update of BLAS. After the first update
    ``value == x`` exactly, for every decay.

    The examples of batches may have different numbers of rows. A mean over rows then has the
    weight of a batch times its number of rows for each example.
    """

    # The average; None before the first batch. Updates change it in place.
    value: Array | None = None
    weight: float = 0.0  # total weight; zero before the first update
    # Mean number of rows of an example, debiased; None before the first update.
    repeats: float | None = None
    # Function that writes the entries that updates leave out, such as the upper triangle of a
    # symmetric matrix; None if the value is complete. Updates set it, and the next ``read`` calls
    # it.
    rest: Callable[[Array], None] | None = None
    name: str = "a moving average"  # name of the statistic, for messages
    # Whether the value is the share of this process in a sum over several processes.
    divided: bool = False

    def coefficients(
        self,
        decay: float,
        weight: float,
        config: CollectionConfig,
        repeats: float = 1,
        *,
        over_rows: bool = False,
    ) -> tuple[float, float]:
        """Return ``(beta, alpha)`` of the next update, and add its weight to the total.

        The update is ``value ← beta·value + alpha·x``. ``decay`` is in [0, 1]; 1 is a plain mean.
        ``weight`` of the new value is positive, and ``repeats`` its number of rows of an example.
        ``over_rows`` says whether the values are means over rows.
        """
        if not (0.0 <= decay <= 1.0 and 0.0 < weight < inf):
            raise InputError(
                f"a moving average needs a decay in [0, 1] and a positive weight, got {decay} and "
                f"{weight}."
            )
        old, self.weight = self.weight, decay * self.weight + weight
        share = weight / self.weight
        beta, alpha = decay * old / self.weight, share
        if not config.debias:
            beta, alpha = decay, 1.0 - decay
        before, self.repeats = self.repeats, repeats
        if before in (None, repeats):  # no bit changes
            return beta, alpha
        self.repeats = mean = before + share * (repeats - before)
        return (beta * before / mean, alpha * repeats / mean) if over_rows else (beta, alpha)

    def read(self) -> Array:
        """Return the complete average, the array itself.

        ``NotReadyError`` is raised if no batch was averaged yet, or if the average is divided among
        processes.
        """
        if self.divided:
            raise NotReadyError(
                f"{self.name} is divided among several processes; call engine.synchronize() in all "
                f"of them first."
            )
        value = self.lower()
        rest = self.rest  # another reading thread may complete the value meanwhile
        if rest is not None:
            rest(value)
            self.rest = None
        return value

    def lower(self) -> Array:
        """Return the average itself; only the lower triangle is defined if it is symmetric.

        ``NotReadyError`` is raised if no batch was averaged yet.
        """
        if self.value is None:
            raise NotReadyError(f"{self.name} has no statistics yet: update its covariance first.")
        return self.value
