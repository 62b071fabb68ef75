"""Describes this process's shard of a batch, and sums over the shards of all processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.distributed.agreement import Agreement, checksums
from kfac_engine.distributed.messages import sum_arrays, summed
from kfac_engine.distributed.protocol import Alone, Communicator
from kfac_engine.distributed.shards import RowRange
from kfac_engine.engine.rollback import ignore_overflow
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.losses.objective import BatchSize, Objective, Observation, Residuals
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.trace import Trace

# Batches between two comparisons of the parameters.
_CHECKED_EVERY = 100


class ExchangedPart(NamedTuple):
    """What all ranks know of a part of a batch after an exchange of sizes."""

    observation: Observation  # the targets of this rank, as a piece of the part of all ranks
    rows: RowRange  # the rows of this rank in the part of all ranks
    counts: tuple[int, ...]  # number of examples of each rank
    # With several sets of examples, the rows of this rank among those of each loss function.
    of_losses: tuple[RowRange, ...] = ()


class BatchShards:
    """The shards of each batch over the ranks of a communicator, in the order of the ranks.

    Args:
        communicator: The ranks; None for a single process.
        objective: The loss.
        batch: Places of the examples in the values of the model.
        parameters: Returns the parameters on the host.

    Attributes:
        agreement: The operations of all ranks.
        communicator: The ranks.
        alone: Whether there is one rank.
        rows: The rows of this rank in the latest batch, or part of a batch.
        state: Returns texts by name, which must be equal on all ranks that exchange sizes.
    """

    def __init__(
        self,
        communicator: Communicator | None,
        objective: Objective,
        batch: Batch,
        parameters: Callable[[], Mapping[str, Array]],
    ) -> None:
        self.agreement = Agreement(communicator or Alone())
        self.communicator, self.alone = self.agreement.communicator, self.agreement.alone
        self.rows = RowRange(0, 0, 0)
        self.state: Callable[[], Mapping[str, str]] = dict
        self._objective, self._batch, self._parameters = objective, batch, parameters
        self._exchanges = 0

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Return an ``Agreement.operation`` for products; callers check these for overflow."""
        with single_threaded_blas(), ignore_overflow(), self.agreement.operation(name):
            yield

    def exchange_sizes(
        self, trace: Trace, observation: Observation, examples: int | None = None
    ) -> "ExchangedPart":
        """Exchange the sizes of shards, and compare the parameters once in 100 exchanges.

        ``trace`` is the shard of this rank, or a part of it; ``examples`` is then the number of
        examples of the shard.

        Raises:
            ShapeError: Ranks have different numbers of positions for each example.
            RankError: The state, or parameters, differ between ranks.
            KfacError: A rank has failed.
        """
        size = observation.size
        count = size.examples if examples is None else examples
        of_losses = self._examples_of_losses(trace)
        if self.alone:
            rows, *of_each = (RowRange(0, n, n) for n in (size.examples, *of_losses))
            if count != size.examples:
                observation = observation.within(size.of_examples(count))
            return ExchangedPart(observation, rows, (count,), tuple(of_each))
        equal = dict(self.state())
        if self._exchanges % _CHECKED_EVERY == 0:
            equal |= parameter_checksums(self._parameters())
        sums = checksums(equal)
        positions = self._objective.positions(trace, of_losses)
        table = self.agreement.of_all(
            size.examples, positions, count, *sums, *of_losses, *size.totals
        )
        self._exchanges += 1  # on all ranks or none
        before = 3 + len(sums)
        self.agreement.refuse_unequal(list(equal), table[:, 3:before])
        counts, positions, shards = table[:, :3].T
        others = np.flatnonzero(positions != positions[0])
        if others.size:
            self.agreement.refuse(
                ShapeError(
                    f"rank {others[0]} has {positions[others[0]]:g} predictions for each example "
                    f"and rank 0 has {positions[0]:g}; pad the examples of all ranks to one length."
                )
            )
        self.rows, *of_each = (
            RowRange.of([int(n) for n in column], self.communicator.rank)
            for column in (counts, *table[:, before : before + len(of_losses)].T)
        )
        of_ranks = tuple(int(n) for n in shards)
        totals = table[:, before + len(of_losses) :].sum(axis=0)
        measured = BatchSize(self.rows.whole, tuple(map(float, totals)))
        within = observation.within(measured.of_examples(sum(of_ranks)))
        return ExchangedPart(within, self.rows, of_ranks, tuple(of_each))

    def _examples_of_losses(self, trace: Trace) -> tuple[int, ...]:
        """Return the number of examples of each loss function, if examples form several sets."""
        if not self._batch.sets:
            return ()
        outputs, places = self._objective.outputs, self._batch.places
        names = [term.inputs[0] for term in self._objective.terms]
        of_names = ((name, places[outputs.get(name, name)]) for name in names)
        return tuple(trace[name].shape[place.axis] // place.repeats for name, place in of_names)

    def sum(self, arrays: Sequence[Array]) -> None:
        """Replace arrays by their sums over all ranks, in place.

        The arrays have the same shapes and element types on all ranks.
        """
        sum_arrays(self.communicator, arrays)

    def summed(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the sums of arrays over several ranks, in new arrays; see ``sum``."""
        return summed(self.communicator, arrays)

    def totals(
        self, losses: Sequence[float], residuals: Residuals | None
    ) -> tuple[list[float], Residuals]:
        """Return the sums of losses and residuals over all processes."""
        measured = Residuals() if residuals is None else residuals
        weighted = measured.weighted
        if not self.alone:  # weights may be Booleans in one process, and numbers in another
            weighted = {n: weighted.get(n, (0.0, 0.0, 0.0)) for n in measured.sums}
        sums: dict[Any, tuple[Any, ...]] = {(False, n): entry for n, entry in measured.sums.items()}
        sums |= {(True, n): entry for n, entry in weighted.items()}
        if self.alone:
            on_host = {n: tuple(map(_in_float64, entry)) for n, entry in sums.items()}
            return [*map(float, losses)], _residuals_of(on_host, measured)
        entries = {(n, i): x for n, entry in sums.items() for i, x in enumerate(entry)}
        # The sums of features are arrays; their lengths may differ, as those of sequences do.
        features = {place: x for place, x in entries.items() if np.ndim(x)}
        numbers = {place: float(x) for place, x in entries.items() if not np.ndim(x)}
        table = self.agreement.of_all(*losses, *numbers.values(), *map(len, features.values()))
        count = len(losses) + len(numbers)
        totals = table[:, :count].sum(axis=0).tolist()
        lengths = table[:, count:].max(axis=0).astype(int)
        arrays = [np.zeros(length) for length in lengths]
        for array, of_rank in zip(arrays, features.values(), strict=True):
            array[: len(of_rank)] = of_rank.tolist()
        with self.agreement.exchanging():
            self.sum(arrays)
        every = dict(zip([*numbers, *features], [*totals[len(losses) :], *arrays], strict=True))
        of_all = {n: tuple([every[n, i] for i in range(len(entry))]) for n, entry in sums.items()}
        return totals[: len(losses)], _residuals_of(of_all, measured)


def _residuals_of(sums: Mapping[Any, tuple[Any, ...]], measured: Residuals) -> Residuals:
    """Return residuals with other sums; a key tells first whether its sums are those of weights."""
    tables: tuple[dict[Any, Any], ...] = {}, {}
    for (of_weights, key), entry in sums.items():
        tables[of_weights][key] = entry
    return Residuals(tables[False], errors=measured.errors, weighted=tables[True])


def _in_float64(entry: Any) -> Any:
    """Return a number, or an array of numbers, on the host."""
    return np.array(entry.tolist(), np.float64) if np.ndim(entry) else float(entry)


def parameter_checksums(parameters: Mapping[str, Array]) -> dict[str, str]:
    """Return checksums of parameters on the host, for ``Agreement.require_equal``."""
    sums = (crc32(array.tobytes()) for array in parameters.values())
    return {"parameters": " ".join(map(str, sums))}


def check_communicator(communicator: object) -> None:
    """Refuse an object that is not a communicator, with an InputError."""
    if communicator is not None and not isinstance(communicator, Communicator):
        raise InputError(
            f"communicator must have rank, size, allreduce, reduce_scatter, allgather and "
            f"broadcast, such as kfac_engine.over_mpi(), got {communicator!r:.80}."
        )
