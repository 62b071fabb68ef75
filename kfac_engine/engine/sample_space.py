"""Provides a batch's Fisher matrix as ``F = RᵀR``, with a row for each predicted number.

With J the Jacobian matrix of the values that a loss reads, ``B Bᵀ`` their Fisher matrix and w the
weights of loss, reduction and predictions, ``R = √w Bᵀ J``. The residuals ρ solve ``Rᵀρ = g`` for
the gradient g of the loss. Products with R and Rᵀ take one pass each, or matrix products with the
inputs and output gradients of the layers (``FactoredRows``). Where there are many rows, m random
ones take their place (``Rows``): sums of all rows, or scaled rows of some examples. They have
nearly the same large eigenvalues, and with fewer rows than parameters

    (RᵀR + λI)⁻¹ v = (v − Rᵀ (R Rᵀ + λI)⁻¹ R v) / λ
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import ceil, prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.engine.batch_parts import TracedParts
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.curvature_products import CurvatureProducts
from kfac_engine.engine.factored_rows import FactoredRows, LossRows, rows_of_loss
from kfac_engine.engine.layer_gradients import LayerReader, packed, read_layers
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.validation import check_finite
from kfac_engine.errors import NonFiniteError, UnsupportedError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.observed import root, times
from kfac_engine.runtime.trace import Trace
from kfac_engine.system.memory_limits import require_memory

# Rows that are read of a larger batch.
MOST_ROWS = 256
_BYTES = 8
# Most numbers of the factors of all rows, relative to the numbers of the rows that are read.
_FACTORS = 4
# Most rows of an example for products with factors: they read output gradients for each of these
# rows, where a pass takes the same time for any number.
_MOST_FACTORED = 2
# Largest difference of products that two ways compute, in float32 and in float64.
_ROUNDING = {"f": 1e-3, "d": 1e-7}


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows R of the Fisher matrix, or m random rows ``S R``, and products with them.

    On average, ``RᵀSᵀS R`` is the Fisher matrix. Where all rows are known, S has one entry in each
    column, 1 or −1, so that m sums contain every row (Clarkson & Woodruff 2013, arXiv:1207.6365).
    Otherwise, S draws some of n examples, and multiplies their rows by ``√(n / drawn)``. Vectors
    over the parameters are ``(P,)`` in float64, in the order of ``SampleSpace.flat``.

    With several processes, each process has some columns of every row. Products sum over the
    processes, which make the same calls.
    """

    matrix: NDArray[np.float64]  # ``S R``, with columns of this process in the order of the layers
    # The column of the parameters of ``flat`` that each column of ``matrix`` is.
    places: NDArray[np.intp]
    size: int  # number of parameters P; those that no layer reads have no column
    # The entries of S for examples of this process. The row of an entry is one of the m rows, and
    # its column the number of a row of R in the sample space.
    entries: NDArray[np.float64]
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    sum: Callable[[Sequence[Array]], None]  # sums arrays over all processes, in place

    def image(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``S R v``, ``(m,)``."""
        return self._summed(self.matrix @ flat[self.places])

    def combine(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``RᵀSᵀ u``, ``(P,)``."""
        result = np.zeros(self.size)
        result[self.places] = u @ self.matrix
        return self._summed(result)

    def gram(self) -> NDArray[np.float64]:
        """Return ``S R RᵀSᵀ``, ``(m, m)``."""
        return self._summed(self.matrix @ self.matrix.T)

    def squares(self) -> NDArray[np.float64]:
        """Return the diagonal of ``RᵀSᵀS R``, ``(P,)``."""
        result = np.zeros(self.size)
        result[self.places] = np.einsum("ij,ij->j", self.matrix, self.matrix)
        return self._summed(result)

    def gathered(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``S u``, ``(m,)``, for the entries of a vector in ``columns``."""
        result = np.zeros(len(self.matrix))
        np.add.at(result, self.rows, self.entries * u)
        return self._summed(result)

    def spread(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the entries of ``Sᵀ u`` in ``columns``, for a vector ``(m,)``."""
        result: NDArray[np.float64] = self.entries * u[self.rows]
        return result

    def _summed(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        self.sum([array])
        return array


class SampleSpace(CurvatureProducts):
    """The rows R of the Fisher matrix of a batch, their inner products and the residuals.

    A vector of the sample space has the entries of this process's examples, in float64: the parts
    of the batch one after the other, in each part the losses, and for each loss the entries of its
    inner shape in row-major order. All processes make the same calls.

    Attributes:
        rows: Number of rows of all processes.
        most_of_example: Largest number of rows of an example for one loss.
        factored: All rows, once ``sampled`` has read some of them; None where products with R take
            passes.

    Raises:
        UnsupportedError: A loss has no factor of its Fisher matrix, its values do not have the
            examples alone on the first axis, or examples depend on each other.
    """

    def __init__(
        self, assembly: Assembly, arrays: ModelArrays, traced: TracedParts, shards: BatchShards
    ) -> None:
        if assembly.model.new_buffers:
            raise UnsupportedError(
                "the model normalizes by the statistics of a batch, so that its examples depend on "
                "each other, and exact steps cannot separate them; use KfacOptimizer."
            )
        assembly.task.require_examples("the sample space needs")
        super().__init__(assembly, arrays, traced, shards)
        self._shapes: list[list[tuple[int, ...]]] = []
        traced.each(lambda trace: self._shapes.append(self._inner_shapes(trace)))
        sizes = [sum(map(prod, shapes)) for shapes in self._shapes]
        self.factored: FactoredRows | None = None
        self._starts = [0, *accumulate(sizes)]
        counts = [shape[0] for shapes in self._shapes for shape in shapes]
        of_ranks = shards.agreement.of_all(*counts).astype(int)
        # Number of examples of each loss in each part, ``(parts, losses, processes)``.
        self._counts = of_ranks.T.reshape(len(self._shapes), -1, len(of_ranks))
        each = [[prod(shape[1:]) for shape in shapes] for shapes in self._shapes]
        self.rows = int((self._counts.sum(axis=2) * each).sum())
        self.most_of_example = max(
            (prod(shape[1:]) for shapes in self._shapes for shape in shapes), default=0
        )

    def residuals(self) -> tuple[float, NDArray[np.float64]]:
        """Return the loss of the whole batch, and the residuals ρ with ``Rᵀρ = g``.

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
            # A sum is NaN if the residuals of any process are.
            finite = 0.0 if np.isfinite(rho).all() else np.nan
            (total,) = self._shards.agreement.sum(total + finite)
            if not np.isfinite(total):
                raise NonFiniteError(
                    f"the loss of the batch is {total:g}, or a residual is not finite; check the "
                    f"targets, the inputs and the parameters for huge numbers."
                )
        return total, rho

    def combine(self, u: Array, names: Sequence[str]) -> dict[str, Array]:
        """Return the parts of ``Rᵀ u`` that belong to the parameters ``names``, in new arrays."""
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
            self._sum(list(total.values()))
            return self._model.to_file_layout(total)

    def image(self, vector: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return ``R v`` for arrays by parameter; absent ones count as zeros."""
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

    def inner(self, left: Array, *rights: Array) -> tuple[float, ...]:
        """Return the inner products of a vector of the sample space with others."""
        return self._shards.agreement.sum(*(float(left @ right) for right in rights))

    def flat(self, vector: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return arrays by parameter as one vector ``(P,)``; tied copies count once."""
        named = self._checked(vector)
        parts = [self._host(named[name]).reshape(-1) for name in self._model.parameters]
        return np.concatenate(parts)

    def named(self, flat: NDArray[np.float64]) -> dict[str, Array]:
        """Return a vector ``(P,)`` as arrays by parameter, in the types of the file."""
        arrays, start = dict[str, Array](), 0
        for name, value in self._model.parameters.items():
            part = flat[start : start + value.size].reshape(value.shape)
            arrays[name] = array_module(value).asarray(part, dtype=value.dtype)
            start += value.size
        return self._model.to_file_layout(arrays)

    def sampled(self, seed: int, most: int = MOST_ROWS) -> Rows:
        """Return all rows if there are at most ``most``, else random ones.

        Each loss has its share of the rows, at least one example.

        Args:
            seed: Seed of the random rows.
            most: Number of rows; more if all rows of an example need them.

        Raises:
            MemoryLimitError: The rows do not fit into the memory.
            NonFiniteError: A row contains NaN or infinity.
            UnsupportedError: The examples of a parameter cannot be separated.
        """
        rng, rank = np.random.default_rng(seed), self._shards.agreement.rank
        places = iter(zip(self._starts, self._shapes, self._counts, strict=False))
        blocks, entries, read = list[tuple[int, Any]](), list[_Entries](), 0
        losses: list[LossRows | None] = []

        def add(trace: Trace) -> None:
            nonlocal read
            start, shapes, counts = next(places)
            for number, (shape, of_ranks) in enumerate(zip(shapes, counts, strict=True)):
                each, edges = prod(shape[1:]), np.cumsum([0, *of_ranks])
                every = (
                    self._factors(trace, number, shape, of_ranks, losses)
                    if self.rows > most
                    else None
                )
                losses.append(every)
                count, local = int(edges[-1]), slice(*edges[rank : rank + 2])
                share = count if self.rows <= most else min(count, ceil(most * count / self.rows))
                if every is None:
                    of_loss = _drawn(rng, count, each, share, local)
                    if len(of_loss.columns):
                        chosen = of_loss.columns[::each, 0] // each
                        block = of_loss.values * self._matrix(trace, number, shape, chosen)
                        blocks.append((read + of_loss.first, block))
                else:
                    of_loss = _mixed(rng, count, each, share, local)
                    blocks.append((read, every.sums(of_loss.columns, of_loss.values)))
                entries.append(
                    of_loss._replace(columns=start + of_loss.columns, first=read + of_loss.first)
                )
                read += share * each
                start += shape[0] * each

        with self._shards.computing("rows of the sample space"):
            self._require_memory()
            self._traced.each(add)
            matrix, columns = self._by_columns(blocks, read)
            size = sum(value.size for value in self._model.parameters.values())
            known = tuple(every for every in losses if every is not None)
            if self._shards.alone and None not in losses:
                self.factored = FactoredRows(known, columns, size)
            return Rows(matrix, columns, size, *_flat(entries), self._sum)

    def check(self, rows: Rows) -> None:
        """Refuse a model whose rows, read layer by layer, differ from its products.

        Rows assume that an example depends on its own inputs only.
        """
        u, draws = np.zeros(self._starts[-1]), np.random.default_rng(0)
        drawn = draws.standard_normal(len(rows.matrix))
        u[rows.columns] = rows.spread(drawn)
        combined = self.combine(u, tuple(self._model.parameters))
        by_products, by_rows = self.flat(combined), rows.combine(drawn)
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
        """Return the values that the losses read, in float64."""
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
        self,
        trace: Trace,
        number: int,
        shape: tuple[int, ...],
        chosen: NDArray[np.intp] | None,
        *,
        wide: bool = True,
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
        return read_layers(
            self._assembly, trace, sources, examples=shape[0], chosen=chosen, wide=wide
        )

    def _factors(
        self,
        trace: Trace,
        number: int,
        shape: tuple[int, ...],
        of_ranks: NDArray[np.intp],
        before: Sequence[LossRows | None],
    ) -> LossRows | None:
        """Return all rows of a loss as factors; None on all processes if one of them has none.

        ``of_ranks`` are the numbers of examples of the processes. ``before`` has the factors of the
        losses before. There are none on a device, for more than two rows of an example, where they
        are many numbers, and where a process has no example.
        """
        values = self._model.parameters.values()
        on_host = all(isinstance(value, np.ndarray) for value in values)
        few = self.most_of_example <= _MOST_FACTORED
        if None in before or not (few and on_host and of_ranks.all()):
            return None
        most = _FACTORS * MOST_ROWS * sum(value.size for value in values)
        most -= sum(rows.numbers for rows in before if rows is not None)
        readers = self._readers(trace, number, shape, None, wide=False)
        return rows_of_loss(readers, shape[0], prod(shape[1:]), int(of_ranks.sum()), most)

    def _matrix(
        self,
        trace: Trace,
        number: int,
        shape: tuple[int, ...],
        chosen: NDArray[np.intp],
    ) -> NDArray[np.float64]:
        """Return the rows of some examples of a loss."""
        readers = self._readers(trace, number, shape, chosen)
        return np.concatenate([_rows(r, len(chosen), prod(shape[1:])) for r in readers], 1)

    def _by_columns(
        self, blocks: list[tuple[int, NDArray[np.float64]]], total: int
    ) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        """Return some columns of the rows of all processes, and their ``places``.

        Args:
            blocks: The terms of this process, with all columns, each after the number of its first
                row; the list is emptied. A row is the sum of the terms of all processes.
            total: Number of rows of all processes.
        """
        agreement, columns = self._shards.agreement, self._columns()
        if agreement.alone:
            return np.concatenate([block for _, block in blocks]), columns
        size, rank = agreement.communicator.size, agreement.rank
        cuts = [len(columns) * r // size for r in range(size + 1)]
        counts = [total * (high - low) for low, high in pairwise(cuts)]
        buffer = np.zeros(sum(counts))
        parts = np.split(buffer, np.cumsum(counts)[:-1])
        for low, high, part in zip(cuts, cuts[1:], parts, strict=False):
            matrix = part.reshape(total, high - low)
            for start, block in blocks:
                matrix[start : start + len(block)] = block[:, low:high]
        blocks.clear()
        # The buffer has zeros for the rows of other processes.
        with agreement.operation("columns", begins=True), agreement.exchanging():
            received = agreement.communicator.reduce_scatter(buffer, counts)
        return received.reshape(total, -1), columns[cuts[rank] : cuts[rank + 1]]

    def _columns(self) -> NDArray[np.intp]:
        """Return ``places`` of the rows."""
        discovery, places, start = self._assembly.discovery, dict[str, Any](), 0
        for name, value in self._model.parameters.items():
            every = np.arange(start, start + value.size).reshape(value.shape)
            for part in discovery.parts.get(name, ()):
                places[part.name] = part.read(every)
            start += value.size
        arrays = (tuple(places[name] for name in each.parameters) for each in discovery.layers)
        blocks = self._assembly.collection.fisher_blocks
        pairs = zip(discovery.layers, arrays, strict=True)
        stacks = (packed(blocks[layer.key], parts) for layer, parts in pairs)
        return np.concatenate([stack.reshape(-1) for stack in stacks])

    def _require_memory(self) -> None:
        parameters = sum(array.size for array in self._model.parameters.values())
        require_memory(
            bytes_of(self.rows, parameters),
            f"the sample space of {self.rows} predictions and {parameters} parameters",
            "use a smaller batch, or KfacOptimizer",
        )


def bytes_of(rows: int, parameters: int) -> int:
    """Return a bound of the memory of a sample of rows and of what solves with them."""
    read = min(rows, MOST_ROWS)
    return _BYTES * ((2 + _FACTORS) * read * parameters + 3 * read * read + 8 * (parameters + rows))


class _Entries(NamedTuple):
    """Entries of S for the examples of a process: their columns and values, ``(rows, size)``."""

    columns: NDArray[np.intp]
    values: NDArray[np.float64]  # 0 stands for no entry
    first: int  # the row of S that the first of these rows is


def _mixed(rng: np.random.Generator, count: int, each: int, share: int, local: slice) -> _Entries:
    """Return random signs for sums of all rows of ``count`` examples, nearly as many in each sum.

    ``each`` is the number of rows of an example, ``share · each`` the number of sums, and ``local``
    are the examples of this process.
    """
    sums = share * each
    size = ceil(count * each / sums)
    numbers, signs = np.zeros(size * sums, np.intp), np.zeros(size * sums)
    numbers[: count * each] = rng.permutation(count * each)
    signs[: count * each] = rng.choice((-1.0, 1.0), count * each)
    of_others = (numbers < local.start * each) | (numbers >= local.stop * each)
    numbers -= local.start * each
    numbers[of_others], signs[of_others] = 0, 0
    columns, values = numbers.reshape(size, sums).T, signs.reshape(size, sums).T
    most = int(np.count_nonzero(values, axis=1).max(initial=1))  # of this process in a sum
    order = np.argsort(values == 0, axis=1, kind="stable")[:, :most]
    columns = np.take_along_axis(columns, order, axis=1)
    return _Entries(columns, np.take_along_axis(values, order, axis=1), 0)


def _drawn(rng: np.random.Generator, count: int, each: int, share: int, local: slice) -> _Entries:
    """Return entries for the rows of ``share`` of the examples; see ``_mixed``."""
    chosen = np.sort(rng.permutation(count)[:share])
    first, last = np.searchsorted(chosen, (local.start, local.stop))
    columns = (chosen[first:last, None] - local.start) * each + np.arange(each)
    values = np.full((columns.size, 1), sqrt(count / share))
    return _Entries(columns.reshape(-1, 1), values, int(first) * each)


def _flat(
    entries: Sequence[_Entries],
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Return the values of all entries that are not 0, their rows and their columns."""
    rows = [each.first + np.indices(each.values.shape)[0] for each in entries]
    arrays = (
        np.concatenate([array.reshape(-1) for array in parts])
        for parts in ([each.values for each in entries], rows, [each.columns for each in entries])
    )
    values, flat_rows, columns = arrays
    used = values != 0
    return values[used], flat_rows[used], columns[used]


def _rows(reader: LayerReader, examples: int, sources: int) -> NDArray[np.float64]:
    """Return the rows of some examples of a layer, ``(examples · sources, entries)``."""
    if reader.is_zero:
        return np.zeros((examples * sources, reader.entries // sources))
    tiles = [tile.matrices() for tile in reader.tiles(examples)]
    return np.concatenate([tile.reshape(tile.shape[0] * tile.shape[1], -1) for tile in tiles])
