"""Stores a factor's eigenvalues with its damping, and draws them.

matplotlib is loaded when a spectrum is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING, Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import BackendError, InputError
from kfac_engine.printable import shortened


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


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More points cannot be told apart in a picture.
_MOST_POINTS = 2000
_MOST_CHARACTERS = 40


def plot_spectra(
    title: str, labelled: "Sequence[tuple[str, FactorSpectrum]]", ax: "Axes | None" = None
) -> "Axes":
    """Draw spectra next to the dampings, and return the axes.

    ``labelled`` has spectra with their names in the legend. For each factor there is a line of the
    eigenvalues, descending, against their rank in percent, and a dashed line at the damping.
    Without ``ax`` a new figure is made. Without matplotlib, BackendError is raised.
    """
    axes = _new_axes() if ax is None else ax
    if not hasattr(axes, "axhline"):
        raise InputError(f"ax must be an Axes of matplotlib, got {type(ax).__name__}.")
    for index, (label, spectrum) in enumerate(labelled):
        draw_spectrum(axes, spectrum, f"C{index}", label)
    finish(axes, title)
    return axes


def draw_spectrum(axes: Any, spectrum: FactorSpectrum, colour: str, label: str) -> None:
    """Draw the eigenvalues of a factor that are above their rounding errors, and the damping.

    The line has at most 2000 points. For a factor of several groups, it has the eigenvalues of all
    groups, and the dashed line is their smallest damping. Nothing is drawn if the eigenvalues were
    not computed.
    """
    if spectrum.eigenvalues is None:
        return
    values = np.sort(spectrum.eigenvalues, axis=None)[::-1]
    part = np.linspace(0, 100, len(values))
    # Rounding errors have no place on a logarithmic axis.
    count = int((values > max(0.0, spectrum.resolution * values[0])).sum())
    shown = np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int)
    name = shortened(label, _MOST_CHARACTERS).replace("$", r"\$")  # no formula
    axes.plot(part[shown], values[shown], color=colour, label=f"{name}, {_conditions(spectrum)}")
    if spectrum.damping is not None and spectrum.damping.min() > 0:
        axes.axhline(float(spectrum.damping.min()), color=colour, linestyle="--", linewidth=1)


def finish(axes: Any, title: str) -> None:
    """Set the title, the scales, the labels and the legend of axes with spectra."""
    axes.set_title(
        shortened(title, _MOST_CHARACTERS), loc="left", fontsize="medium", parse_math=False
    )
    axes.set_yscale("log")
    axes.set_xlabel("% of the eigenvalues, dashed: damping", fontsize="small")
    axes.set_ylabel("eigenvalue", fontsize="small")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="x-small")


def show_condition(spectrum: FactorSpectrum) -> str:
    """Return the undamped condition number as text; ``"singular"`` if it is infinite."""
    condition = spectrum.condition
    if condition is None:
        return "–"
    return "singular" if isinf(condition) else f"{condition:.3g}"


def _conditions(spectrum: FactorSpectrum) -> str:
    text = f"condition {show_condition(spectrum)}"
    damped = spectrum.damped_condition
    return text if damped is None else f"{text}, damped {damped:.3g}"


def _new_axes() -> "Axes":
    try:
        from matplotlib import pyplot
    except ImportError:
        raise BackendError("plot needs matplotlib: pip install 'kfac-engine[plot]'.") from None
    _, axes = pyplot.subplots(layout="constrained")
    return axes
