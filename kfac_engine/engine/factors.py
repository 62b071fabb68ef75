"""Provides an engine's factors by parameter: averages, eigenvalues and dampings."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.engine.parameter_entries import ParameterEntries
from kfac_engine.engine.spectra import FactorSpectrum, plot_spectra
from kfac_engine.errors import NotReadyError, UnknownAttributeError, UnknownNameError, suggestion
from kfac_engine.layers.match import LayerMatch
from kfac_engine.printable import shortened
from kfac_engine.summary import Summarized, Summary, Table, counted, dimensions

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


@dataclass(frozen=True, slots=True, repr=False)
class ParameterFactors(Summarized, Sequence[FactorView]):
    """The factors of the layers that train a parameter, the input factor of a layer first.

    A layer has the same factors under each of its parameters. A parameter whose slices belong to
    several layers has the factors of all of them.

    Attributes:
        parameter: Name of the parameter.
    """

    parameter: str
    _views: tuple[FactorView, ...]

    @overload
    def __getitem__(self, index: int) -> FactorView: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[FactorView, ...]: ...

    def __getitem__(self, index: int | slice) -> FactorView | tuple[FactorView, ...]:
        return self._views[index]

    def __len__(self) -> int:
        return len(self._views)

    @property
    def input(self) -> FactorView:
        """The input factor A.

        Raises:
            UnknownAttributeError: The block has no input factor, or there are several layers.
        """
        return self._only("input")

    @property
    def output(self) -> FactorView:
        """The output factor G.

        Raises:
            UnknownAttributeError: The block has no output factor, or there are several layers.
        """
        return self._only("output")

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the spectra of all factors on the same axes; see ``FactorView.plot``.

        Args:
            ax: Axes of matplotlib to draw on; None for a new figure.

        Returns:
            The axes.

        Raises:
            KfacError: As for ``FactorView.plot``.
        """
        is_unique = len({view.symbol for view in self}) == len(self)
        labels = (v.symbol if is_unique else f"{v.symbol} of {v.parameters[0]}" for v in self)
        spectra = (view.spectrum() for view in self)
        return plot_spectra(self.parameter, list(zip(labels, spectra, strict=True)), ax)

    def _summary(self) -> Summary:
        return _summary(f"Factors of '{self.parameter}'", self, len(self))

    def __repr__(self) -> str:
        """Return the table of the factors."""
        return self._summary().page()

    def _only(self, role: str) -> FactorView:
        views = [view for view in self if view.role == role]
        if len(views) == 1:
            return views[0]
        names = ", ".join(f"[{i}] '{view.name}'" for i, view in enumerate(self))
        reason = (
            f"belongs to {len(views)} layers with an {role} factor each"
            if views
            else f"has no {role} factor"
        )
        raise UnknownAttributeError(
            f"'{self.parameter}' {reason}; choose a factor by its index: {names}."
        )


class Factors(Summarized, Mapping[str, ParameterFactors]):
    """The factors of an engine by parameter; read-only.

    ``factors["conv1.weight"].input.eigenvalues()`` are the eigenvalues of an input factor.
    """

    def __init__(self, entries: ParameterEntries, collection: LayerCollection) -> None:
        self._collection = collection
        self._entries = entries
        self._layers_of: dict[str, dict[int, LayerMatch]] = {name: {} for name in entries.shapes}
        for position, layer in enumerate(entries.layers):
            for name in entries.names(layer):
                self._layers_of[name][position] = layer

    def __getitem__(self, name: str) -> ParameterFactors:
        if not isinstance(name, str) or name not in self._layers_of:
            near = suggestion(name, self._layers_of)
            raise UnknownNameError(
                f"no parameter is named {name!r}{near}; engine.parameters has all names."
            )
        layers = self._layers_of[name].values()
        return ParameterFactors(
            name, tuple(view for layer in layers for view in self._views(layer))
        )

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._layers_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers_of)

    def __len__(self) -> int:
        return len(self._layers_of)

    def views(self) -> Iterator[FactorView]:
        """Yield each factor of each layer once, in the order of ``engine.layers``."""
        for layer in self._entries.layers:
            yield from self._views(layer)

    def refresh_names(self) -> dict[str, str]:
        """Return the names of all factors, such as ``"fc0.weight: A"``, by key in ``Fisher.works``.

        A factor that several layers share has its name from the first layer. A number distinguishes
        factors with equal names.
        """
        names: dict[int, str] = {}
        counts: Counter[str] = Counter()
        for view in self.views():
            if id(view.factor) not in names:
                counts[view.name] += 1
                count = counts[view.name]
                names[id(view.factor)] = f"{view.name} #{count}" if count > 1 else view.name
        return {str(i): names[id(f)] for i, f in enumerate(self._collection.get_factors())}

    def spectra(self, most_rows: int | None = None) -> Iterator[FactorSpectrum]:
        """Yield the spectrum of each factor of each layer; see ``factor_spectra``."""
        computed: dict[int, Array | None] = {}  # layers with equal statistics share a factor
        views = list(self.views())
        if any(view.factor.average.value is None for view in views):
            raise NotReadyError("there are no statistics yet; call observe() or step() first.")
        for view in views:
            factor = view.factor
            if id(factor) not in computed:
                computed[id(factor)] = _eigenvalues(factor, most_rows)
            yield view.spectrum_of(computed[id(factor)])

    def _summary(self) -> Summary:
        blocks = (self._block(layer) for layer in self._entries.layers)
        count = sum(len(block.symbols) for block in blocks)
        return _summary(f"Factors of {counted(len(self), 'parameter')}", self.views(), count)

    def __repr__(self) -> str:
        """Return the table of the factors."""
        return self._summary().page()

    def _block(self, layer: LayerMatch) -> FisherBlock:
        return self._collection.fisher_blocks[layer.key]

    def _views(self, layer: LayerMatch) -> tuple[FactorView, ...]:
        block = self._block(layer)
        pairs = zip(self._entries.names(layer), self._entries.extents(layer), strict=True)
        names = tuple(name + extent for name, extent in pairs)
        shapes = [self._collection.require_shape(name) for name in layer.parameters]
        return tuple(
            FactorView(names, shape, block, position)
            for position, shape in enumerate(block.factor_shapes(shapes))
        )


def _summary(title: str, views: Iterable[FactorView], count: int) -> Summary:
    """Return a table of factors; the views of the first rows are read."""
    return Summary(title, {}, Table(HEADS, (view.cells() for view in views), count, "factors"))


def _eigenvalues(factor: FisherFactor, most_rows: int | None) -> Array | None:
    """Return the eigenvalues; None for a matrix of too many rows."""
    rows = factor.average.lower().shape[-1]
    # The eigenvalues of a diagonal matrix are its entries.
    is_matrix = factor.has_inverses
    too_large = is_matrix and most_rows is not None and rows > most_rows
    return None if too_large else factor.eigenvalues()
