"""Computes the parts of a batch one after another.

The results of the parts are joined to the results of the batch. Reductions divide by the counts of
the whole batch. Each part knows its rows in the batch, so that it draws the random targets that the
whole batch would draw.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.datasets.examples import Batch, ExampleAxes, numbered
from kfac_engine.distributed.agreement import raised_by_all_ranks
from kfac_engine.distributed.shards import RowRange
from kfac_engine.engine.batch_shards import BatchShards, ExchangedPart
from kfac_engine.errors import InputError, KfacError
from kfac_engine.losses.objective import BatchSize, Observation
from kfac_engine.losses.observed import Targets, Weighted, weights_gathered
from kfac_engine.runtime.trace import Trace

# Inputs of a batch by name, the array of the only input, or the parts of a batch: inputs, targets
# and possibly their weights.
Inputs: TypeAlias = Mapping[str, Array] | Array | Sequence[Batch]


def parts_of(inputs: Inputs, targets: Targets = None) -> Sequence[Batch]:
    """Return the parts of a batch as pairs of inputs and targets: one, unless a list is given.

    The pairs of a list contain the targets; ``targets`` is then None.
    """
    if not isinstance(inputs, list | tuple):
        return [(inputs, weights_gathered(targets))]  # type: ignore[list-item] # the engine checks the inputs
    if targets is not None:
        raise InputError(
            "the parts of a batch have their own targets; give a list of pairs (inputs, targets) "
            "and no other targets."
        )
    if not inputs:
        raise InputError("the list of the parts of a batch is empty; give at least one part.")
    parts: list[Batch] = []
    for index, part in enumerate(inputs, 1):
        if not (isinstance(part, list | tuple) and len(part) in (2, 3)):
            raise InputError(
                f"the parts of a batch must be pairs (inputs, targets), also with weights after "
                f"them; part {index} is {type(part).__name__}."
            )
        its_targets = Weighted(*part[1:]) if len(part) == 3 else part[1]
        gathered = weights_gathered(its_targets)
        parts.append(part if gathered is part[1] else (part[0], gathered))  # type: ignore[arg-type] # two entries
    return parts


def _with_part(error: KfacError, parts: Sequence[Batch], index: int) -> KfacError:
    """Return an error that says which part of a batch is wrong, if there are several."""
    error = numbered(error, parts[index])
    if len(parts) == 1 or raised_by_all_ranks(error):
        return error
    message = f"{error} It is in part {index + 1} of the {len(parts)} parts of the batch."
    named = type(error)(message)
    return named.at(*error.place) if error.place else named


def _within(parts: Sequence[RowRange]) -> Sequence[RowRange]:
    """Renumber the rows of each part as rows of the batch, which has the parts in their order."""
    starts = accumulate((rows.whole for rows in parts), initial=0)
    whole = sum(rows.whole for rows in parts)
    return [
        RowRange(start + rows.start, rows.count, whole)
        for start, rows in zip(starts, parts, strict=False)
    ]


@dataclass(slots=True)
class TracedParts:
    """The evaluations of the parts of a batch.

    A single part is evaluated once. Several parts are evaluated anew in each pass, so that the
    activations of one part at a time are in memory.
    """

    parts: Sequence[Batch]
    evaluate: Callable[[Mapping[str, Array], Targets], Trace]  # evaluates a part
    axes: ExampleAxes  # the axes of the examples
    releases: bool = True  # whether values of a trace may be released after they were measured
    # The parts whose sizes all processes have exchanged; each is exchanged once.
    exchanges: list[ExchangedPart] = field(default_factory=list)
    size: BatchSize = field(init=False)  # size of the batch of all processes, which ``count`` sets
    _only: Trace | None = None

    @classmethod
    def of(cls, trace: Trace, axes: ExampleAxes) -> "TracedParts":
        """Return a batch that is evaluated already, as one part."""
        return cls([({}, None)], lambda inputs, targets: trace, axes, releases=False)

    def __post_init__(self) -> None:
        """Run the model on a batch of one part; several parts are run when they are read."""
        if len(self.parts) == 1:
            self.each()

    @property
    def only(self) -> Trace:
        """The trace of a batch that has a single part."""
        assert self._only is not None, "a batch of one part"
        return self._only

    def each(self, do: Callable[[Trace], None] | None = None) -> None:
        """Evaluate each part, one after the other, and call a function with its evaluation."""
        for index, part in enumerate(self.parts):
            try:
                trace = self.evaluate(*part) if self._only is None else self._only
                if len(self.parts) == 1:
                    self._only = trace
                if do is not None:
                    do(trace)
                del trace
            except KfacError as error:
                named = _with_part(error, self.parts, index)
                if named is error:
                    raise
                raise named from error

    def count(
        self,
        shards: BatchShards,
        observe: Callable[[Trace], Observation],
        examples: int | None = None,
    ) -> None:
        """Exchange the sizes of all parts, and set ``size``; a collective call.

        ``observe`` returns the targets of a part. Parts are evaluated unless an earlier pass has
        exchanged their sizes. ``examples`` is the number of examples of this process's shard, if
        the parts have only some of them; ``size`` is then scaled to the whole batch.
        """
        single = len(self.parts) == 1

        def exchange(trace: Trace) -> None:
            known = examples if single else None
            self.exchanges.append(shards.exchange_sizes(trace, observe(trace), known))

        if not self.exchanges:
            self.each(exchange)
        sizes = [part.observation.whole for part in self.exchanges]
        self.size = sum(sizes[1:], sizes[0])
        if examples is not None and not single:
            whole = int(shards.agreement.sum(examples)[0])
            self.size = self.size.of_examples(whole)

    @property
    def measured(self) -> int:
        """Number of examples of all parts and processes, after ``count``."""
        return sum(part.rows.whole for part in self.exchanges)

    @property
    def rows(self) -> Sequence[Sequence[RowRange]]:
        """For each part, the rows of this process in the batch, after ``count``.

        The first entry has the rows among all examples. If there are several sets of examples,
        the rows among the examples of each loss function follow.
        """
        of_parts = [(part.rows, *part.of_losses) for part in self.exchanges]
        columns = [_within(column) for column in zip(*of_parts, strict=True)]
        return [*zip(*columns, strict=True)]

    @property
    def are_alike(self) -> bool:
        """Whether inputs of all parts have the same shapes, apart from the numbers of examples."""
        return len({self.axes.shapes(inputs) for inputs, _ in self.parts}) == 1
