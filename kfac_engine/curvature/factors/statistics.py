"""Defines the statistics that factors measure on the named values of a batch.

A statistic stores the names of the tensors that it reads, over the uses of a layer. It adds its
measurement to an array in place. Statistics are frozen: layers with equal statistics share a
factor.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.namespace import is_recorded, recordable
from kfac_engine.backend.patch_sums import row_sums
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.errors import InputError, ShapeError, UnknownNameError, UnsupportedError
from kfac_engine.layers.layer_forms import BroadcastShape, entries, per_example
from kfac_engine.layers.views import View, examples, folded_shape, rows_per_example

# Names over the uses of a layer; a single name if there is one use, or one tensor of all uses.
Uses: TypeAlias = tuple[str, ...]

# Below this size, the call of a primitive (0.1 ms) takes longer than its computation.
_SMALL_BYTES = 1 << 18
_JOINED_BYTES = 1 << 22
# Least divisor of a sum that may have no terms.
_TINY = 1e-30

Name = TypeVar("Name", str, Uses)
Measure = TypeVar("Measure", int, tuple[int, ...])
Formula = TypeVar("Formula", bound="Statistic")


def rows_name(name: str) -> str:
    """Return the name under which the values of a batch have the weights of a tensor's rows.

    The weights are an array with a number ≥ 0 for each row; see ``factors.row_weights``.
    """
    return f"rows of {name}"


class Statistic(ABC):
    """A formula that is measured on a batch."""

    __slots__ = ()

    # Whether the measurement is a mean over rows; otherwise it is one over examples.
    over_rows: ClassVar[bool] = False
    # Whether the measurement is a square of sums over a batch, which ``sums`` returns: the sums
    # over the parts of a batch are added before they are squared.
    of_sums: ClassVar[bool] = False
    # Which part of ``mean x xᵀ`` over all rows the measurement is: ``"matrix"``, for each group if
    # there are groups, ``"blocks"`` or ``"diagonal"``; empty for none.
    moment: ClassVar[str] = ""
    # Whether shape and count follow from the shapes of the values, unless their rows have weights.
    sizes_by_shape: ClassVar[bool] = False

    tensors: Uses  # names of the tensors that change from source to source

    def renamed(self: Formula, other: "Statistic") -> Formula:
        """Return the same formula of the tensors that a statistic of the same type reads."""
        of_inputs = {"inputs": other.inputs} if isinstance(other, LayerPairs) else {}
        return replace(self, tensors=other.tensors, **of_inputs)  # type: ignore[type-var] # dataclasses

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of all values that the measurement reads."""

    def lengths(self) -> tuple[str, ...]:
        """Return the names of values of which only the length of the first axis is read."""
        return ()

    def products(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of tensors that are multiplied before they are squared."""
        return ()

    @abstractmethod
    def shape(self, values: Values) -> tuple[int, ...]:
        """Return the shape of the measurement; a ShapeError if the tensors do not fit."""

    @abstractmethod
    def batch_size(self, values: Values) -> int:
        """Return the number of examples; an error if tensors differ in it."""

    def repeats(self, values: Values) -> int | float:
        """Return the number of rows for each example: uses × positions."""
        del values
        return 1

    def weighted_rows(self, values: Values) -> float | None:
        """Return the sum of the weights of the rows; None without weights."""
        del values
        return None

    def share(self, count: "Count", total: "Count") -> float:
        """Return the weight of a part in the mean over a batch; 0 if nothing of it counts."""
        if self.over_rows:
            return count.rows / total.rows if total.rows else 0.0
        return count.examples / total.examples if total.examples else 0.0

    @abstractmethod
    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·measurement`` in place."""

    def sums(self, values: Values, dtype: DType, backend: Backend) -> Array:
        """Return the sums divided by the number of examples, ``(sources, …)``, if ``of_sums``."""
        raise NotImplementedError

    def add_sums(
        self, out: Array, sums: Array, examples: int, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·measurement`` from the sums, in place."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Count:
    """The counts by which a measurement is divided; counts of parts of a batch are summed."""

    examples: int  # number of examples
    # Number of rows, uses × positions of each example; the sum of their weights if they have
    # weights.
    rows: float

    @classmethod
    def of(cls, statistic: Statistic, values: Values) -> "Count":
        """Return the count of a batch."""
        examples = statistic.batch_size(values)
        rows = statistic.weighted_rows(values)
        if rows is None:
            rows = examples * statistic.repeats(values) if examples else 0
        return cls(examples, rows)

    def __add__(self, other: "Count") -> "Count":
        return Count(self.examples + other.examples, self.rows + other.rows)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a factor's measurement of a batch."""

    shape: tuple[int, ...]  # shape of the measurement
    count: Count  # what the measurement is a mean over
    work: float  # estimated number of multiplications

    @classmethod
    def of(cls, statistic: Statistic, values: Values) -> "Sizes":
        """Return the sizes of a batch."""
        shape, count = statistic.shape(values), Count.of(statistic, values)
        if len(shape) < 2:
            return cls(shape, count, float(sum(values[name].size for name in statistic.names())))
        return cls(shape, count, count.rows * prod(shape) / 2)  # half the products of two features

    @classmethod
    def of_parts(cls, sources: Sequence[Sequence[Statistic]], values: Values) -> "Sizes":
        """Return the sizes of a batch, of which ``[source][part]`` have names of their own.

        A ShapeError is raised if the parts differ in shape or in the number of examples.
        """
        if len(sources) == len(sources[0]) == 1:
            return cls.of(sources[0][0], values)
        sizes = [[(part.names(), cls.of(part, values)) for part in source] for source in sources]
        every = dict(pair for source in sizes for pair in source)
        the_same("examples", {names: part.count.examples for names, part in every.items()})
        shape = the_same("shapes", {names: part.shape for names, part in every.items()})
        counts = [part.count for _, part in sizes[0]]
        return cls(shape, sum(counts[1:], counts[0]), sum(part.work for part in every.values()))


@dataclass(frozen=True, slots=True)
class KroneckerMoment(Statistic):
    """Mean of ``x xᵀ`` over uses, examples and positions: a factor of a Kronecker block."""

    over_rows: ClassVar[bool] = True
    moment: ClassVar[str] = "matrix"
    sizes_by_shape: ClassVar[bool] = True

    tensors: Uses  # names over uses
    view: View  # reads a tensor as rows
    homogeneous: bool = False  # whether rows end with a one
    # Number of uses of the layer. A single name is a tensor of all uses.
    num_uses: int = 1
    # Name of a value whose first axis is the batch, such as the input of a loss. It separates
    # examples from positions and uses where the first axis of a tensor holds both.
    batch: str | None = None
    # Whether the first axis of that value holds examples only; otherwise it may hold positions as
    # well.
    exact: bool = False

    def names(self) -> tuple[str, ...]:
        return self.tensors

    def lengths(self) -> tuple[str, ...]:
        return () if self.batch is None else (self.batch,)

    def shape(self, values: Values) -> tuple[int, ...]:
        d = self.features(values) + self.homogeneous
        return d, d

    def features(self, values: Values) -> int:
        """Return the number of features of a row, without the one."""
        widths = {}
        folded = self.num_uses if len(self.tensors) == 1 else 1
        for name in self.tensors:
            shape = folded_shape(values[name].shape, self.view, folded)
            widths[name] = self.view.width(shape)
        return the_same("features", widths)

    def batch_size(self, values: Values) -> int:
        shapes = [values[name].shape for name in self.tensors]
        batch = self._batch(values)
        return examples(shapes, self.view, self.num_uses, batch, exact=self.exact)

    def repeats(self, values: Values) -> int | float:
        shapes = [values[name].shape for name in self.tensors]
        batch = self._batch(values)
        return rows_per_example(shapes, self.view, self.num_uses, batch, exact=self.exact)

    def _batch(self, values: Values) -> int | None:
        known = self.batch is not None and self.batch in values
        return len(values[self.batch]) if known else None  # type: ignore[index] # known: a name

    def weighted_rows(self, values: Values) -> float | None:
        weights = self._row_weights(values)
        return None if weights is None else sum(w.sum().item() for w in weights)

    @recordable
    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        arrays, weights = self._arrays(values, backend), self._row_weights(values)
        if weights is not None:
            self._add_weighted(out, arrays, weights, backend, alpha, beta)
            return
        # ÷ rows: the mean over examples and positions, in both factors of a block. The block
        # multiplies by the number of positions once.
        scale = alpha / sum(self.view.count(x.shape) for x in arrays)
        for x in arrays if len(arrays) == 1 else side_by_side(arrays, backend):
            how = Accumulation(self.homogeneous, scale, beta)
            self.view.second_moment(at_least(out.dtype, x), out, backend, how)
            beta = 1.0

    def _row_weights(self, values: Values) -> list[Array] | None:
        """Return the weights of the rows of each tensor; None without weights."""
        weights = []
        for name in self.tensors:
            if (of_rows := rows_name(name)) not in values:
                return None
            weights.append(values[of_rows])
        return weights

    def _add_weighted(
        self,
        out: Array,
        arrays: Sequence[Array],
        weights: Sequence[Array],
        backend: Backend,
        alpha: float,
        beta: float,
    ) -> None:
        """Add the weighted mean over the rows, without rows of weight 0."""
        scale(out, beta)
        total = np.maximum(sum(w.sum().item() for w in weights), _TINY).item()
        for x, w in zip(arrays, weights, strict=True):
            # Examples in chunks: patches are larger than the images by the size of the kernel.
            for part, share in self._row_chunks(at_least(out.dtype, x), w, backend):
                self._add_rows(out, part, share, backend, alpha / total)

    def _row_chunks(
        self, x: Array, weights: Array | None, backend: Backend
    ) -> Iterator[tuple[Array, Any]]:
        """Yield rows of a tensor that count, ``(m, d)``, with their weights if they have any."""
        width = self.view.width(x.shape)
        if is_recorded(x):  # a file keeps all rows: those that do not count are multiplied by zero
            yield self.view.rows(x, backend).reshape(-1, width), weights
            return
        positions = self.view.count(x.shape) // max(len(x), 1)
        step = max(1, backend.scratch_bytes // max(1, positions * width * x.itemsize))
        for start in range(0, len(x), step):
            rows = self.view.rows(x[start : start + step], backend).reshape(-1, width)
            if weights is None:
                yield rows, None
                continue
            share = weights[start * positions : (start + step) * positions]
            counting = share > 0
            yield rows[counting], share[counting]

    def _add_rows(
        self, out: Array, rows: Array, weights: Array, backend: Backend, alpha: float
    ) -> None:
        """Add ``alpha`` times the weighted sum of ``x xᵀ`` over rows ``(m, d)``."""
        xp = backend.xp
        if self.homogeneous:
            rows = xp.concatenate([rows, xp.ones((rows.shape[0], 1), rows.dtype)], axis=1)
        if is_recorded(rows):  # a file multiplies the rows in place of the larger matrix
            weights, alpha = weights * alpha, 1.0
        rows = rows * xp.sqrt(weights).astype(rows.dtype)[:, None]
        backend.second_moment(rows, out, Accumulation(alpha=alpha, beta=1.0))

    def _arrays(self, values: Values, backend: Backend) -> list[Array]:
        """Return the tensors, a single tensor with all uses along its first axis."""
        arrays = [backend.asarray(values[name]) for name in self.tensors]
        if len(arrays) > 1 or self.num_uses == 1:
            return arrays
        return [x.reshape(folded_shape(x.shape, self.view, self.num_uses)) for x in arrays]


@dataclass(frozen=True, slots=True)
class KroneckerDiagonal(KroneckerMoment):
    """Mean of ``x²``, ``(d,)``: a diagonal factor of a Kronecker block."""

    moment: ClassVar[str] = "diagonal"

    def shape(self, values: Values) -> tuple[int, ...]:
        return (self.features(values) + self.homogeneous,)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        squares = out[: out.size - self.homogeneous]
        arrays, weights = self._arrays(values, backend), self._row_weights(values)
        if weights is not None:
            self._add_weighted(out, arrays, weights, backend, alpha, 1.0)
            return
        share = alpha / sum(self.view.count(x.shape) for x in arrays)
        for array in arrays:
            if is_recorded(array):
                self._add_rows(out, self.view.rows(array, backend), None, backend, share)
                continue
            x, window = self.view.images(array, backend)
            backend.patch_squares(x, window, squares, alpha=share, beta=1.0)
        if self.homogeneous and not is_recorded(out):
            out[-1] += alpha

    def _add_rows(
        self, out: Array, rows: Array, weights: Any, backend: Backend, alpha: float
    ) -> None:
        rows = rows.reshape(-1, rows.shape[-1]).astype(out.dtype, copy=False)
        squares = (
            rows * rows if weights is None else weights.astype(out.dtype)[:, None] * rows * rows
        )
        sums = squares.sum(axis=0)
        if self.homogeneous:
            ones = backend.xp.ones((rows.shape[0],), out.dtype) if weights is None else weights
            sums = backend.xp.concatenate([sums, ones.astype(out.dtype).sum().reshape(1)])
        out += alpha * sums


@dataclass(frozen=True, slots=True)
class LayerPairs(Statistic):
    """Base of statistics that read the input and the output gradient of a layer."""

    inputs: Uses  # names of the layer's input, over uses
    tensors: Uses  # names of the output gradient, over uses

    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.tensors)

    def products(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.inputs, self.tensors, strict=True))

    def batch_size(self, values: Values) -> int:
        return the_same("examples", {name: len(values[name]) for name in self.names()})


@dataclass(frozen=True, slots=True)
class LayerSquare(LayerPairs):
    """Mean over examples of the squared per-example gradient of a layer, packed ``(d_in, d_out)``.

    An example's gradient is the sum over positions of ``a dsᵀ``. The layer has one use.
    """

    input_view: View  # reads the inputs
    output_view: View  # reads the output gradients
    homogeneous: bool  # whether the layer has a bias

    def shape(self, values: Values) -> tuple[int, ...]:
        (a,), (ds,) = self.inputs, self.tensors
        x, g = values[a].shape, values[ds].shape
        the_same("rows", {a: self.input_view.count(x), ds: self.output_view.count(g)})
        return self.input_view.width(x) + self.homogeneous, self.output_view.width(g)

    def repeats(self, values: Values) -> int:
        (name,) = self.tensors
        return self.output_view.count(values[name].shape) // len(values[name])

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        # Products in half precision would overflow.
        a, ds = (backend.asarray(values[n]).astype(out.dtype, copy=False) for n in self.names())
        self._add_squares(out, a, ds, backend, alpha / len(ds))

    def _add_squares(self, out: Array, a: Array, ds: Array, backend: Backend, scale: float) -> None:
        x, window = self.input_view.images(a, backend)
        g, _ = self.output_view.images(ds, backend)
        how = Accumulation(self.homogeneous, scale, 1.0)
        backend.squared_gradients(x, window, g, out[None], how)


def the_same(what: str, measured: Mapping[Name, Measure]) -> Measure:
    """Return the common value of all tensors; a ShapeError if they differ."""
    measures = list(measured.values())
    if measures.count(measures[0]) < len(measures):
        listed = ", ".join(f"{measure} in {name!r}" for name, measure in measured.items())
        raise ShapeError(f"tensors of one statistic differ in their {what}: {listed}.")
    return measures[0]


def side_by_side(arrays: Sequence[Array], backend: Backend) -> Iterator[Array]:
    """Yield the uses of a layer, with small tensors joined along the axis of the examples."""
    equal = len({(x.shape[1:], x.dtype) for x in arrays}) == 1
    largest = max(x.nbytes for x in arrays)
    step = max(1, _JOINED_BYTES // max(largest, 1)) if equal and largest < _SMALL_BYTES else 1
    for start in range(0, len(arrays), step):
        group = arrays[start : start + step]
        yield group[0] if len(group) == 1 else backend.xp.concatenate(group)


def at_least(dtype: DType, x: Array) -> Array:
    """Return ``x`` in float64 if the average is float64; the backend widens narrower types."""
    return x.astype(dtype) if dtype.itemsize > max(x.dtype.itemsize, 4) else x


def scale(out: Array, beta: float) -> None:
    """Compute ``out ← beta·out`` in place; ``beta = 0`` overwrites NaN as well."""
    if isinstance(beta, float) and beta == 0.0:  # a file knows the number in a run only
        out[...] = 0.0
    else:
        out *= beta


# -- rows that are reduced over positions: KFAC-reduce ---------------------------------------------


@dataclass(frozen=True, slots=True)
class ReducedMoment(KroneckerMoment):
    """Mean over examples of ``x xᵀ``, where ``x`` is the mean or the sum of an example's rows."""

    moment: ClassVar[str] = ""

    mean: bool = False  # whether rows are averaged (inputs) or summed (gradients)

    def shape(self, values: Values) -> tuple[int, ...]:
        batch = self._batch(values)
        for name in self.names():
            if batch is not None and len(values[name]) != batch:
                raise UnsupportedError(
                    f"'{name}' has {len(values[name])} rows along its first axis for {batch} "
                    f"examples; 'kron_reduce' needs positions along axes of their own, use 'kron'."
                )
        return KroneckerMoment.shape(self, values)

    def repeats(self, values: Values) -> int:
        del values
        return 1

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        arrays, weights = self._arrays(values, backend), self._row_weights(values)
        if weights is not None:
            self._add_weighted(out, arrays, weights, backend, alpha, beta)
            return
        for x in arrays:
            rows, share = self._reduced(x, out.dtype, backend), alpha / len(x)
            backend.second_moment(rows, out, Accumulation(self.homogeneous, share, beta))
            beta = 1.0

    def weighted_rows(self, values: Values) -> float | None:
        weights = self._row_weights(values)
        if weights is None:
            return None
        examples = self.batch_size(values)
        return sum(float(w.reshape(examples, -1).max(axis=1).sum()) for w in weights)

    def _add_weighted(
        self,
        out: Array,
        arrays: Sequence[Array],
        weights: Sequence[Array],
        backend: Backend,
        alpha: float,
        beta: float,
    ) -> None:
        """Add the weighted mean of ``x xᵀ``, with x the mean of the rows that count."""
        scale(out, beta)
        ((x, w),) = zip(arrays, weights, strict=True)
        w = w.reshape(len(x), -1)
        counting = (w > 0).astype(out.dtype)
        of_examples = w.max(axis=1)
        total = float(of_examples.sum())
        positions = counting.sum(axis=1)[:, None]
        rows = self.view.rows(at_least(out.dtype, x), backend)
        means = (rows * counting[:, :, None]).sum(axis=1) / backend.xp.maximum(positions, 1)
        if total > 0:
            self._add_rows(out, means, of_examples, backend, alpha / total)

    def _reduced(self, x: Array, dtype: DType, backend: Backend) -> Array:
        """Return the sum of the rows of each example, ``(n, d)``."""
        positions = self.view.count(x.shape) // max(len(x), 1)
        numbers = positions * self.view.width(x.shape)
        # Examples in chunks: a view may extract its rows into scratch memory.
        step = max(1, backend.scratch_bytes // (numbers * dtype.itemsize))
        parts = []
        for start in range(0, len(x), step):
            images, window = self.view.images(x[start : start + step], backend)
            parts.append(row_sums(images, window, dtype, backend.xp))
        rows: Array = backend.xp.concatenate(parts)
        if self.mean:
            rows /= positions
        return rows


# -- the gradient of a whole batch -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientSquare(Statistic):
    """Square of the gradient summed over the batch, divided by the batch size.

    It is the square of a sum, not a sum of squares: unbiased for independent examples whose
    gradients have mean zero, with a large variance.
    """

    of_sums: ClassVar[bool] = True

    tensors: Uses  # names of parameter gradients
    # Numbers of examples, or names of values whose first axes are parts of the batch.
    batch: tuple[int | str, ...]

    def names(self) -> tuple[str, ...]:
        return self.tensors

    def lengths(self) -> tuple[str, ...]:
        return tuple(batch for batch in self.batch if isinstance(batch, str))

    def shape(self, values: Values) -> tuple[int, ...]:
        if len(self.tensors) != 1:
            raise InputError("the naive diagonal takes one parameter; use 'full' for several.")
        shape: tuple[int, ...] = values[self.tensors[0]].shape
        return shape

    def batch_size(self, values: Values) -> int:
        missing = [name for name in self.lengths() if name not in values]
        if missing:
            raise UnknownNameError(f"the batch size is read from {missing}, which are missing.")
        return sum(len(values[n]) if isinstance(n, str) else n for n in self.batch)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        g = self._gradient(values, backend).astype(out.dtype, copy=False)
        self._add_square(out, g, backend, alpha / self.batch_size(values), beta)

    def sums(self, values: Values, dtype: DType, backend: Backend) -> Array:
        """Return the mean gradient of a source, ``(1, entries)``."""
        return self._gradient(values, backend)[None].astype(dtype) / self.batch_size(values)

    def _gradient(self, values: Values, backend: Backend) -> Array:
        """Return the gradients of all parameters, ``(entries,)``."""
        flat = [backend.asarray(values[name]).reshape(-1) for name in self.tensors]
        joined: Array = flat[0] if len(flat) == 1 else backend.xp.concatenate(flat)
        return joined

    def add_sums(
        self, out: Array, sums: Array, examples: int, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Add the squares of the mean gradients, times the number of examples."""
        for mean in sums:
            self._add_square(out, mean, backend, alpha * examples, beta)
            beta = 1.0

    def _add_square(
        self, out: Array, g: Array, backend: Backend, alpha: float, beta: float
    ) -> None:
        g = g.reshape(out.shape)
        backend.add_scaled(out, g * g, alpha, beta)


@dataclass(frozen=True, slots=True)
class GradientOuter(GradientSquare):
    """Outer product of the gradient summed over the batch, divided by the batch size."""

    def shape(self, values: Values) -> tuple[int, ...]:
        size = sum(prod(values[name].shape) for name in self.tensors)
        return size, size

    def _add_square(
        self, out: Array, g: Array, backend: Backend, alpha: float, beta: float
    ) -> None:
        backend.second_moment(g[None], out, Accumulation(alpha=alpha, beta=beta))


# -- parameters that scale and shift the data ------------------------------------------------------
#
# For ``s = x ∘ scale + shift``, an example's gradient is ``[Σ x∘ds, Σ ds]``, each sum over the axes
# along which the parameter is broadcast, and over the uses of the parameter. The statistic is its
# full second moment, or the second moment of each entry.


@dataclass(frozen=True, slots=True)
class ScaleShiftMoment(LayerPairs):
    """Mean over examples of ``v vᵀ`` with ``v = [scale's gradient, shift's gradient]``.

    The gradient of an example is summed over the uses of the parameters. The inputs are the data
    before scaling; there are none without a scale.
    """

    scale: BroadcastShape | None  # axes that are summed for the scale; None without a scale
    shift: BroadcastShape | None  # axes that are summed for the shift; None without a shift
    # For each use, the number of the set whose examples it has; empty if all uses have the same
    # examples. The gradient of an example is summed over the uses of its set.
    sets: tuple[int, ...] = ()
    # Name of a value with an entry for each example of all sets, if there are several.
    batch: str = ""

    def lengths(self) -> tuple[str, ...]:
        return (self.batch,) if self.sets else ()

    def entries(self, values: Values) -> int:
        """Return the size of ``v``; raise a ShapeError if inputs and gradients differ in shape."""
        for x_name, ds_name in self.products():
            x, ds = values[x_name].shape, values[ds_name].shape
            if len(x) != len(ds) or any(a not in (1, b) for a, b in zip(x, ds, strict=True)):
                raise ShapeError(
                    f"'{x_name}' has shape {x} and '{ds_name}' {ds}: data before scaling has as "
                    f"many axes, each as long or of length one."
                )
        sums = [reduction for reduction in (self.scale, self.shift) if reduction]
        sizes = {
            name: sum(entries(values[name].shape, reduction) for reduction in sums)
            for name in self.tensors
        }
        return the_same("entries", sizes)

    def shape(self, values: Values) -> tuple[int, ...]:
        size = self.entries(values)
        return size, size

    def products(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.inputs, self.tensors, strict=False))

    def batch_size(self, values: Values) -> int:
        if self.sets:
            return len(values[self.batch])
        reduction = self.scale or self.shift
        axis = reduction.batch_axis if reduction else 0
        examples: int = the_same(
            "examples", {name: values[name].shape[axis] for name in self.tensors}
        )
        return examples

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        v = self._gradients(out, values, backend)
        share = alpha / self._count(v, values)
        backend.second_moment(v, out, Accumulation(alpha=share, beta=beta))

    def _count(self, v: Array, values: Values) -> int:
        """Return the number of examples; those without a gradient are not in ``v``."""
        return len(values[self.batch]) if self.sets else len(v)

    def _gradients(self, out: Array, values: Values, backend: Backend) -> Array:
        """Return ``v`` of each example in the average's type."""
        v: dict[int, Array] = {}
        for use, name in enumerate(self.tensors):
            ds = values[name].astype(out.dtype, copy=False)
            x = values[self.inputs[use]].astype(out.dtype, copy=False) if self.inputs else None
            term = self._of_use(x, ds, backend)
            number = self.sets[use] if self.sets else 0
            v[number] = v[number] + term if number in v else term
        every = [*v.values()]
        joined: Array = every[0] if len(every) == 1 else backend.xp.concatenate(every)
        return joined

    def _of_use(self, x: Array | None, ds: Array, backend: Backend) -> Array:
        """Return the contribution of a use to ``v``."""
        if self.scale and self.shift and not self.scale.batch_axis and x is not None:
            axes = self.scale.summed(ds.shape)
            if axes == self.shift.summed(ds.shape):
                return backend.example_sums(x, ds, tuple(axes))
        columns = []
        if self.scale and x is not None:
            columns.append(per_example(x * ds, self.scale))
        if self.shift:
            columns.append(per_example(ds, self.shift))
        joined: Array = backend.xp.concatenate(columns, axis=1)
        return joined


@dataclass(frozen=True, slots=True)
class ScaleShiftSquare(ScaleShiftMoment):
    """Average the squared gradient ``v²`` of a scale and a shift over the examples."""

    def shape(self, values: Values) -> tuple[int, ...]:
        return (self.entries(values),)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        v = self._gradients(out, values, backend)
        squares = backend.xp.einsum("ni,ni->i", v, v)
        backend.add_scaled(out, squares, alpha / self._count(v, values), beta)
