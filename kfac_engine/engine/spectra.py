"""The eigenvalues of a factor, next to the damping that is added to them."""

from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array


@dataclass(frozen=True, slots=True, eq=False)
class FactorSpectrum:
    """The eigenvalues of one factor.

    Attributes:
        parameters: Parameters of the layer, each with the part that belongs to the layer.
        factor: Symbol of the factor: ``"A"``, ``"G"``, ``"F"`` or ``"s"``.
        shape: Shape of the average of the factor.
        resolution: Rounding error of an eigenvalue, relative to the largest eigenvalue.
        eigenvalues: Eigenvalues without damping, ascending, ``(d,)``; ``(g, d)`` for a factor of
            ``g`` groups. None for a factor with more rows than requested.
        damping: Damping that a refresh adds to each eigenvalue, ``()``, or ``(g,)`` for a factor
            of ``g`` groups. None for a factor without damping.
    """

    parameters: tuple[str, ...]
    factor: str
    shape: tuple[int, ...]
    resolution: float
    eigenvalues: Array | None
    damping: Array | None

    @property
    def condition(self) -> float | None:
        """Largest eigenvalue divided by the smallest; the largest ratio of all groups.

        It is infinite if the smallest eigenvalue is not above the rounding error.
        """
        if self.eigenvalues is None:
            return None
        smallest, largest = self.eigenvalues[..., 0], self.eigenvalues[..., -1]
        is_regular = smallest > self.resolution * largest
        ratios = np.divide(largest, smallest, out=np.full_like(largest, np.inf), where=is_regular)
        return float(ratios.max())

    @property
    def damped_condition(self) -> float | None:
        """The condition number after the damping; negative eigenvalues count as zero."""
        if self.eigenvalues is None or self.damping is None:
            return None
        smallest = self.eigenvalues[..., 0].clip(min=0) + self.damping
        largest = self.eigenvalues[..., -1].clip(min=0) + self.damping
        return float((largest / smallest).max())

    @property
    def below_damping(self) -> int | None:
        """Number of eigenvalues that are smaller than the damping."""
        if self.eigenvalues is None or self.damping is None:
            return None
        return int((self.eigenvalues < self.damping[..., None]).sum())
