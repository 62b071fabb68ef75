"""A view of a factor: its average, eigenvalues and damping at the time of a call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.engine.spectra import FactorSpectrum, plot_spectra
from kfac_engine.errors import NotReadyError
from kfac_engine.printable import shortened
from kfac_engine.summary import dimensions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Symbol of a factor to its role in the block.
ROLES: Mapping[str, str] = {
    "A": "input", "G": "output", "s": "eigenvalues", "F": "block",
    "H": "features", "V": "vocabulary",
}  # fmt: skip
HEADS = ("factor", "role", "shape", "trace", "damping")
_MOST_CHARACTERS = 80


@dataclass(frozen=True, slots=True, repr=False)
class FactorView:
    """A factor of a layer: its average, and what follows from it at the time of a call.

    Attributes:
        parameters: Parameters of the layer, each with the part that belongs to the layer.
        shape: Shape of ``value``: ``(d, d)`` for a matrix, ``(g, d, d)`` for the matrices of ``g``
            groups. A diagonal has any other shape, such as the shape of its parameter. A factor of
            a layer that is used in series has ``(2, d, d)``: the moments of one use, and of two
            successive uses.
    """

    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    _block: FisherBlock
    _position: int

    @property
    def name(self) -> str:
        """The first parameter of the layer with the symbol, such as ``"conv1.weight: A"``."""
        return f"{self.parameters[0]}: {self.symbol}"

    @property
    def symbol(self) -> str:
        """``"A"``, ``"G"``, ``"s"`` or ``"F"``."""
        return self._block.symbols[self._position]

    @property
    def role(self) -> str:
        """Role of the factor in the block of its layer.

        ``"input"`` (A) and ``"output"`` (G) are the two factors of a Kronecker product. EKFAC adds
        ``"eigenvalues"`` (s), which replace the eigenvalues of the product. A ``"block"`` (F) is
        the block itself, a matrix or its diagonal.
        """
        return ROLES[self.symbol]

    @property
    def factor(self) -> FisherFactor:
        """The factor itself, with its stored inverses; layers with equal statistics share it."""
        return self._block.factors[self._position]

    @property
    def value(self) -> Array:
        """The current average without damping, an array of NumPy or CuPy; a copy.

        Raises:
            NotReadyError: No batch was observed.
        """
        return self._ready().average.read().copy()

    @property
    def damping(self) -> float | Array | None:
        """The number that a refresh at this time adds to each eigenvalue, π included.

        It follows ``engine.damping`` and the current traces. Stored inverses have the damping of
        their own refresh. Where a relative damping depends on the feature of an input, the number
        is the damping of a feature with the mean second moment. A factor of several groups has an
        array ``(g,)`` with a number for each group. The factors A and G of EKFAC have none: EKFAC
        damps its eigenvalues instead.

        Raises:
            NotReadyError: No batch was observed.
        """
        self._ready()
        damping = self._block.factor_dampings()[self._position]
        return float(damping) if isinstance(damping, int | float) else damping

    @property
    def trace(self) -> float:
        """The sum of the eigenvalues without damping, over all groups.

        Raises:
            NotReadyError: No batch was observed.
        """
        return self._ready().trace()

    @property
    def condition(self) -> float:
        """The largest eigenvalue plus damping, divided by the smallest eigenvalue plus damping.

        It is the condition number of the matrix that a refresh inverts. Negative eigenvalues,
        which are rounding errors, count as zero. A factor of several groups has the largest ratio
        of its groups. A factor without damping has the ratio of its eigenvalues, which is infinite
        if the smallest eigenvalue is not above the rounding error. Takes cubic time.

        Raises:
            NotReadyError: No batch was observed.
        """
        spectrum = self.spectrum()
        damped, plain = spectrum.damped_condition, spectrum.condition
        assert plain is not None  # by the call without a bound
        return plain if damped is None else damped

    def eigenvalues(self) -> Array:
        """Return the eigenvalues without damping, computed on the CPU in cubic time.

        Returns:
            A new float64 array of NumPy, ascending: ``(d,)``, or ``(g, d)`` for ``g`` groups. The
            eigenvalues of a diagonal are its entries.

        Raises:
            NotReadyError: No batch was observed.
        """
        return self._ready().eigenvalues()

    def spectrum(self) -> FactorSpectrum:
        """Return the eigenvalues next to the damping; see ``eigenvalues``.

        Raises:
            NotReadyError: No batch was observed.
        """
        return self.spectrum_of(self.eigenvalues())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the eigenvalues, descending, next to the damping, on a logarithmic axis.

        Args:
            ax: Axes of matplotlib to draw on; None for a new figure.

        Returns:
            The axes. Eigenvalues that are not above their rounding errors are left out.

        Raises:
            NotReadyError: No batch was observed.
            BackendError: matplotlib is not installed.
            InputError: ``ax`` is not an ``Axes``.
        """
        return plot_spectra(self.name, [(self.symbol, self.spectrum())], ax)

    def __repr__(self) -> str:
        """Return name, role, shape, trace and damping in one line."""
        name, role, *numbers = (shortened(cell, _MOST_CHARACTERS) for cell in self.cells())
        texts = (f"{head} {cell}" for head, cell in zip(HEADS[2:], numbers, strict=True) if cell)
        return f"FactorView('{name}', {role}, {', '.join(texts)})"

    def cells(self) -> tuple[str, ...]:
        """Return the cells below ``HEADS``; a factor without statistics has no numbers."""
        start = self.name, self.role, dimensions(self.shape)
        if self.factor.average.value is None:
            return (*start, "", "")
        return (*start, f"{self.trace:.4g}", _show_level(self.damping))

    def spectrum_of(self, eigenvalues: Array | None) -> FactorSpectrum:
        """Return the spectrum with the given eigenvalues, or with None."""
        average, damping = self.factor.average.lower(), self.damping
        return FactorSpectrum(
            self.parameters,
            self.symbol,
            average.shape,
            average.shape[-1] * float(np.finfo(average.dtype).eps),
            eigenvalues,
            None if damping is None else np.asarray(damping, np.float64),
        )

    def _ready(self) -> FisherFactor:
        if self.factor.average.value is None:
            raise NotReadyError(
                f"the factor '{self.name}' has no statistics yet; call observe() or step() first."
            )
        return self.factor


def _show_level(damping: float | Array | None) -> str:
    """Return text for a damping, or for the range of dampings over groups."""
    if damping is None:
        return "none"
    ends = (f"{np.min(damping):.4g}", f"{np.max(damping):.4g}")
    return "–".join(dict.fromkeys(ends))
