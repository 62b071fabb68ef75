"""Adapts the damping to predicted and actual changes of the loss (Levenberg–Marquardt).

Source: Martens & Grosse 2015, arXiv:1503.05671, section 6.5.
"""

from dataclasses import dataclass
from math import isinf, isnan, nan

from kfac_engine.arguments import check_int, check_number, check_positive

# Reduction ratios above the first lower the damping; ratios below the second raise the damping.
_ACCURATE, _INACCURATE = 0.75, 0.25


@dataclass(frozen=True, slots=True)
class DampingAdaptation:
    """How a damping λ follows the reduction ratio ρ.

    Every ``interval`` steps, ρ is the change of the loss of the batch divided by the change that a
    quadratic model predicts. If ρ > 0.75, λ is multiplied by ``ω = decay ** interval``; if
    ρ < 0.25, λ is divided by ω.

    Attributes:
        interval: Steps from one adaptation to the next.
        decay: Factor of the damping for one step, in (0, 1).
        min_damping: Lower bound of the damping without its part ``l2``.
    """

    interval: int = 5
    decay: float = 0.95
    min_damping: float = 1e-8

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A value lies outside its range.
        """
        check_int("interval", self.interval, least=1)
        check_number("decay", self.decay, "(0, 1)")
        check_positive("min_damping", self.min_damping)

    def is_due(self, steps: int) -> bool:
        """Return whether the step that follows ``steps`` earlier steps adapts the damping."""
        return (steps + 1) % self.interval == 0

    def adapted(
        self, damping: float, change: float, predicted: float, l2: float = 0.0
    ) -> tuple[float, float]:
        """Return the new damping and the reduction ratio.

        Args:
            damping: λ of the step.
            change: Change of the loss of the batch; infinite if the new loss is not finite.
            predicted: Change that the quadratic model predicts.
            l2: Part of the damping that belongs to the loss; it stays in the damping.

        Returns:
            The new damping, and ρ. A ratio of NaN leaves the damping unchanged. An infinite change
            raises the damping for both signs of the prediction.
        """
        omega = self.decay**self.interval
        ratio = change / predicted if predicted else nan
        factor = 1.0
        if not isnan(ratio):
            if isinf(change):
                factor = 1 / omega
            elif (change < 0 < predicted) or ratio > _ACCURATE:
                factor = omega
            elif ratio < _INACCURATE:
                factor = 1 / omega
        return max(damping * factor, self.min_damping + l2), ratio
