"""Curvature over several ranks, all of which store all inverses.

An average that only refreshes read is divided among the ranks: each rank averages its shards of the
batches, and the average is the sum over the ranks. Moving averages are linear, so ranks exchange
such averages only before a refresh. Then the owner of a factor receives the sum, and the others
start from zero. The owner computes the inverses, and all ranks receive them.

Other averages are whole on all ranks: those that products read, and squares of sums.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.measurement import Measurement
from kfac_engine.curvature.factors.refresh import (
    Compute,
    RefreshTask,
    Request,
    Result,
    result_forms,
)
from kfac_engine.curvature.factors.updater import PendingUpdate
from kfac_engine.curvature.refreshes import refresh_cost
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.ranks.messages import OwnedArrays
from kfac_engine.ranks.owners import Load, owners
from kfac_engine.ranks.packing import Form

_WIDE = np.dtype(np.float64)


class Replicate:
    """Averages and inverses of an estimator over several ranks.

    Args:
        shards: The ranks.
        estimator: The estimator; its updates and refreshes are those of all ranks from now on.

    Attributes:
        divided: Factors whose averages are divided among the ranks.
    """

    def __init__(self, shards: BatchShards, estimator: FisherEstimator) -> None:
        self._shards, self._estimator = shards, estimator
        self._communicator = shards.communicator
        readers = Counter(id(a) for factor in estimator.factors for a in factor.averages)
        self.divided = tuple(
            factor
            for factor in estimator.factors
            if factor.only_refreshes_read and readers[id(factor.average)] == 1
        )
        self._whole = True  # whether divided averages are whole on all ranks
        if not shards.alone:
            estimator.combine = self._combine_bases
            estimator.refreshes.division = self

    # -- statistics -------------------------------------------------------------------------------

    def combine(
        self, loss: float, update: PendingUpdate | None, arrays: Sequence[Array] = ()
    ) -> float:
        """Meet all ranks; sum arrays and measurements over them, in place.

        Args:
            loss: The loss of the shard.
            update: A measured batch, which no average has received; None if none is due.
            arrays: Further arrays to sum.

        Returns:
            The loss of the batch.

        Raises:
            KfacError: A rank has failed.
        """
        if self._shards.alone:
            if update is not None:
                self._estimator.statistics.updater.combined(update)
            return loss
        measured = [] if update is None else list(update.measured)
        wide = sum(measurement.array.dtype == _WIDE for _, measurement in measured)
        losses, wides = self._shards.agreement.vote(loss, wide).T
        if len(set(wides)) > 1:  # numbers of one rank need float64
            for factor, measurement in measured:
                factor.narrowest = _WIDE
                measurement.widen()
        whole = [m for factor, m in measured if factor not in self.divided]
        self._weigh([measurement for _, measurement in measured])
        self._shards.sum([*arrays, *(measurement.array for measurement in whole)])
        return float(losses.sum())

    def commit(self, update: PendingUpdate) -> None:
        """Update the averages by a combined batch."""
        if not self._shards.alone:
            self._divide()
        update.commit(self._estimator.cov_ema_decay)
        if not self._shards.alone:
            self._sum_traces()

    def complete(self) -> None:
        """Make all averages whole on all ranks; a collective call."""
        if self._whole or self._shards.alone:
            return
        averages = [factor.average.read() for factor in self.divided]
        self._shards.sum(averages)
        self._whole = True

    def forget_division(self) -> None:
        """Record that all averages are whole, because they were replaced on all ranks."""
        self._whole = True

    def _combine_bases(self, measurements: Sequence[Measurement]) -> None:
        self._shards.agreement.vote()
        self._weigh(measurements)
        self._shards.sum([measurement.array for measurement in measurements])

    def _weigh(self, measurements: Sequence[Measurement]) -> None:
        rows = self._shards.rows
        for measurement in measurements:
            array = measurement.array
            array *= rows.count / rows.whole
            measurement.examples = rows.whole

    def _divide(self) -> None:
        """Let the first rank have the divided averages, and the others start from zero."""
        if not self._whole:
            return
        for factor in self.divided:
            if factor.average.value is not None:
                factor.traces()  # of the whole average
                if self._communicator.rank:
                    factor.average.value[...] = 0.0
        self._whole = False

    def _sum_traces(self) -> None:
        """Sum the traces of divided averages, on which dampings depend."""
        backend = self._backend
        traces = backend.download([factor.measured_traces() for factor in self.divided])
        sums = [np.array(trace, _WIDE) for trace in traces]
        self._shards.sum(sums)
        for factor, total in zip(self.divided, sums, strict=True):
            factor.traces_of_average = total

    # -- refreshes --------------------------------------------------------------------------------

    def hand_over(self, due: Sequence[FisherFactor]) -> None:
        """Give the sum of each divided average to its owner; the others start from zero."""
        self._divide()
        ranks = self._owners(due)
        factors = sorted((f for f in due if f in self.divided), key=lambda f: ranks[id(f)])
        if not factors:
            return
        averages = [factor.average.lower() for factor in factors]
        forms = [Form(average.shape, average.dtype, "lower") for average in averages]
        message = self._message(forms, [ranks[id(factor)] for factor in factors])
        for factor, average, total in zip(factors, averages, message.sum(averages), strict=True):
            average[...] = 0.0 if total is None else total
            factor.average.rest = factor.complete

    def compute(
        self, due: Sequence[FisherFactor], tasks: Sequence[RefreshTask], compute: Compute
    ) -> Mapping[Request, Result]:
        """Compute the requests of each factor on its owner, and send the results to all ranks."""
        ranks = self._owners(due)
        owner = {
            request: ranks[id(factor)]
            for factor, task in zip(due, tasks, strict=True)
            for request in task.requests
        }
        requests = sorted(owner, key=owner.__getitem__)
        forms = {request: result_forms(request) for request in requests}
        results, failure = self._computed(
            [request for request in requests if owner[request] == self._communicator.rank], compute
        )
        message = self._message(
            list(chain(*forms.values())), [owner[r] for r in requests for _ in forms[r]]
        )
        arrays = message.gather(results)
        if arrays is None:
            if failure is not None:
                raise failure
            self._shards.agreement.vote()  # raises the error of the rank that has failed
            raise AssertionError("a rank has sent a mark, but no error")
        following = iter(arrays)
        return {request: tuple(islice(following, len(forms[request]))) for request in requests}

    def _computed(
        self, requests: Sequence[Request], compute: Compute
    ) -> tuple[list[Array] | None, Exception | None]:
        """Compute requests; return the arrays of their results, or the error."""
        try:
            results = compute(requests)()
        except Exception as error:
            return None, error
        return [array for request in requests for array in results[request]], None

    def _owners(self, due: Sequence[FisherFactor]) -> dict[int, int]:
        """Return the rank that refreshes each factor, by ``id`` of the factor."""
        works = {
            f"{index:06d}": Load(sum(refresh_cost(a.lower().shape) for a in factor.averages))
            for index, factor in enumerate(due)
        }
        ranks = owners(works, self._communicator.size)
        return {id(factor): ranks[key] for key, factor in zip(works, due, strict=True)}

    def _message(self, forms: Sequence[Form], owners: Sequence[int]) -> OwnedArrays:
        return OwnedArrays(self._communicator, self._backend, forms, owners)

    @property
    def _backend(self) -> Backend:
        return self._estimator.factors[0].backend
