"""The distribution ``"shard"``: each layer has an owner, which stores its inverses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array, Params, Rows
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import Compute, RefreshTask, Request, Result
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.distributed.messages import Form, broadcast_arrays
from kfac_engine.distributed.owners import Part, layer_owners
from kfac_engine.distributed.sizes import Divisible
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.distribution import Distribution
from kfac_engine.engine.model_size import model_size
from kfac_engine.engine.report import LayerReport


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A part of a parameter, or the whole, with the rank that preconditions its gradient.

    Attributes:
        owner: The rank.
        divisible: Whether the part has rows or columns; None for the whole parameter.
        axis: The axis of the parameter that is divided.
        start: First index along this axis.
        stop: Index behind the last one.
    """

    owner: int
    divisible: Divisible | None = None
    axis: int = 0
    start: int = 0
    stop: int = 0

    def of(self, array: Array) -> Array:
        """Return the part of an array in the shape of the parameter; a view."""
        return array[(slice(None),) * self.axis + (self.indices,)] if self.divisible else array

    def needed(self, gradient: Array) -> Array:
        """Return the part of the gradient that the owner needs; a view."""
        return gradient if self.divisible == "columns" else self.of(gradient)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that this part has in an array of the shape ``whole``."""
        if self.divisible is None:
            return whole
        return *whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :]

    @property
    def indices(self) -> slice:
        """The indices of the part along its axis."""
        return slice(self.start, self.stop)


def parameter_parts(
    block: FisherBlock, shapes: Sequence[tuple[int, ...]], parts: Sequence[Part]
) -> list[tuple[ParameterPart, ...]]:
    """Return the parts of each parameter of a block.

    ``shapes`` are the shapes of a weight, and of a bias if there is one. ``parts`` are rows or
    columns of the packed gradient.
    """
    if len(parts) == 1:
        return [(ParameterPart(parts[0].owner),)] * len(shapes)
    axes = [0] * len(shapes)
    if block.divisible == "columns":
        assert block.packing is not None, "the block of a layer"
        outputs = block.packing.matrix_shape(shapes[0])[1]
        axes = [block.packing.column_axis or 0, *(s.index(outputs) for s in shapes[1:])]
    return [
        tuple(ParameterPart(p.owner, block.divisible, axis, p.start, p.stop) for p in parts)
        for axis in axes
    ]


class Shard(Distribution):
    """The owner of a layer receives its gradient, and sends its natural gradient to all ranks.

    Owners are chosen once; see ``distributed.owners``. A large layer may have several.
    """

    def __init__(
        self,
        shards: BatchShards,
        assembly: Assembly,
        estimator: FisherEstimator,
        reports: Callable[[], Iterable[LayerReport]],
    ) -> None:
        super().__init__(shards, assembly, estimator, reports)
        rank, layers = shards.communicator.rank, tuple(reports())
        period = (assembly.options.schedule or Schedule()).refresh_every
        owners = layer_owners(model_size(assembly, layers), shards.communicator.size, period)
        self._parts: dict[str, tuple[ParameterPart, ...]] = {}
        self._factor_owners: dict[int, tuple[int, ...]] = {}
        columns: dict[Params, slice] = {}
        for layer, parts in zip(layers, owners.values(), strict=True):
            block = assembly.collection.fisher_blocks[layer.key]
            shapes = [assembly.model.parameters[name].shape for name in layer.parameters]
            self._parts |= zip(layer.parameters, parameter_parts(block, shapes, parts), strict=True)
            ranks = tuple(part.owner for part in parts)
            self._factor_owners |= {id(factor): ranks for factor in block.factors}
            if len(parts) > 1 and block.divisible == "columns" and rank in ranks:
                mine = parts[ranks.index(rank)]
                columns[layer.key] = slice(mine.start, mine.stop)
        self.columns = columns

    def sum_gradients(
        self, gradients: dict[str, Array], others: Sequence[Array]
    ) -> Mapping[str, Array | Rows]:
        self._shards.sum(others)
        if not gradients:
            return {}
        pieces = self._pieces(gradients)
        arrays = [part.needed(gradients[name]) for name, part in pieces]
        forms = [Form(array.shape, array.dtype) for array in arrays]
        message = self._message(forms, [part.owner for _, part in pieces])
        sums = zip(pieces, message.sum(arrays), strict=True)
        return {
            name: self._rows(part, total, gradients[name].shape)
            for (name, part), total in sums
            if total is not None
        }

    def owned(self, vectors: Mapping[str, Array | Rows]) -> Mapping[str, Array | Rows]:
        owned: dict[str, Array | Rows] = {}
        for name, vector in vectors.items():
            part = self._part(name)
            if part is not None:
                owned[name] = self._operand(part, vector)
        return owned

    def gather(
        self, gradients: Mapping[str, Array | Rows], shards: Mapping[str, Array]
    ) -> dict[str, Array]:
        forms = {name: Form(array.shape, array.dtype) for name, array in shards.items()}
        return self._gather(gradients, forms, views=False)

    def share(self, products: Mapping[str, Array | Rows], names: Sequence[str]) -> dict[str, Array]:
        parameters = self._assembly.model.parameters
        forms = {
            name: Form(parameters[name].shape, np.result_type(parameters[name].dtype, np.float32))
            for name in names
        }
        return self._gather(products, forms, views=True)

    def owners(self, factors: Mapping[str, FisherFactor]) -> Mapping[str, int]:
        return {key: self._factor_owners[id(factor)][0] for key, factor in factors.items()}

    def hand_over(self, due: Sequence[FisherFactor]) -> Sequence[FisherFactor]:
        self._give_to_owners(due, self._factor_owners)
        mine = [f for f in due if self._is_owned(f) or f.measures_with_results]
        if not mine:  # ``compute`` is not called
            self._mark(divided=True)
        return mine

    def compute(
        self, due: Sequence[FisherFactor], tasks: Sequence[RefreshTask], compute: Compute
    ) -> Callable[[], Mapping[Request, Result]]:
        pairs = list(zip(due, tasks, strict=True))
        shared = [(f, task) for f, task in pairs if f.measures_with_results]
        local = [r for f, task in pairs if not f.measures_with_results for r in task.requests]
        results = dict(compute(local)())
        if shared:
            ranks = [self._factor_owners[id(factor)][0] for factor, _ in shared]
            results |= self._compute_on_owners([task for _, task in shared], ranks, compute)()
        self._mark(divided=True)
        return lambda: results

    def restart(self) -> None:
        super().restart()
        self._release()

    @contextmanager
    def all_results(self) -> Iterator[None]:
        agreement = self._shards.agreement
        with agreement.operation("results", begins=True), agreement.exchanging():
            for factor in self._estimator.factors:
                rank = self._factor_owners[id(factor)][0]
                received = broadcast_arrays(self._communicator, rank, factor.arrays())
                if self._communicator.rank == 0 != rank:
                    self._replace(factor, received)
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Release the results of refreshes that other ranks own."""
        for factor in self._estimator.factors:
            if not self._is_owned(factor) and not factor.measures_with_results:
                arrays = factor.arrays()
                # Names of results have several parts.
                self._replace(factor, {n: array for n, array in arrays.items() if "/" not in n})

    def _replace(self, factor: FisherFactor, arrays: Mapping[str, Array]) -> None:
        traces = factor.traces_of_average
        factor.restore(arrays, factor.average.weight, factor.repeats)
        factor.traces_of_average = traces

    def _gather(
        self, arrays: Mapping[str, Array | Rows], forms: Mapping[str, Form], *, views: bool
    ) -> dict[str, Array]:
        """Return the arrays of all parameters; each owner has its own in ``arrays``.

        ``forms`` are the forms of the arrays of all ranks. ``views`` is as for
        ``OwnedArrays.gather``.
        """
        pieces = self._pieces(forms)
        parts_of = [Form(part.shape(forms[name].shape), forms[name].dtype) for name, part in pieces]
        message = self._message(parts_of, [part.owner for _, part in pieces])
        mine = [self._sent(part, arrays[n]) for n, part in pieces if self._part(n) is part]
        with self._shards.agreement.exchanging():
            received = message.gather(mine, views=views)
        gathered: dict[str, Array] = {}
        for (name, part), array in zip(pieces, received, strict=True):
            if part.divisible is None:
                gathered[name] = array
                continue
            if name not in gathered:
                gathered[name] = self._backend.xp.empty(forms[name].shape, forms[name].dtype)
            part.of(gathered[name])[...] = array
        return {name: gathered[name] for name in forms}

    def _is_owned(self, factor: FisherFactor) -> bool:
        return self._communicator.rank in self._factor_owners[id(factor)]

    def _pieces(self, names: Iterable[str]) -> list[tuple[str, ParameterPart]]:
        """Return the parts of parameters in the order of their owners."""
        pieces = [(name, part) for name in names for part in self._parts[name]]
        return sorted(pieces, key=lambda piece: (piece[1].owner, piece[0]))

    def _part(self, name: str) -> ParameterPart | None:
        """Return the part of a parameter that this rank owns."""
        rank = self._communicator.rank
        return next((part for part in self._parts[name] if part.owner == rank), None)

    def _operand(self, part: ParameterPart, vector: Array | Rows) -> Array | Rows:
        """Return the vector that the block of a part multiplies."""
        if isinstance(vector, Rows):
            return vector
        return self._rows(part, part.needed(vector), vector.shape)

    def _rows(self, part: ParameterPart, needed: Array, shape: tuple[int, ...]) -> Array | Rows:
        """Return ``needed``; if the part has rows, as ``Rows`` of an array of ``shape``."""
        if part.divisible != "rows":
            return needed
        return Rows(self._backend.xp.arange(part.start, part.stop), needed, shape[0])

    @staticmethod
    def _sent(part: ParameterPart, vector: Array | Rows) -> Array:
        """Return the entries that an owner sends to all ranks."""
        return vector.values if isinstance(vector, Rows) else part.of(vector)
