"""Averages statistics over several ranks, and implements the distribution ``"replicate"``.

An average that only refreshes read is divided among the ranks: each rank averages its shards of the
batches, and the average is the sum over the ranks. Moving averages are linear, so ranks exchange
such averages only before a refresh. The factor's owner then receives the sum, and the average of
other ranks starts from zero.

Averages that products read, and averages of squared sums, are whole on all ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from zlib import crc32

import numpy as np

from kfac_engine._types import Array, Rows
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.measurement import Measurement, ToMeasure
from kfac_engine.curvature.factors.readers import Update
from kfac_engine.curvature.factors.refresh import (
    Compute,
    Division,
    RefreshTask,
    Request,
    Result,
    result_forms,
)
from kfac_engine.curvature.factors.statistics import Count
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.curvature.refreshes import refresh_cost
from kfac_engine.distributed.messages import Form, OwnedArrays
from kfac_engine.distributed.owners import Load, owners
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.report import LayerReport

_WIDE = np.dtype(np.float64)


class Distribution(Division):
    """Divides the averages and inverses of an engine among ranks; see ``Replicate`` and ``Shard``.

    Attributes:
        divided: Factors whose averages are divided among the ranks.
    """

    def __init__(
        self,
        shards: BatchShards,
        assembly: Assembly,
        fisher: Fisher,
        reports: Callable[[], Iterable[LayerReport]],
    ) -> None:
        del reports
        self._shards, self._assembly, self._fisher = shards, assembly, fisher
        self._communicator = shards.communicator
        readers = Counter(id(a) for factor in fisher.factors for a in factor.averages)
        self.divided = tuple(
            factor
            for factor in fisher.factors
            if factor.only_refreshes_read and readers[id(factor.average)] == 1
        )
        self._linear = frozenset(self.divided)
        self._whole = True  # whether divided averages are whole on all ranks
        # Factors whose average is a copy of the first owner's, for a refresh on this rank.
        self._copied: list[FisherFactor] = []

    # -- statistics -------------------------------------------------------------------------------

    def commit(self, update: Update, decay: float) -> None:
        self._empty_copies()
        share = update.shares(self._totals(update.every))
        with self._shards.agreement.exchanging():
            divided = share.of(self._linear)
            whole = share.of({factor for factor in share.every if factor not in self._linear})
            self._divide()
            divided.commit(decay)
            self._mark(divided=True)
            moved = [*divided.every]
            traces = [self._backend.xp.array(factor.measured_traces()) for factor in moved]
            self._shards.sum([*(of_all.array for of_all in whole.measured.values()), *traces])
            whole.commit(decay)
            for factor, trace in zip(moved, self._backend.download(traces), strict=True):
                factor.traces_of_average = trace

    def complete(self) -> None:
        if self._whole:
            return
        agreement = self._shards.agreement
        with agreement.operation("complete", begins=True), agreement.exchanging():
            self._empty_copies()
            self._shards.sum([factor.average.lower() for factor in self.divided])
        self._mark(divided=False)

    def restart(self) -> None:
        self._whole, self._copied = True, []

    def snapshot(self) -> Callable[[], None]:
        whole, copied = self._whole, list(self._copied)

        def restore() -> None:
            self._whole, self._copied = whole, copied

        return restore

    def refreshing(self) -> AbstractContextManager[None]:
        return self._shards.agreement.operation("update_inverses", begins=True, ends=True)

    def over_ranks(
        self, measured: Mapping[FisherFactor, Measurement]
    ) -> Mapping[FisherFactor, Measurement]:
        totals = self._totals(measured)
        shares = {f: f.share(m, totals[f]) for f, m in measured.items()}
        with self._shards.agreement.exchanging():
            self._shards.sum([share.array for share in shares.values()])
        return shares

    def _totals(
        self, measured: Mapping[FisherFactor, Measurement | ToMeasure]
    ) -> Mapping[FisherFactor, Count]:
        """Return the counts of the whole batch; give averages one element type on all ranks."""
        rows, counts = self._shards.rows, [m.count for m in measured.values()]
        wide = bytes(np.result_type(m.dtype, f.narrowest) == _WIDE for f, m in measured.items())
        ratios = np.array([count.rows / count.examples for count in counts])
        differs = any(count.examples != rows.count for count in counts)
        marks = crc32(wide), crc32(ratios.tobytes()), differs
        types, shapes, others = self._shards.agreement.of_all(*marks).T
        if len(set(types)) > 1:  # the numbers of a rank need float64
            for factor in measured:
                factor.narrowest = _WIDE
        totals = np.array([(count.examples, count.rows) for count in counts], np.float64)
        if len(set(shapes)) > 1 or others.any():
            with self._shards.agreement.exchanging():
                self._shards.sum([totals.reshape(-1)])
        else:  # all shards have as many rows for each example
            totals *= rows.whole
            totals /= rows.count
        pairs = zip(measured, totals.tolist(), strict=True)
        return {factor: Count(int(n), of_rows) for factor, (n, of_rows) in pairs}

    def _divide(self) -> None:
        """Keep whole averages on the first rank, and set them to zero on other ranks."""
        if not self._whole:
            return
        for factor in self.divided:
            if factor.average.value is not None:
                factor.traces()  # kept, from the whole average
                if self._communicator.rank:
                    factor.average.value[...] = 0.0
        self._mark(divided=True)

    def _empty_copies(self) -> None:
        """Set those averages to zero that this rank holds as copies for a refresh."""
        for factor in self._copied:
            factor.wait()
            factor.average.lower()[...] = 0.0
        self._copied = []

    def _mark(self, *, divided: bool) -> None:
        self._whole = not divided
        for factor in self.divided:
            factor.average.divided = divided and factor.average.value is not None

    # -- products and refreshes -------------------------------------------------------------------

    def multiplying(self) -> AbstractContextManager[None]:
        return self._shards.agreement.operation("products", ends=True)

    @property
    def ranks(self) -> int:
        return self._communicator.size

    def _give_to_owners(
        self, factors: Sequence[FisherFactor], ranks: Mapping[int, Sequence[int]]
    ) -> None:
        """Give the sum of each divided average to its owners; set it to zero on other ranks.

        The first owner of a factor has the average from now on, and further owners have copies.
        Factors whose averages are whole are left out. ``ranks`` maps the ``id`` of a factor to the
        ranks that own it.
        """
        self._divide()
        factors = [factor for factor in factors if factor in self._linear]
        if not factors:
            return
        self._empty_copies()
        averages = [factor.average.lower() for factor in factors]
        pairs = sorted((r, i) for i, factor in enumerate(factors) for r in ranks[id(factor)])
        sent = [averages[index] for _, index in pairs]
        forms = [Form(average.shape, average.dtype, "symmetric") for average in sent]
        message = self._message(forms, [rank for rank, _ in pairs])
        with self._shards.agreement.exchanging():
            totals = message.sum(sent)
        received = {
            index: total
            for (_, index), total in zip(pairs, totals, strict=True)
            if total is not None
        }
        for index, (factor, average) in enumerate(zip(factors, averages, strict=True)):
            average[...] = received.get(index, 0.0)
            factor.average.rest = factor.complete
            factor.average.divided = False  # the refresh reads it
            if index in received and ranks[id(factor)][0] != self._communicator.rank:
                self._copied.append(factor)

    def _compute_on_owners(
        self, tasks: Sequence[RefreshTask], ranks: Sequence[int], compute: Compute
    ) -> Callable[[], Mapping[Request, Result]]:
        """Compute the requests of each task on the rank of the task, and send results to all."""
        owner = {
            request: rank
            for task, rank in zip(tasks, ranks, strict=True)
            for request in task.requests
        }
        requests = sorted(owner, key=owner.__getitem__)
        forms = {request: result_forms(request) for request in requests}
        mine = [request for request in requests if owner[request] == self._communicator.rank]
        with self._shards.agreement.operation("inverses", ends=True):
            results = compute(mine)()
        message = self._message(
            list(chain(*forms.values())), [owner[r] for r in requests for _ in forms[r]]
        )
        with self._shards.agreement.exchanging():
            arrays = iter(message.gather([array for r in mine for array in results[r]]))
        shared = {request: tuple(islice(arrays, len(forms[request]))) for request in requests}
        self._mark(divided=True)
        return lambda: shared

    def _message(self, forms: Sequence[Form], ranks: Sequence[int]) -> OwnedArrays:
        return OwnedArrays(self._communicator, self._backend, forms, ranks)

    @property
    def _backend(self) -> Backend:
        return self._assembly.collection.backend


class Replicate(Distribution):
    """Every rank has all gradients and inverses, as a single process does.

    The owner of a factor computes its inverses and sends them to all ranks. Owners are chosen in
    each refresh, among the factors that are due.
    """

    def sum_gradients(self, gradients: dict[str, Array]) -> Mapping[str, Array | Rows]:
        return dict(zip(gradients, self._shards.summed([*gradients.values()]), strict=True))

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
