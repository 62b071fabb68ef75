"""What a factor measures on one batch: pure formulas on named values, without memory.

A statistic knows the names of the tensors it reads as ``tensors[source][tower]``, each a tuple over
uses, and adds its measurement to a matrix in place. Sources are summed, towers are averaged. It is
a frozen value: two layers that measure the same thing get equal statistics, hence one factor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias, TypeVar

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import InputError, ShapeError, UnknownNameError
from kfac_engine.layers.uses import examples, folded_shape, rows_per_example
from kfac_engine.layers.views import View

# Names over uses of one layer; one name for a layer used once, or for uses folded into one tensor.
Uses: TypeAlias = tuple[str, ...]
# [source][tower] of names over uses.
Tensors: TypeAlias = tuple[tuple[Uses, ...], ...]


# A moment of so few bytes takes less time than its call, a tenth of a millisecond: 400 uses of 16
# examples and 32 features were 243 ms a step.
_SMALL_BYTES = 1 << 18
_JOINED_BYTES = 1 << 22

Name = TypeVar("Name", str, Uses)
Measure = TypeVar("Measure", int, tuple[int, ...])


class Statistic(Protocol):
    """One measurement of a batch."""

    @property
    def tensors(self) -> Tensors:
        """Names of the tensors that change from source to source."""

    def names(self) -> tuple[str, ...]:
        """Every value the measurement reads."""

    def lengths(self) -> tuple[str, ...]:
        """Values of which only the length of the first axis is read."""

    def products(self) -> tuple[tuple[str, str], ...]:
        """Pairs of tensors that are multiplied with each other before they are squared."""

    def shape(self, values: Values) -> tuple[int, ...]:
        """Shape of the measurement; a ShapeError where the tensors do not fit each other."""

    def batch_size(self, values: Values) -> int:
        """Examples behind it, over all towers; an InputError where the towers differ in size."""

    def repeats(self, values: Values) -> int:
        """Rows for each example: uses × positions."""

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        """``out ← beta·out + alpha·measurement``."""


@dataclass(frozen=True, slots=True)
class KroneckerMoment:
    """Mean of ``x xᵀ`` over uses, examples and positions: one side of a Kronecker block.

    Attributes:
        tensors: Names, as the module says.
        view: How a tensor becomes rows.
        homogeneous: Whether rows end with a one.
        num_uses: Uses of the layer; a tower with a single name has them all in that tensor.
        batch: Name of a value whose first axis is the batch (a loss's input). With it, layers whose
            first axis also holds positions or uses are told apart from plain ones.
        exact: Whether that axis is known to hold examples alone; else it may hold positions, too.
    """

    tensors: Tensors
    view: View
    homogeneous: bool = False
    num_uses: int = 1
    batch: str | None = None
    exact: bool = False

    def names(self) -> tuple[str, ...]:
        return tuple(name for source in self.tensors for tower in source for name in tower)

    def lengths(self) -> tuple[str, ...]:
        return () if self.batch is None else (self.batch,)

    def products(self) -> tuple[tuple[str, str], ...]:
        return ()

    def shape(self, values: Values) -> tuple[int, ...]:
        d = self.features(values) + self.homogeneous
        return d, d

    def features(self, values: Values) -> int:
        """Features of a row, without the one."""
        widths = {}
        for _, tower in self._towers():
            folded = self.num_uses if len(tower) == 1 else 1
            for name in tower:
                shape = folded_shape(values[name].shape, self.view, folded)
                widths[name] = self.view.width(shape)
        return the_same("features", widths)

    def batch_size(self, values: Values) -> int:
        own = {
            tower[0]: examples([values[name].shape for name in tower], self.view, self.num_uses)
            for _, tower in self._towers()
        }
        the_same("examples", own)
        batch = self._batch(values)
        return sum(
            examples(
                [values[name].shape for name in tower],
                self.view,
                self.num_uses,
                batch,
                exact=self.exact,
            )
            for tower in self.tensors[0]
        )

    def repeats(self, values: Values) -> int:
        shapes = [values[name].shape for name in self.tensors[0][0]]
        batch = self._batch(values)
        return rows_per_example(shapes, self.view, self.num_uses, batch, exact=self.exact)

    def _batch(self, values: Values) -> int | None:
        known = self.batch is not None and self.batch in values
        return len(values[self.batch]) if known else None  # type: ignore[index] # known: a name

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for tower, uses in self._towers():
            arrays = self._arrays(uses, values, backend)
            # ÷ rows: a mean over examples and positions, the same on both sides of a block. The
            # block multiplies by the number of positions once. ÷ towers: their mean.
            scale = alpha / (sum(self.view.count(x.shape) for x in arrays) * tower)
            for x in side_by_side(arrays, backend):
                self.view.second_moment(
                    at_least(out.dtype, x),
                    out,
                    backend,
                    homogeneous=self.homogeneous,
                    alpha=scale,
                    beta=beta,
                )
                beta = 1.0

    def _arrays(self, uses: Uses, values: Values, backend: Backend) -> list[Array]:
        """The tensors of one tower; all uses of a single one along its first axis."""
        folded = self.num_uses if len(uses) == 1 else 1
        arrays = (backend.asarray(values[name]) for name in uses)
        return [x.reshape(folded_shape(x.shape, self.view, folded)) for x in arrays]

    def _towers(self) -> Iterator[tuple[int, Uses]]:
        """Every tower of every source, with the number of towers."""
        for source in self.tensors:
            for uses in source:
                yield len(source), uses


@dataclass(frozen=True, slots=True)
class KroneckerDiagonal(KroneckerMoment):
    """Mean of ``x²``: a Kronecker side taken as diagonal, ``(d,)``."""

    def shape(self, values: Values) -> tuple[int, ...]:
        return (self.features(values) + self.homogeneous,)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        squares = out[: out.size - self.homogeneous]
        for towers, uses in self._towers():
            arrays = self._arrays(uses, values, backend)
            rows = sum(self.view.count(x.shape) for x in arrays)
            for array in arrays:
                x, window = self.view.images(array, backend)
                share = alpha / (rows * towers)
                backend.patch_squares(x, window, squares, alpha=share, beta=1.0)
            if self.homogeneous:
                out[-1] += alpha / towers


@dataclass(frozen=True, slots=True)
class LayerPairs:
    """What statistics of a layer's input and output gradient together have in common.

    Attributes:
        inputs: Names of the layer's input, ``[tower]``.
        tensors: Names of output gradients, ``[source][tower]``.
    """

    inputs: tuple[Uses, ...]
    tensors: Tensors

    def names(self) -> tuple[str, ...]:
        outputs = (n for source in self.tensors for tower in source for n in tower)
        return (*(n for tower in self.inputs for n in tower), *outputs)

    def lengths(self) -> tuple[str, ...]:
        return ()

    def products(self) -> tuple[tuple[str, str], ...]:
        return tuple((a, ds) for _, a, ds in self.pairs())

    def batch_size(self, values: Values) -> int:
        own = {name: len(values[name]) for _, *pair in self.pairs() for name in pair}
        return the_same("examples", own) * len(self.inputs)

    def pairs(self) -> Iterator[tuple[int, str, str]]:
        """Input and gradient of every tower of every source, with the number of towers."""
        for source in self.tensors:
            for (a, *_), (ds, *_) in zip(self.inputs, source, strict=True):
                yield len(source), a, ds


@dataclass(frozen=True, slots=True)
class LayerSquare(LayerPairs):
    """Mean over examples of the squared per-example gradient of a layer, packed ``(d_in, d_out)``.

    An example's gradient is the sum over positions of ``a dsᵀ``.

    Attributes:
        inputs: Names of the layer's input, ``[tower]``.
        tensors: Names of output gradients, ``[source][tower]``.
        input_view: Reads the inputs.
        output_view: Reads the output gradients.
        homogeneous: Whether the layer has a bias.
    """

    input_view: View
    output_view: View
    homogeneous: bool

    def shape(self, values: Values) -> tuple[int, ...]:
        d_in: dict[str, int] = {}
        d_out: dict[str, int] = {}
        for _, a, ds in self.pairs():
            x, g = values[a].shape, values[ds].shape
            d_in[a], d_out[ds] = self.input_view.width(x), self.output_view.width(g)
            the_same("rows", {a: self.input_view.count(x), ds: self.output_view.count(g)})
        return the_same("features", d_in) + self.homogeneous, the_same("features", d_out)

    def repeats(self, values: Values) -> int:
        name = self.tensors[0][0][0]
        return self.output_view.count(values[name].shape) // len(values[name])

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        for towers, *names in self.pairs():
            # Products are taken in the average's type: half precision would overflow in them.
            a, ds = (backend.asarray(values[n]).astype(out.dtype, copy=False) for n in names)
            self._add_tower(out, a, ds, backend, alpha / (len(ds) * towers))

    def _add_tower(self, out: Array, a: Array, ds: Array, backend: Backend, scale: float) -> None:
        x, window = self.input_view.images(a, backend)
        g, _ = self.output_view.images(ds, backend)
        backend.squared_gradients(
            x, window, g, out[None], homogeneous=self.homogeneous, alpha=scale, beta=1.0
        )


@dataclass(frozen=True, slots=True)
class GradientSquare:
    """Square of the batch-summed gradient over the batch size: the naive diagonal.

    A square of a sum, not a sum of squares: unbiased for independent examples with mean-zero
    gradients, and noisy.

    Attributes:
        tensors: Names of parameter gradients, ``[source][0]``, a tuple over parameters.
        batch: Examples, or names of values whose first axis is the batch, ``[tower]``.
    """

    tensors: Tensors
    batch: tuple[int | str, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(name for source in self.tensors for name in source[0])

    def lengths(self) -> tuple[str, ...]:
        return tuple(batch for batch in self.batch if isinstance(batch, str))

    def products(self) -> tuple[tuple[str, str], ...]:
        return ()

    def shape(self, values: Values) -> tuple[int, ...]:
        if len(self.tensors[0][0]) != 1:
            raise InputError("the naive diagonal takes one parameter; use 'full' for several.")
        return the_same("sides", {name: values[name].shape for name in self.names()})

    def batch_size(self, values: Values) -> int:
        missing = [name for name in self.lengths() if name not in values]
        if missing:
            raise UnknownNameError(f"the batch size is read from {missing}, which are missing.")
        return sum(len(values[n]) if isinstance(n, str) else n for n in self.batch)

    def repeats(self, values: Values) -> int:
        del values
        return 1

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        for name in self.names():
            g = backend.asarray(values[name]).astype(out.dtype, copy=False)
            backend.add_scaled(out, g * g, alpha / self.batch_size(values), beta)
            beta = 1.0


@dataclass(frozen=True, slots=True)
class GradientOuter(GradientSquare):
    """Outer product of the batch-summed gradient over the batch size: the naive full block."""

    def shape(self, values: Values) -> tuple[int, ...]:
        sizes = {
            names: sum(prod(values[name].shape) for name in names) for names, *_ in self.tensors
        }
        size = the_same("entries", sizes)
        return size, size

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        xp = backend.xp
        for names, *_ in self.tensors:
            parts = [backend.asarray(values[name]).reshape(-1) for name in names]
            g = xp.concatenate(parts).astype(out.dtype, copy=False)
            scale = alpha / self.batch_size(values)
            backend.second_moment(g[None], out, alpha=scale, beta=beta)
            beta = 1.0


def the_same(what: str, measured: Mapping[Name, Measure]) -> Measure:
    """What all tensors agree on; a ShapeError where they do not."""
    found = list(measured.values())
    if any(measure != found[0] for measure in found):
        listed = ", ".join(f"{measure} in {name!r}" for name, measure in measured.items())
        raise ShapeError(f"tensors of one statistic differ in their {what}: {listed}.")
    return found[0]


def one_use(names: Sequence[str]) -> tuple[Uses, ...]:
    """Names of the towers of a layer used once."""
    return tuple((name,) for name in names)


def side_by_side(arrays: Sequence[Array], backend: Backend) -> Iterator[Array]:
    """Tensors joined along the axis of the examples, where each alone is too little for a call.

    Args:
        arrays: Uses of a layer.
        backend: Their array library.

    Yields:
        The same examples in fewer tensors; a large tensor as it is.
    """
    alike = len({(x.shape[1:], x.dtype) for x in arrays}) == 1
    largest = max(x.nbytes for x in arrays)
    step = max(1, _JOINED_BYTES // max(largest, 1)) if alike and largest < _SMALL_BYTES else 1
    for start in range(0, len(arrays), step):
        few = arrays[start : start + step]
        yield few[0] if len(few) == 1 else backend.xp.concatenate(few)


def at_least(dtype: DType, x: Array) -> Array:
    """``x`` in float64 where the average is; the backend widens narrower types itself."""
    return x.astype(dtype) if dtype.itemsize > max(x.dtype.itemsize, 4) else x


def scale(out: Array, beta: float) -> None:
    """``out ← beta·out``; zero overwrites, NaN included."""
    if beta == 0.0:
        out[...] = 0.0
    else:
        out *= beta
