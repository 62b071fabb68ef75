"""Implements the distribution ``"shard"``: each layer's owner stores its inverses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kfac_engine._types import Array, Rows
from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import Compute, RefreshTask, Request, Result
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.curvature.refreshes import factor_shapes, refresh_cost, refreshed_shapes
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.distributed.messages import Form, broadcast_arrays
from kfac_engine.distributed.owners import FactorSize, LayerSize, OwnedPart, layer_owners
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.distribution import Distribution
from kfac_engine.engine.report import LayerReport


def sizes(
    assembly: Assembly, layers: Sequence[LayerReport]
) -> tuple[dict[str, LayerSize], dict[str, FactorSize]]:
    """Return the sizes of the layers of a model, in their order, and of their factors."""
    collection = assembly.collection
    # Half precision is sent as float32.
    itemsize = max(4, *(array.dtype.itemsize for array in assembly.model.parameters.values()))
    shapes, refreshed = factor_shapes(collection), refreshed_shapes(collection)
    factors = {
        f"{number}": FactorSize(
            sum(map(refresh_cost, refreshed.get(id(factor), ()))),
            _sent_bytes(factor, shapes[id(factor)], itemsize),
        )
        for number, factor in enumerate(collection.get_factors())
    }
    names = dict(zip(map(id, collection.get_factors()), factors, strict=True))
    sized = {}
    for number, layer in enumerate(layers):
        block = collection.fisher_blocks[layer.key]
        sides = zip(block.factors, layer.factor_shapes, strict=True)
        # Vectors are transformed into the basis of eigenvectors, and back.
        passes = 1 + row(layer.kind, layer.approximation).eigenvectors
        products = passes * sum(factor.multiplications(shape) for factor, shape in sides)
        sized[f"{number:09d}"] = LayerSize(
            itemsize * layer.numbers,
            float(layer.numbers * products),
            tuple(dict.fromkeys(names[id(factor)] for factor in block.factors)),
            layer.parameters,
            layer.factor_shapes[0][-1] if _is_divisible(assembly, layer) else 1,
        )
    return sized, factors


def _sent_bytes(factor: FisherFactor, shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an average that an owner receives before a refresh."""
    if not factor.only_refreshes_read:
        return 0
    form = Form(shape, np.dtype(np.float32), "symmetric" if factor.is_symmetric else None)
    return itemsize * form.size


def _is_divisible(assembly: Assembly, layer: LayerReport) -> bool:
    """Return whether several ranks can own rows of a layer.

    The layer's parameters must be whole parameters of the model, in the same shapes.
    """
    parts, parameters = assembly.discovery.parts, assembly.model.parameters
    names = zip(layer.parameters, uses(layer.key), strict=True)
    return assembly.collection.fisher_blocks[layer.key].multiplies_rows and all(
        len(parts[name]) == 1
        and parts[name][0].index is None
        and assembly.model.facts[of_block].shape == parameters[name].shape
        for name, of_block in names
    )


class Shard(Distribution):
    """The owner of a layer receives its gradient, and sends its natural gradient to all ranks.

    Owners are chosen once; see ``distributed.owners``. A large layer may have several owners.
    """

    def __init__(
        self,
        shards: BatchShards,
        assembly: Assembly,
        fisher: Fisher,
        reports: Callable[[], Iterable[LayerReport]],
    ) -> None:
        super().__init__(shards, assembly, fisher, reports)
        layers = tuple(reports())
        period = (assembly.options.schedule or Schedule()).refresh_every
        owners = layer_owners(*sizes(assembly, layers), shards.communicator.size, period)
        # The owners of each parameter, with the rows of each owner if there are several.
        self._parts: dict[str, tuple[OwnedPart, ...]] = {}
        self._factor_owners: dict[int, tuple[int, ...]] = {}
        for layer, parts in zip(layers, owners.values(), strict=True):
            self._parts |= dict.fromkeys(layer.parameters, parts)
            ranks = tuple(part.owner for part in parts)
            block = assembly.collection.fisher_blocks[layer.key]
            self._factor_owners |= {id(factor): ranks for factor in block.factors}

    def sum_gradients(self, gradients: dict[str, Array]) -> Mapping[str, Array | Rows]:
        pieces = self._pieces(gradients)
        arrays = [self._of(name, part, gradients[name]) for name, part in pieces]
        forms = [Form(array.shape, array.dtype) for array in arrays]
        message = self._message(forms, [part.owner for _, part in pieces])
        sums = zip(pieces, message.sum(arrays), strict=True)
        return {
            name: self._rows(name, part, total, gradients[name].shape)
            for (name, part), total in sums
            if total is not None
        }

    def owned(self, vectors: Mapping[str, Array | Rows]) -> Mapping[str, Array | Rows]:
        owned: dict[str, Array | Rows] = {}
        for name, vector in vectors.items():
            part = self._part(name)
            if part is not None:
                owned[name] = self._operand(name, part, vector)
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
            for factor in self._fisher.factors:
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
        for factor in self._fisher.factors:
            if not self._is_owned(factor) and not factor.measures_with_results:
                arrays = factor.arrays()
                # The names of results contain a slash.
                self._replace(factor, {n: array for n, array in arrays.items() if "/" not in n})

    def _replace(self, factor: FisherFactor, arrays: Mapping[str, Array]) -> None:
        traces = factor.traces_of_average
        factor.restore(arrays, factor.average.weight, factor.repeats)
        factor.traces_of_average = traces

    def _gather(
        self, arrays: Mapping[str, Array | Rows], forms: Mapping[str, Form], *, views: bool
    ) -> dict[str, Array]:
        """Return the arrays of all parameters; each owner passes its own in ``arrays``.

        ``forms`` has the form of each parameter's whole array. ``views`` is as for
        ``OwnedArrays.gather``.
        """
        pieces = self._pieces(forms)
        parts_of = [
            Form(self._shape(name, part, forms[name].shape), forms[name].dtype)
            for name, part in pieces
        ]
        message = self._message(parts_of, [part.owner for _, part in pieces])
        mine = [self._sent(n, part, arrays[n]) for n, part in pieces if self._part(n) is part]
        with self._shards.agreement.exchanging():
            received = message.gather(mine, views=views)
        gathered: dict[str, Array] = {}
        for (name, part), array in zip(pieces, received, strict=True):
            if not self._is_divided(name):
                gathered[name] = array
                continue
            if name not in gathered:
                gathered[name] = self._backend.xp.empty(forms[name].shape, forms[name].dtype)
            gathered[name][part.start : part.stop] = array
        return {name: gathered[name] for name in forms}

    def _is_owned(self, factor: FisherFactor) -> bool:
        return self._communicator.rank in self._factor_owners[id(factor)]

    def _pieces(self, names: Iterable[str]) -> list[tuple[str, OwnedPart]]:
        """Return the parts of parameters in the order of their owners."""
        pieces = [(name, part) for name in names for part in self._parts[name]]
        return sorted(pieces, key=lambda piece: (piece[1].owner, piece[0]))

    def _part(self, name: str) -> OwnedPart | None:
        """Return the part of a parameter that this rank owns."""
        rank = self._communicator.rank
        return next((part for part in self._parts[name] if part.owner == rank), None)

    def _is_divided(self, name: str) -> bool:
        """Return whether several ranks own rows of a parameter."""
        return len(self._parts[name]) > 1

    def _of(self, name: str, part: OwnedPart, array: Array) -> Array:
        """Return a view of a part of ``array``, which has the shape of the parameter."""
        return array[part.start : part.stop] if self._is_divided(name) else array

    def _shape(self, name: str, part: OwnedPart, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a part has in an array of the shape ``whole``."""
        return (part.stop - part.start, *whole[1:]) if self._is_divided(name) else whole

    def _rows(
        self, name: str, part: OwnedPart, array: Array, shape: tuple[int, ...]
    ) -> Array | Rows:
        """Return a part of an array of ``shape``; as ``Rows`` if several ranks own the array."""
        if not self._is_divided(name):
            return array
        return Rows(self._backend.xp.arange(part.start, part.stop), array, shape[0])

    def _operand(self, name: str, part: OwnedPart, vector: Array | Rows) -> Array | Rows:
        """Return the vector that the block of a part multiplies."""
        if isinstance(vector, Rows):
            return vector
        return self._rows(name, part, self._of(name, part, vector), vector.shape)

    def _sent(self, name: str, part: OwnedPart, vector: Array | Rows) -> Array:
        """Return the entries that an owner sends to all ranks."""
        return vector.values if isinstance(vector, Rows) else self._of(name, part, vector)
