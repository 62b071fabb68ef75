"""Provides a batch's Fisher matrix as ``F = RᵀR``, with a row for each predicted number.

With J the Jacobian matrix of the values that a loss reads, ``B Bᵀ`` their Fisher matrix and w the
weights of loss, reduction and predictions, ``R = √w Bᵀ J``. The residuals ρ solve ``Rᵀρ = g`` for
the gradient g of the loss. Products with R and Rᵀ take one pass each, or matrix products with the
inputs and output gradients of the layers (``FactoredRows``). The rows themselves are read from some
examples (``Rows``): m of them, scaled, have nearly the same large eigenvalues, and with fewer rows
than parameters

    (RᵀR + λI)⁻¹ v = (v − Rᵀ (R Rᵀ + λI)⁻¹ R v) / λ
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import ceil, prod, sqrt
from typing import Any

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
# A row is long, and drawn more often, if its square exceeds this multiple of the mean square.
_LONG = 4.0
# Largest difference of products that two ways compute, in float32 and in float64.
_ROUNDING = {"f": 1e-3, "d": 1e-7}


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of the Fisher matrix or a random sample, ``(m, P)``, and products with them.

    A row of a sample is multiplied by ``1 / √p``, where p is the probability that its example is
    drawn, so that ``RᵀR`` is the Fisher matrix on average. Vectors over the parameters are ``(P,)``
    in float64, in the order of ``SampleSpace.flat``.

    With several processes, the rows of all processes follow each other in the order of the
    processes, and each process has some columns of every row. Products sum over the processes,
    which make the same calls.
    """

    matrix: NDArray[np.float64]  # all rows, with columns of this process in the order of the layers
    # The column of the parameters of ``flat`` that each column of ``matrix`` is.
    places: NDArray[np.intp]
    size: int  # number of parameters P; those that no layer reads have no column
    of_rank: slice  # the rows among the m rows that belong to examples of this process
    numbers: NDArray[np.intp]  # numbers of these rows in the sample space, ascending
    scales: NDArray[np.float64]  # the factor of each of these rows
    sum: Callable[[Sequence[Array]], None]  # sums arrays over all processes, in place

    def image(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``R v``, ``(m,)``."""
        return self._summed(self.matrix @ flat[self.places])

    def combine(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``Rᵀ u``, ``(P,)``."""
        result = np.zeros(self.size)
        result[self.places] = u @ self.matrix
        return self._summed(result)

    def gram(self) -> NDArray[np.float64]:
        """Return ``R Rᵀ``, ``(m, m)``."""
        return self._summed(self.matrix @ self.matrix.T)

    def squares(self) -> NDArray[np.float64]:
        """Return the diagonal of ``RᵀR``, ``(P,)``."""
        result = np.zeros(self.size)
        result[self.places] = np.einsum("ij,ij->j", self.matrix, self.matrix)
        return self._summed(result)

    def gathered(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a vector ``(m,)`` from the entries of each process's own rows."""
        result = np.zeros(len(self.matrix))
        result[self.of_rank] = u
        return self._summed(result)

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
        """Return ``Rᵀ u`` for some parameters by name, in new arrays."""
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
        """Return all rows if there are at most ``most``, or the rows of randomly drawn examples.

        Each loss has its share of the examples, at least one.

        Args:
            seed: Seed of the sample.
            most: Number of rows to read; more if all rows of an example need them.

        Raises:
            MemoryLimitError: The rows do not fit into the memory.
            NonFiniteError: A row contains NaN or infinity.
            UnsupportedError: The examples of a parameter cannot be separated.
        """
        rng, rank = np.random.default_rng(seed), self._shards.agreement.rank
        places = iter(zip(self._starts, self._shapes, self._counts, strict=False))
        blocks, numbers, scales = list[Any](), list[Any](), list[Any]()
        read = np.zeros(self._counts.shape[2], int)  # rows of each process
        losses: list[LossRows | None] = []

        def add(trace: Trace) -> None:
            start, shapes, counts = next(places)
            for number, (shape, of_ranks) in enumerate(zip(shapes, counts, strict=True)):
                every = self._factors(trace, number, shape, losses) if self.rows > most else None
                chosen, scale = self._drawn(rng, of_ranks.sum(), most, every)
                each, scale = prod(shape[1:]), np.repeat(scale, prod(shape[1:]))
                edges = np.cumsum([0, *of_ranks])
                ends = np.searchsorted(chosen, edges)
                read[...] += each * np.diff(ends)
                local = chosen[ends[rank] : ends[rank + 1]] - edges[rank]
                scale = scale[each * ends[rank] : each * ends[rank + 1]]
                losses.append(every)
                if local.size:
                    block = self._matrix(trace, number, shape, local, every)
                    block *= scale[:, None]
                    blocks.append(block)
                rows = start + local[:, None] * each + np.arange(each)
                numbers.append(rows.reshape(-1))
                scales.append(scale)
                start += shape[0] * each

        with self._shards.computing("rows of the sample space"):
            self._require_memory()
            self._traced.each(add)
            matrix, columns = self._by_columns(blocks, read)
            size = sum(value.size for value in self._model.parameters.values())
            first = int(read[:rank].sum())
            of_rank = slice(first, first + int(read[rank]))
            known = tuple(every for every in losses if every is not None)
            self.factored = FactoredRows(known, columns, size) if None not in losses else None
            return Rows(
                matrix, columns, size, of_rank, np.concatenate(numbers),
                np.concatenate(scales), self._sum,
            )  # fmt: skip

    def _drawn(
        self, rng: np.random.Generator, count: int, most: int, every: LossRows | None
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the numbers of a loss's examples that are read, and the factor of their rows.

        Examples with long rows are drawn more often, where all rows are known: by systematic
        sampling, as the numbers ``u, 1 + u, …`` lie in intervals of the lengths of probabilities.
        """
        share = count if self.rows <= most else min(count, ceil(most * count / self.rows))
        order, probabilities = rng.permutation(count), np.full(count, share / count)
        squares = np.empty(0) if every is None or share == count else every.squares()
        if share == count:
            order = np.arange(count)
        elif len(squares) and (squares > (least := _LONG * squares.mean())).any():
            probabilities = _probabilities(np.maximum(squares, least), share)
            ends = np.minimum(np.cumsum(probabilities[order]), share)
            ends[-1] = share  # a sum has roundings
            places = np.floor(ends - rng.uniform())
            order = order[np.diff(places, prepend=-1) > 0]
        chosen = np.sort(order[:share])
        return chosen, 1 / np.sqrt(probabilities[chosen])

    def check(self, rows: Rows) -> None:
        """Refuse a model whose rows, read layer by layer, differ from its products.

        Rows assume that an example depends on its own inputs only.
        """
        u, draws = np.zeros(self._starts[-1]), np.random.default_rng(0)
        drawn = draws.standard_normal(len(rows.matrix))
        u[rows.numbers] = rows.scales * drawn[rows.of_rank]
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
        self, trace: Trace, number: int, shape: tuple[int, ...], before: Sequence[LossRows | None]
    ) -> LossRows | None:
        """Return all rows of a loss as factors; None where products take passes.

        ``before`` has those of the losses before. Products take passes on a device, with several
        processes, for more than two rows of an example, and where factors are many numbers.
        """
        values = self._model.parameters.values()
        on_host = all(isinstance(value, np.ndarray) for value in values)
        few = self.most_of_example <= _MOST_FACTORED
        if None in before or not (few and on_host and self._shards.alone):
            return None
        most = _FACTORS * MOST_ROWS * sum(value.size for value in values)
        most -= sum(rows.size for rows in before if rows is not None)
        readers = self._readers(trace, number, shape, None, wide=False)
        return rows_of_loss(readers, shape[0], prod(shape[1:]), most)

    def _matrix(
        self,
        trace: Trace,
        number: int,
        shape: tuple[int, ...],
        chosen: NDArray[np.intp],
        every: LossRows | None,
    ) -> NDArray[np.float64]:
        """Return the rows of some examples of a loss, from the factors of all if they are known."""
        if every is not None:
            return every.matrix(chosen)
        readers = self._readers(trace, number, shape, chosen)
        return np.concatenate([_rows(r, len(chosen), prod(shape[1:])) for r in readers], 1)

    def _by_columns(
        self, blocks: list[NDArray[np.float64]], read: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        """Return some columns of the rows of all processes, and their ``places``.

        Args:
            blocks: The rows of this process, with all columns; the list is emptied.
            read: Number of rows of each process.
        """
        agreement, columns, total = self._shards.agreement, self._columns(), int(read.sum())
        if agreement.alone:
            return np.concatenate(blocks), columns
        size, rank = len(read), agreement.rank
        cuts = [len(columns) * r // size for r in range(size + 1)]
        counts = [total * (high - low) for low, high in pairwise(cuts)]
        buffer, place = np.zeros(sum(counts)), int(read[:rank].sum())
        parts = np.split(buffer, np.cumsum(counts)[:-1])
        for low, high, part in zip(cuts, cuts[1:], parts, strict=False):
            matrix, start = part.reshape(total, high - low), place
            for block in blocks:
                matrix[start : start + len(block)] = block[:, low:high]
                start += len(block)
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


def _probabilities(squares: NDArray[np.float64], share: int) -> NDArray[np.float64]:
    """Return the probabilities with which ``share`` of more examples are drawn.

    They are in proportion to ``squares``, up to 1. With the squares of the rows, drawn rows would
    have the smallest expected error of ``RᵀR`` (Drineas, Kannan & Mahoney 2006, "Fast Monte Carlo
    algorithms for matrices I").
    """
    certain = np.zeros(len(squares), bool)
    while True:
        rest = share - np.count_nonzero(certain)
        shares = np.where(certain, 1.0, rest * squares / squares[~certain].sum())
        if not (shares > 1).any():
            return shares
        certain |= shares > 1


def _rows(reader: LayerReader, examples: int, sources: int) -> NDArray[np.float64]:
    """Return the rows of some examples of a layer, ``(examples · sources, entries)``."""
    if reader.is_zero:
        return np.zeros((examples * sources, reader.entries // sources))
    tiles = [tile.matrices() for tile in reader.tiles(examples)]
    return np.concatenate([tile.reshape(tile.shape[0] * tile.shape[1], -1) for tile in tiles])
