"""The Fisher matrix of a batch as ``F = RᵀR``: a row for each number that a loss predicts.

With J the Jacobian matrix of the values that a loss reads, ``B Bᵀ`` their Fisher matrix and w the
weights of loss, reduction and predictions, ``R = √w Bᵀ J``. The residuals ρ solve ``Rᵀρ = g`` for
the gradient g of the loss. If there are fewer rows than parameters, ``R Rᵀ`` is smaller than F, and

    (RᵀR + λI)⁻¹ Rᵀρ = Rᵀ (R Rᵀ + λI)⁻¹ ρ

A row of a layer is ``Σ_t a_t ds_tᵀ``. The inner product of two rows is therefore the sum of
``(a·a′)(ds·ds′)`` over pairs of positions, which takes less than the rows themselves if there are
few positions.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.engine.batch_parts import TracedParts
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.curvature_products import CurvatureProducts
from kfac_engine.engine.layer_gradients import FactoredGradients, LayerReader, read_layers
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.validation import check_finite
from kfac_engine.errors import NonFiniteError, UnsupportedError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.observed import root, times
from kfac_engine.runtime.trace import Trace
from kfac_engine.system.memory_limits import require_memory

# Rows of a block of products in memory at once.
_BLOCK = 512
# Number of multiplications that take as long as passing over one entry of a product.
_ENTRY = 16
_BYTES = 8
# Largest difference of products that two ways compute, in float32 and in float64.
_ROUNDING = {"f": 1e-3, "d": 1e-7}
_FLOAT64 = np.dtype(np.float64)


class SampleSpace(CurvatureProducts):
    """The rows R of the Fisher matrix of a batch, their inner products and the residuals.

    A vector of the sample space is ``(rows,)`` in float64: the parts of the batch one after the
    other, in each part the losses, and for each loss the entries of its inner shape in row-major
    order.

    Args:
        assembly: The model with its losses.
        arrays: Converts arrays of the model.
        traced: The batch with its targets.
        shards: The shards of the batch.

    Attributes:
        rows: Number of rows.

    Raises:
        UnsupportedError: The batch is divided among several processes, a loss has no factor of its
            Fisher matrix, its values do not have the examples alone on the first axis, or
            examples depend on each other.
    """

    def __init__(
        self, assembly: Assembly, arrays: ModelArrays, traced: TracedParts, shards: BatchShards
    ) -> None:
        if not shards.alone:
            raise UnsupportedError(
                "the sample space of a batch needs all its examples in one process; use "
                "KfacOptimizer with several processes."
            )
        if assembly.model.new_buffers:
            raise UnsupportedError(
                "the model has normalizations with statistics of the batch, so that its examples "
                "depend on each other and have no rows of their own; use KfacOptimizer."
            )
        assembly.task.require_examples("the sample space needs")
        super().__init__(assembly, arrays, traced, shards)
        self._shapes: list[list[tuple[int, ...]]] = []
        traced.each(lambda trace: self._shapes.append(self._inner_shapes(trace)))
        sizes = [sum(map(prod, shapes)) for shapes in self._shapes]
        self.rows = sum(sizes)
        self._starts = [0, *accumulate(sizes)]

    def residuals(self) -> tuple[float, NDArray[np.float64]]:
        """Return the loss, and the residuals ρ with ``Rᵀρ = g``, ``(rows,)``.

        Both are computed in float64 from the values of the model, so that small changes of the loss
        are not lost in a constant.

        Raises:
            InputError: The batch has no targets.
            NonFiniteError: The loss is NaN or infinite.
        """
        total, parts = 0.0, list[NDArray[np.float64]]()

        def add(trace: Trace) -> None:
            nonlocal total
            values = self._wide(trace)
            observation = self._objective.observe(values)
            weights = self._objective.weights(self._traced.size)
            triples = zip(weights, self._objective.terms, observation.terms, strict=True)
            for weight, term, seen in triples:
                total += weight * term.value(values, seen)
                assert seen.targets is not None, "observe has read the targets"
                inner = term.solve_fisher_factor(values, term.gradient_of(values, seen.targets))
                if seen.weights is not None:
                    inner = times(inner, self._inner_weights(term, values, root(seen.weights)))
                parts.append(sqrt(weight) * self._host(inner).reshape(-1))

        with self._shards.computing("residuals"):
            self._traced.each(add)
            rho = np.concatenate(parts)
            if not (np.isfinite(total) and np.isfinite(rho).all()):
                raise NonFiniteError(
                    f"the loss of the batch is {total:g}, or a residual is not finite; check the "
                    f"targets, the inputs and the parameters for huge numbers."
                )
        return total, rho

    def combine(self, u: Array, names: Sequence[str]) -> dict[str, Array]:
        """Return ``Rᵀ u`` by parameter, in new arrays.

        Args:
            u: Vector of the sample space, ``(rows,)``.
            names: The parameters.
        """
        total: dict[str, Array] = {}
        parts = iter(zip(self._starts, self._starts[1:], self._shapes, strict=False))

        def add(trace: Trace) -> None:
            start, stop, shapes = next(parts)
            computer = self._computer(trace, names)
            inner = list(self._split(u[start:stop], shapes, trace))
            with trace.explain():
                products = computer.multiply_fisher_factor(inner)
                named = self._arrays.for_backend(dict(zip(names, products, strict=True)))
                check_finite(named, self._model.memory_space, "the product of")
            for name, array in named.items():
                total[name] = total[name] + array if name in total else array.copy()

        with self._shards.computing("product of the sample space"):
            self._traced.each(add)
            return self._model.to_file_layout(total)

    def image(self, vector: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return ``R v``, ``(rows,)``, for arrays by parameter; absent ones count as zeros."""
        parts: list[NDArray[np.float64]] = []
        with self._shards.computing("product of the sample space"):
            checked = self._checked(vector)

            def add(trace: Trace) -> None:
                names = tuple(checked)
                images = self._computer(trace, names).multiply_fisher_factor_transpose(
                    [checked[name] for name in names]
                )
                parts.extend(self._host(image).reshape(-1) for image in images)

            self._traced.each(add)
        return np.concatenate(parts)

    def gram(self, *, precise: bool = True) -> NDArray[np.float64]:
        """Return the lower triangle of ``R Rᵀ``, ``(rows, rows)`` in float64, in Fortran order.

        Args:
            precise: Whether inner products are computed in float64; if not, in the type of the
                model.

        Raises:
            MemoryLimitError: Rows and their inner products do not fit into the memory.
            NonFiniteError: A row contains NaN or infinity.
            UnsupportedError: The examples of a parameter cannot be separated.
        """
        types = set[DType]()
        pieces: dict[int, list[tuple[_Group, Any]]] = {}
        places = iter(zip(self._starts, self._shapes, strict=False))
        with self._shards.computing("inner products of the sample space"):
            self._require_memory()

            def add(trace: Trace) -> None:
                start, shapes = next(places)
                values = (trace[name].dtype for name in self._objective.inputs)
                dtype = _FLOAT64 if precise else np.result_type(np.float32, *values)
                types.add(dtype)
                for number, shape in enumerate(shapes):
                    group = _Group(start, shape[0], prod(shape[1:]))
                    start += prod(shape)
                    for index, reader in enumerate(self._readers(trace, number, shape, dtype)):
                        if not reader.is_zero:
                            piece = _piece(reader, group)
                            pieces.setdefault(index, []).append((group, piece))

            self._traced.each(add)
            K = np.zeros((self.rows, self.rows), np.result_type(*types), order="F")
            for index in sorted(pieces):
                _add_products(K, pieces.pop(index))
        return K.astype(np.float64, copy=False)

    def check(self, K: NDArray[np.float64]) -> None:
        """Refuse a model whose rows, read layer by layer, are not those of its products.

        Rows assume that an example depends on its own inputs only. ``K`` is a result of ``gram``.
        """
        u = np.random.default_rng(0).standard_normal(self.rows)
        lower = np.tril(K, -1)
        by_rows = lower @ u + lower.T @ u + np.diag(K) * u
        combined = self.combine(u, tuple(self._model.parameters))
        by_products = self.image(combined)
        bound = max(_ROUNDING.get(array.dtype.char, 1e-3) for array in combined.values())
        if np.linalg.norm(by_rows - by_products) > bound * np.linalg.norm(by_products):
            raise UnsupportedError(
                "the derivatives of single examples do not add up to the derivatives of the "
                "batch: examples of this model depend on each other; use KfacOptimizer."
            )

    # -- private ----------------------------------------------------------------------------------

    def _inner_shapes(self, trace: Trace) -> list[tuple[int, ...]]:
        batch, outputs = self._assembly.task.batch, self._objective.outputs
        shapes = []
        for term in self._objective.terms:
            for name in term.inputs:
                place = batch.places.get(outputs.get(name, name))
                if place is not None and not place.comes_first:
                    raise UnsupportedError(
                        f"the sample space needs the examples alone on the first axis of "
                        f"'{name}', which has shape {trace[name].shape}; use KfacOptimizer."
                    )
            shapes.append(term.inner_shape(term.read(trace, targets=False)))
        return shapes

    def _wide(self, trace: Trace) -> Mapping[str, Array]:
        """Return what the losses read, their inputs in float64."""
        inputs = {name: self._host(trace[name]) for name in self._objective.inputs}
        return ChainMap(inputs, trace)  # type: ignore[arg-type] # a trace is only read

    def _host(self, array: Array) -> NDArray[np.float64]:
        backend = self._assembly.collection.backend
        return np.asarray(backend.to_numpy(backend.asarray(array)), np.float64)

    def _inner_weights(self, term: LossFunction, values: Values, weights: Array) -> Array:
        """Return weights of predictions, which broadcast to an input, in the inner shape."""
        shape, inner = values[term.inputs[0]].shape, term.inner_shape(values)
        if inner == shape:
            return weights
        axis = term.class_axis % len(shape)
        return np.concatenate([np.broadcast_to(weights, shape)] * len(term.inputs), axis=axis)

    def _split(self, u: Array, shapes: Sequence[tuple[int, ...]], trace: Trace) -> Iterator[Array]:
        ends = [*accumulate(map(prod, shapes), initial=0)]
        for term, shape, start, stop in zip(
            self._objective.terms, shapes, ends, ends[1:], strict=False
        ):
            like = trace[term.inputs[0]]
            yield array_module(like).asarray(u[start:stop].reshape(shape), dtype=like.dtype)

    def _readers(
        self, trace: Trace, number: int, shape: tuple[int, ...], dtype: DType
    ) -> list[LayerReader]:
        """Return readers of the rows of a loss, with a source for each entry of its inner shape."""
        term = self._objective.terms[number]
        weight = self._term_weights(trace)[number].root()
        values = term.read(trace, targets=False)
        sources = [
            {name: array.astype(trace[name].dtype) for name, array in column.items()}
            for column in (
                weight.times(term.one_hot(values, index))
                for index in product(*map(range, shape[1:]))
            )
        ]
        return read_layers(self._assembly, trace, sources, examples=shape[0], dtype=dtype)

    def _require_memory(self) -> None:
        parameters = sum(array.size for array in self._model.parameters.values())
        require_memory(
            bytes_of(self.rows, parameters),
            f"the sample space of {self.rows} predictions and {parameters} parameters",
            "use a smaller batch, or KfacOptimizer",
        )


def bytes_of(rows: int, parameters: int) -> int:
    """Return a bound of the memory of rows, of their inner products and of a decomposition."""
    return _BYTES * rows * (2 * rows + _BLOCK + parameters)


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of a loss in a part of the batch: ``examples · each`` rows from ``start`` on."""

    start: int
    examples: int
    each: int

    @property
    def rows(self) -> int:
        return self.examples * self.each


def _piece(reader: LayerReader, group: _Group) -> FactoredGradients | Array:
    """Return the rows of a layer: in factors, or ``(rows, entries)`` if that is smaller."""
    factors, wholes = [], []
    for tile in reader.tiles(group.examples):
        if isinstance(tile, FactoredGradients):
            (t, d_in), (k, _, d_out) = tile.inputs.shape[1:], tile.outputs.shape[1:]
            if t * (d_in + k * d_out) <= k * d_in * d_out:
                factors.append(tile)
                continue
        wholes.append(tile.matrices().reshape(len(tile.arrays[0]) * group.each, -1))
    if factors:
        (tile,) = factors
        return tile
    return wholes[0] if len(wholes) == 1 else np.concatenate(wholes)


def _add_products(K: NDArray[np.float64], pieces: Sequence[tuple[_Group, Any]]) -> None:
    """Add the inner products of the rows of a layer to the lower triangle of K."""
    factored = all(isinstance(piece, FactoredGradients) for _, piece in pieces)
    if factored:
        t = max(piece.inputs.shape[1] for _, piece in pieces)
        d_in, d_out = pieces[0][1].inputs.shape[2], pieces[0][1].outputs.shape[3]
        if t * t * (d_in + d_out + _ENTRY) < d_in * d_out:
            for (one, left), (other, right) in product(pieces, pieces):
                if other.start <= one.start:
                    _add_factored(K, (one, left), (other, right))
            return
    _add_whole(K, pieces)


def _add_factored(
    K: NDArray[np.float64],
    one: tuple[_Group, FactoredGradients],
    other: tuple[_Group, FactoredGradients],
) -> None:
    """Add ``Σ (a·a′)(ds·ds′)`` over pairs of positions, block by block of examples."""
    (rows, left), (columns, right) = one, other
    size = max(1, _BLOCK // rows.each)
    for start in range(0, rows.examples, size):
        stop = min(start + size, rows.examples)
        last = stop if rows is columns else columns.examples
        shape = stop - start, rows.each, last, columns.each
        out = K[
            rows.start + start * rows.each : rows.start + stop * rows.each,
            columns.start : columns.start + last * columns.each,
        ]
        for u, v in product(range(left.inputs.shape[1]), range(right.inputs.shape[1])):
            inner = left.inputs[start:stop, u] @ right.inputs[:last, v].T
            ds = left.outputs[start:stop, :, u].reshape(shape[0] * shape[1], -1)
            products = ds @ right.outputs[:last, :, v].reshape(shape[2] * shape[3], -1).T
            if rows.each == columns.each == 1:
                products *= inner
            else:
                products.reshape(shape)[...] *= inner[:, None, :, None]
            out += products


def _add_whole(K: NDArray[np.float64], pieces: Sequence[tuple[_Group, Any]]) -> None:
    """Add the products of the rows as matrices, block by block of their columns."""
    piece = pieces[0][1]
    if isinstance(piece, FactoredGradients):
        d_in, d_out = piece.inputs.shape[2], piece.outputs.shape[3]
        step = max(1, 8 * _BLOCK // d_out)
        cuts = [slice(start, min(start + step, d_in)) for start in range(0, d_in, step)]
    else:
        cuts = [slice(None)]
    low = min(group.start for group, _ in pieces)
    high = max(group.start + group.rows for group, _ in pieces)
    parts: list[Array] = []
    for cut in cuts:
        parts = [_columns(piece, cut) for _, piece in pieces]
        covered = sum(map(len, parts)) == high - low
        rows = parts[0] if len(parts) == 1 else _stacked(pieces, parts, low, high, covered=covered)
        syrk = blas.dsyrk if rows.dtype == np.float64 else blas.ssyrk
        if high - low == len(K):
            syrk(1.0, rows.T, beta=1.0, c=K, trans=1, lower=1, overwrite_c=1)
        else:
            K[low:high, low:high] += syrk(1.0, rows.T, trans=1, lower=1)


def _columns(piece: Any, cut: slice) -> Array:
    """Return the rows of some inputs of a layer, ``(rows, entries)``."""
    rows: Array = piece
    if isinstance(piece, FactoredGradients):
        inputs = np.ascontiguousarray(piece.inputs[:, :, cut].swapaxes(1, 2))
        matrices = inputs[:, None] @ piece.outputs
        rows = matrices.reshape(matrices.shape[0] * matrices.shape[1], -1)
    return rows


def _stacked(
    pieces: Sequence[tuple[_Group, Any]],
    parts: Sequence[Array],
    low: int,
    high: int,
    *,
    covered: bool,
) -> Array:
    """Return the rows of all groups from ``low`` to ``high``; zeros where a group is missing."""
    if covered:
        return np.concatenate(parts)
    rows = np.zeros((high - low, parts[0].shape[1]), parts[0].dtype)
    for (group, _), part in zip(pieces, parts, strict=True):
        rows[group.start - low : group.start - low + group.rows] = part
    return rows
