"""The quadratic model of the loss over the coefficients of a few directions.

Source: Martens & Grosse 2015, arXiv:1503.05671, section 7.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfac_engine.errors import NonFiniteError


@dataclass(frozen=True, slots=True)
class QuadraticModel:
    """The change ``cᵀx + ½ xᵀ(C + λB)x`` of the damped loss for the update ``Σ xᵢ directionᵢ``.

    Attributes:
        slopes: c, the inner products of the gradient with the directions, ``(m,)``.
        curvature: C, the forms ``directionᵢᵀ F directionⱼ``, ``(m, m)``.
        gram: B, the inner products of the directions, ``(m, m)``.
        damping: λ, which contains ``l2``.
        l2: Part of λ that belongs to the loss.
        precision: Machine epsilon of the directions.
    """

    slopes: NDArray[np.float64]
    curvature: NDArray[np.float64]
    gram: NDArray[np.float64]
    damping: float
    l2: float
    precision: float

    def minimum(self, last: float | None = None) -> NDArray[np.float64]:
        """Return the coefficients that minimize the model.

        Args:
            last: The last coefficient, if it is given; the minimum is then one over the others.

        Returns:
            ``(m,)``. Directions that are equal up to rounding share their part of the update, and
            a direction of zeros has the coefficient zero.

        Raises:
            NonFiniteError: The curvature overflows.
        """
        H, c = self.curvature + self.damping * self.gram, self.slopes
        if not (np.isfinite(H).all() and np.isfinite(c).all()):
            raise NonFiniteError(
                "the quadratic model of the loss overflows; check the gradient and the data for "
                "huge numbers."
            )
        if last is None:
            return self._solution(H, -c)
        free = self._solution(H[:-1, :-1], -c[:-1] - last * H[:-1, -1])
        return np.append(free, last)

    def change(self, x: NDArray[np.float64]) -> float:
        """Return the change of the loss for the coefficients ``x``, without the damping."""
        H = self.curvature + self.l2 * self.gram
        return float(self.slopes @ x + 0.5 * x @ H @ x)

    def _solution(self, H: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Solve ``H x = right``; the smallest solution where ``H`` is singular."""
        diagonal = np.diag(H)
        scale = np.where(diagonal > 0, 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1)), 0)
        # Entries of the scaled matrix are at most 1, with some roundings of the precision.
        inverse = np.linalg.pinv(
            scale[:, None] * H * scale, rcond=16 * self.precision, hermitian=True
        )
        solution: NDArray[np.float64] = scale * (inverse @ (scale * right))
        return solution
