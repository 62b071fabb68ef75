"""The distribution ``"shard"``: each layer has an owner, which stores its inverses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import Compute, RefreshTask, Request, Result
from kfac_engine.curvature.refreshes import factor_shapes, refresh_cost, refreshed_shapes
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.distribution import Distribution
from kfac_engine.ranks.messages import broadcast_arrays
from kfac_engine.ranks.owners import Load, owners, together
from kfac_engine.ranks.packing import Form


class Shard(Distribution):
    """The owner of a layer receives its gradient, and sends its natural gradient to all ranks.

    Layers that share a parameter or a factor have one owner. Owners are chosen once, by the
    multiplications of a step: those of products, and those of refreshes divided by their period.
    """

    def __init__(self, shards: BatchShards, assembly: Assembly, estimator: FisherEstimator) -> None:
        super().__init__(shards, assembly, estimator)
        self._owners = parameter_owners(assembly, estimator, shards.communicator.size)
        parameter_of = _parameters(assembly)
        self._factor_owners = {
            id(factor): self._owners[parameter_of[uses(key)[0]]]
            for key, block in assembly.collection.fisher_blocks.items()
            for factor in block.factors
        }

    def sum_gradients(
        self, gradients: dict[str, Array], others: Sequence[Array]
    ) -> dict[str, Array]:
        self._shards.sum(others)
        if not gradients:
            return {}
        names = self._in_order(gradients)
        forms = [Form(gradients[name].shape, gradients[name].dtype) for name in names]
        message = self._message(forms, [self._owners[name] for name in names])
        sums = zip(names, message.sum([gradients[name] for name in names]), strict=True)
        return {name: total for name, total in sums if total is not None}

    def owned(self, vectors: Mapping[str, Array]) -> Mapping[str, Array]:
        rank = self._communicator.rank
        return {name: array for name, array in vectors.items() if self._owners[name] == rank}

    def gather(self, gradients: dict[str, Array], shards: Mapping[str, Array]) -> dict[str, Array]:
        forms = {name: Form(array.shape, array.dtype) for name, array in shards.items()}
        return self._gather(gradients, forms, views=False)

    def share(
        self, names: Sequence[str], multiply: Callable[[], dict[str, Array]]
    ) -> dict[str, Array]:
        parameters = self._assembly.model.parameters
        forms = {
            name: Form(parameters[name].shape, np.result_type(parameters[name].dtype, np.float32))
            for name in names
        }
        products = multiply()
        self._shards.agreement.vote()
        return self._gather(products, forms, views=True)

    def conclude(self) -> None:
        """Do nothing: all ranks have met in ``share``."""

    def hand_over(self, due: Sequence[FisherFactor]) -> Sequence[FisherFactor]:
        self._give_to_owners(due, self._factor_owners)
        return [f for f in due if self._is_owned(f) or f.measures_with_results]

    def compute(
        self, due: Sequence[FisherFactor], tasks: Sequence[RefreshTask], compute: Compute
    ) -> Callable[[], Mapping[Request, Result]]:
        pairs = list(zip(due, tasks, strict=True))
        shared = [(f, task) for f, task in pairs if f.measures_with_results]
        local = [r for f, task in pairs if not f.measures_with_results for r in task.requests]
        results = dict(compute(local)())
        if shared:
            ranks = [self._factor_owners[id(factor)] for factor, _ in shared]
            results |= self._compute_on_owners([task for _, task in shared], ranks, compute)()
        self._mark(divided=True)
        return lambda: results

    def restart(self) -> None:
        super().restart()
        self._release()

    @contextmanager
    def all_results(self) -> Iterator[None]:
        for factor in self._estimator.factors:
            rank = self._factor_owners[id(factor)]
            arrays = factor.arrays()
            received = broadcast_arrays(self._communicator, rank, arrays)
            if self._communicator.rank == 0 != rank:
                self._replace(factor, received)
        yield
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
        self, arrays: Mapping[str, Array], forms: Mapping[str, Form], *, views: bool
    ) -> dict[str, Array]:
        """Return the arrays of all parameters, of which each owner has its own.

        Args:
            arrays: The arrays of this rank.
            forms: Parameter to the form of its array, of all ranks.
            views: As for ``OwnedArrays.gather``.
        """
        ordered = self._in_order(forms)
        message = self._message([forms[n] for n in ordered], [self._owners[n] for n in ordered])
        with self._shards.agreement.exchanging():
            received = message.gather([arrays[n] for n in ordered if n in arrays], views=views)
        gathered = dict(zip(ordered, received, strict=True))
        return {name: gathered[name] for name in forms}

    def _is_owned(self, factor: FisherFactor) -> bool:
        return self._factor_owners[id(factor)] == self._communicator.rank

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Return parameters in the order of their owners."""
        return sorted(names, key=lambda name: (self._owners[name], name))


def parameter_owners(assembly: Assembly, estimator: FisherEstimator, size: int) -> dict[str, int]:
    """Return the rank that owns each parameter.

    Args:
        assembly: The model with its blocks.
        estimator: Its schedule has the period of the refreshes.
        size: Number of ranks.

    Returns:
        Parameter to rank. Parameters of one block, and those whose blocks share a factor, have one
        owner.
    """
    collection, parameters = assembly.collection, assembly.model.parameters
    shapes, refreshed = factor_shapes(collection), refreshed_shapes(collection)
    parameter_of = _parameters(assembly)
    members: dict[str, list[str]] = {name: [] for name in parameters}
    costs = dict.fromkeys(parameters, 0.0)
    counted: set[int] = set()
    for index, (key, block) in enumerate(collection.fisher_blocks.items()):
        names = [parameter_of[part] for part in uses(key)]
        factors = [id(factor) for factor in block.factors]
        for name in names:
            members[name] += [f"block {index}", *(f"factor {factor}" for factor in factors)]
            sides = sum(shapes[factor][-1] for factor in factors if len(shapes[factor]) > 1)
            costs[name] += float(parameters[name].size) * sides
        refreshes = sum(
            refresh_cost(shape)
            for factor in factors
            if factor not in counted
            for shape in refreshed.get(factor, ())
        )
        costs[names[0]] += refreshes / estimator.refreshes.schedule.refresh_every
        counted.update(factors)
    groups = {group[0]: group for group in together(members)}
    works = {
        key: Load(sum(costs[n] for n in group), sum(parameters[n].nbytes for n in group))
        for key, group in groups.items()
    }
    ranks = owners(works, size)
    return {name: ranks[key] for key, group in groups.items() for name in group}


def _parameters(assembly: Assembly) -> dict[str, str]:
    """Return the parameter of each of its slices, by the name of the slice."""
    return {part.name: name for name, parts in assembly.discovery.parts.items() for part in parts}
