"""The eigenvalues of the factors of an engine, next to the damping that is added to them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import whole
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import NotReadyError


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


def factor_spectra(engine: Engine, *, most_rows: int | None = None) -> tuple[FactorSpectrum, ...]:
    """Return the eigenvalues of all factors, in the order of ``engine.layers``.

    The eigenvalues are computed in float64 on the CPU, in cubic time, from the current averages.

    Args:
        engine: An engine with statistics.
        most_rows: Largest number of rows of a matrix whose eigenvalues are computed; None for no
            bound.

    Returns:
        A spectrum for each factor of each layer.

    Raises:
        InputError: The bound is not a positive whole number.
        NotReadyError: The engine has no statistics.
    """
    if most_rows is not None:
        whole("most_rows", most_rows, least=1)
    if any(factor.average.value is None for factor in engine.estimator.factors):
        raise NotReadyError("there are no statistics yet; call observe() or step() first.")
    return tuple(_spectra(engine, most_rows))


def _spectra(engine: Engine, most_rows: int | None) -> Iterator[FactorSpectrum]:
    computed: dict[int, Array | None] = {}  # layers with equal statistics share a factor
    for layer in engine.layers:
        block = engine.collection.fisher_blocks[layer.key]
        names = tuple(name + part for name, part in zip(layer.parameters, layer.parts, strict=True))
        columns = zip(block.symbols, block.factors, block.factor_dampings(), strict=True)
        for symbol, factor, damping in columns:
            average = factor.average.read()
            if id(factor) not in computed:
                computed[id(factor)] = _eigenvalues(factor, most_rows)
            yield FactorSpectrum(
                names,
                symbol,
                average.shape,
                average.shape[-1] * float(np.finfo(average.dtype).eps),
                computed[id(factor)],
                None if damping is None else np.asarray(damping, np.float64),
            )


def _eigenvalues(factor: FisherFactor, most_rows: int | None) -> Array | None:
    """Return the eigenvalues; None for a matrix of too many rows."""
    rows = factor.average.read().shape[-1]
    # The eigenvalues of a diagonal matrix are its entries.
    is_matrix = factor.has_inverses
    too_large = is_matrix and most_rows is not None and rows > most_rows
    return None if too_large else factor.eigenvalues()
