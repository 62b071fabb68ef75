"""Shows the spectra of the factors as a table, or in the formats of ``inspect --plot``."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_engine.cli.display import print_table
from kfac_engine.engine.spectra import plot_spectra, show_condition
from kfac_engine.errors import BackendError, InputError
from kfac_engine.printable import printable
from kfac_engine.summary import dimensions
from kfac_engine.system.writing import write_file, write_rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kfac_engine.engine.spectra import FactorSpectrum

_COLUMNS, _WIDTH, _HEIGHT = 3, 11.0, 2.6
_MOST_PANELS = 90
_NONE = "–"
_FORMATS = (".png", ".svg", ".pdf", ".html")


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed.

    Raises:
        InputError: The name of the file ends in no known format.
        BackendError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InputError(
            f"--plot '{path}' has no known format; name a file that ends in {', '.join(_FORMATS)}."
        )
    if path.suffix.lower() != ".html" and find_spec("matplotlib") is None:
        raise BackendError(
            f"'{path.suffix}' needs matplotlib: pip install 'kfac-engine[plot]', or name a file "
            f"that ends in .html."
        )


def write_picture(path: Path, title: str, spectra: "Sequence[FactorSpectrum]") -> None:
    """Draw the spectra into a file, in the format of its name."""
    title, kind = printable(title), path.suffix.lower()
    if kind == ".html":
        from kfac_engine.html_report.page import spectrum_page
        from kfac_engine.training.description import described

        text = spectrum_page(title, [described(spectrum) for spectrum in spectra])
        write_file(path, [text.encode()])
        return
    drawing = figure(title, spectra)
    with warnings.catch_warnings():
        # A name may have characters that the font lacks; they are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        write_rendered(path, lambda stream: drawing.savefig(stream, format=kind[1:], dpi=120))


def print_spectra(spectra: "Sequence[FactorSpectrum]") -> None:
    """Print a row for each factor."""
    heads = (
        "layer", "factor", "shape", " largest", " smallest", " damping", " below damping",
        " condition", " with damping",
    )  # fmt: skip
    rows = [_row(spectrum) for spectrum in spectra]
    print_table("eigenvalues of the factors", heads, rows)


def figure(title: str, spectra: "Sequence[FactorSpectrum]") -> "Figure":
    """Return a figure with a panel for each layer: eigenvalues, and the damping as dashed lines."""
    from matplotlib.figure import Figure

    layers: dict[str, list[FactorSpectrum]] = {}
    for spectrum in spectra:
        layers.setdefault(", ".join(spectrum.parameters), []).append(spectrum)
    shown = list(layers.items())[:_MOST_PANELS]
    rows = ceil(len(shown) / _COLUMNS)
    drawing = Figure(figsize=(_WIDTH, 0.6 + _HEIGHT * rows), layout="constrained")
    axes = drawing.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for panel, (name, factors) in zip(axes, shown, strict=False):
        plot_spectra(name, [(spectrum.factor, spectrum) for spectrum in factors], panel)
    for panel in axes[len(shown) :]:
        panel.set_axis_off()
    more = len(layers) - len(shown)
    omitted = f"; {more} more layers are not shown" if more else ""
    drawing.suptitle(f"{title}{omitted}", parse_math=False)
    return drawing


def _row(spectrum: "FactorSpectrum") -> tuple[object, ...]:
    where = list(spectrum.parameters), spectrum.factor, dimensions(spectrum.shape)
    values = spectrum.eigenvalues
    if values is None:
        return (*where, *[_NONE] * 6)
    damping = spectrum.damping
    return (
        *where,
        f"{values.max():.3g}",
        f"{values.min():.3g}",
        _NONE if damping is None else f"{damping.min():.3g}",
        _NONE if damping is None else f"{spectrum.below_damping}",
        show_condition(spectrum),
        _NONE if spectrum.damped_condition is None else f"{spectrum.damped_condition:.3g}",
    )
