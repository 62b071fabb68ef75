"""The distribution ``"replicate"``: all ranks store all inverses, and each computes some."""

from collections.abc import Callable, Mapping, Sequence

from kfac_engine._types import Array, Rows, whole_arrays
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import (
    Compute,
    RefreshTask,
    Request,
    Result,
)
from kfac_engine.curvature.refreshes import refresh_cost
from kfac_engine.distributed.owners import Load, owners
from kfac_engine.engine.distribution import Distribution


class Replicate(Distribution):
    """Every rank has the gradients and the inverses of one process.

    The owner of a factor computes its inverses and sends them to all ranks. Owners are chosen in
    each refresh, among the factors that are due.
    """

    def sum_gradients(
        self, gradients: dict[str, Array], others: Sequence[Array]
    ) -> dict[str, Array]:
        totals = iter(self._shards.summed([*gradients.values(), *others]))
        summed = {name: next(totals) for name in gradients}
        for array, total in zip(others, totals, strict=True):
            array[...] = total
        return summed

    def owned(self, vectors: Mapping[str, Array | Rows]) -> Mapping[str, Array | Rows]:
        return vectors

    def gather(
        self, gradients: Mapping[str, Array | Rows], shards: Mapping[str, Array]
    ) -> dict[str, Array]:
        return whole_arrays(gradients)

    def share(
        self, names: Sequence[str], multiply: Callable[[], dict[str, Array | Rows]]
    ) -> dict[str, Array]:
        return whole_arrays(multiply())

    def conclude(self) -> None:
        if not self._shards.alone:
            self._shards.agreement.vote(place="products")

    def hand_over(self, due: Sequence[FisherFactor]) -> Sequence[FisherFactor]:
        owners_of = self._owners(due)
        self._give_to_owners(due, {number: (rank,) for number, rank in owners_of.items()})
        return due

    def compute(
        self, due: Sequence[FisherFactor], tasks: Sequence[RefreshTask], compute: Compute
    ) -> Callable[[], Mapping[Request, Result]]:
        ranks = self._owners(due)
        return self._compute_on_owners(tasks, [ranks[id(factor)] for factor in due], compute)

    def _owners(self, due: Sequence[FisherFactor]) -> dict[int, int]:
        """Return the rank that refreshes each factor, by ``id`` of the factor."""
        works = {
            f"{index:06d}": Load(sum(refresh_cost(a.lower().shape) for a in factor.averages))
            for index, factor in enumerate(due)
        }
        ranks = owners(works, self._communicator.size)
        return {id(factor): ranks[key] for key, factor in zip(works, due, strict=True)}
