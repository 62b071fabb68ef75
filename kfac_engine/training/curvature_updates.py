"""Decides when an optimizer updates statistics and inverses, and on which part of a batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf
from typing import TypeVar

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_number
from kfac_engine.curvature.schedule import NEVER, Due, Schedule
from kfac_engine.datasets.examples import Batch
from kfac_engine.distributed.shards import RowRange
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import StageClock

Result = TypeVar("Result")


class PartialBatch:
    """Chooses some examples of a batch, different examples in each step.

    If the model does not run on a part of a batch, the whole batch is chosen. If the model runs
    with a single example only, some parts of the batch are chosen.

    Args:
        engine: The engine of the model.
        part: Share of the examples, in (0, 1].

    Attributes:
        share: The share of the examples that are chosen; 1 for a model that needs whole batches.
    """

    def __init__(self, engine: Engine, part: float) -> None:
        self._engine, self._part = engine, part
        self._axes = axes = engine.example_axes
        self._least = fewest_measured(engine)
        self.share = part if not axes.obstacle or axes.fixed_size == 1 else 1.0

    def __call__(self, step: int, batch: Sequence[Batch]) -> tuple[Sequence[Batch], int | None]:
        """Return the chosen examples, and the number of examples of the whole batch.

        Each of several processes returns examples of its shard. All processes must have exchanged
        the sizes of the shards before, for the gradients of the batch.

        Args:
            step: Number of the step, from 0.
            batch: The parts of the batch.

        Returns:
            The parts with chosen examples, and the number; None as the number if all are chosen.
        """
        divides = not self._axes.obstacle
        if self.share == 1:
            return batch, None
        passes = self._engine.passes
        counts = [sizes[passes.agreement.rank] for sizes in passes.part_sizes]
        selections = self._selections(step)
        if selections is None:
            return batch, None
        pairs = zip(batch, selections, strict=True)
        chosen = [self._axes.part(*part, selection) for part, selection in pairs if len(selection)]
        # Over several processes, joined parts would draw the random numbers of other examples.
        if divides and passes.agreement.alone and len(chosen) > 1:
            chosen = self._joined(chosen, max(counts))
        return chosen, sum(counts)

    def first(
        self,
        step: int,
        batch: Sequence[Batch],
        use: Callable[[Sequence[Batch], int | None], Result | None],
    ) -> Result:
        """Call ``use`` with the choices of a step and of later steps, until targets count.

        Args:
            step: Number of the step, from 0.
            batch: The parts of the batch.
            use: Takes the results of a call of this object; returns None if no target counts.

        Returns:
            The first result of ``use`` that is not None. It is the result for the whole batch if no
            choice has targets that count for all losses.
        """
        # The choices of this many steps cover the batch, even with rounded sizes.
        for later in range(ceil(1.5 / self._part)):
            result = use(*self(step + later, batch))
            if result is not None:
                return result
        result = use(batch, None)
        assert result is not None, "a whole batch without targets that count raises an error"
        return result

    def _joined(self, parts: Sequence[Batch], most: int) -> list[Batch]:
        """Join consecutive parts of equal shapes into parts of at most ``most`` examples."""
        groups: list[list[Batch]] = []
        size = 0
        for part in parts:
            count = self._axes.count(part[0])
            alike = groups and self._axes.shapes(part[0]) == self._axes.shapes(groups[-1][0][0])
            # Inputs without an axis of examples may differ between parts.
            divided = part[0].keys() <= self._axes.inputs.keys()
            if divided and alike and size + count <= most:
                groups[-1].append(part)
            else:
                groups.append([part])
                size = 0
            size += count
        return [group[0] if len(group) == 1 else self._axes.joined(group) for group in groups]

    def _selections(self, step: int) -> list[Array] | None:
        """Return the indices of the chosen examples in each part of the shard.

        The result is None if only some of the processes would have examples in a part.
        """
        sizes = self._engine.passes.part_sizes
        start, whole = 0, sum(map(sum, sizes))
        chosen = []
        for of_part in sizes:
            of_ranks = list[Array]()
            for size in of_part:
                rows = RowRange(start, size, whole)
                of_ranks.append(rotating_part(step, rows, self._part, self._least))
                start += size
            if any(map(len, of_ranks)) and not all(map(len, of_ranks)):
                return None
            chosen.append(of_ranks[self._engine.passes.agreement.rank])
        return chosen


class CurvatureUpdates:
    """Updates the statistics and the inverses of an engine as its optimizer needs them.

    Args:
        engine: The engine.
        schedule: The policy of the refreshes, and the largest periods of a ``GrowingPlanner``;
            ``covariance_every`` is the largest period of the statistics.
        part: Part of the batch whose statistics are computed, in (0, 1].
        by_example: Whether every update measures gradients of single examples, which parameters
            without a layer need; if not, one update in ``refresh_every`` steps does.

    Attributes:
        planner: Plans the updates.
        part: Chooses the examples whose statistics are computed.
    """

    def __init__(
        self, engine: Engine, schedule: Schedule, part: float, *, by_example: bool = True
    ) -> None:
        check_number("statistics_part", part, "(0, 1]")
        self._by_example = by_example
        self._engine = engine
        self.planner = engine.fisher.growing_planner(schedule)
        self._names = engine.factors.refresh_names()
        self.part = PartialBatch(engine, part)
        self._latest = Due(0, statistics=False, refreshes=())

    def due(self, step: int, examples: int) -> Due:
        """Return the updates of a step; ``examples`` is the batch size over all processes."""
        self._latest = self.planner.due(step, examples)
        return self._latest

    def update(
        self,
        due: Due,
        batch: Sequence[Batch],
        clock: StageClock,
        *,
        whole: bool = False,
        by_example: bool = False,
    ) -> None:
        """Update statistics and inverses where they are due, on the parts of a batch.

        Args:
            due: The updates of the step.
            batch: The parts of the batch.
            clock: Measures the stages ``"statistics"`` and ``"inverses"``.
            whole: Whether statistics have all examples of the batch.
            by_example: Whether gradients of single examples are measured in any case.
        """
        fisher, passes = self._engine.fisher, self._engine.passes
        decay = 0.0 if due.replaces else None
        by_example = by_example or self._by_example or due.begins_period

        def use(part: Sequence[Batch], examples: int | None) -> bool | None:
            measured = passes.update_averages(
                fisher,
                passes.traced(part),
                examples=examples,
                decay=decay,
                by_example=by_example,
            )
            return measured or None

        of_part = partial(self.part.first, due.counter, batch, use)
        passes.update_due(fisher, due, clock, partial(use, batch, None) if whole else of_part)
        if due.refreshes:
            with clock("inverses"):
                fisher.refresh(due)

    def advance(self) -> tuple[str, ...]:
        """Record that ``update`` succeeded; return the names of the refreshed factors."""
        due = self._latest
        if not (due.statistics or due.refreshes):
            return ()
        self.planner.advance(due)
        return tuple(map(self._names.__getitem__, due.refreshes))

    def restart(self, step: int) -> Callable[[], None]:
        """Restart all periods at a step, in which all is due; return a function that undoes it."""
        planner = self.planner
        before = planner.observed, planner.start, dict(planner.refreshed)
        planner.restart(step)

        def restore() -> None:
            planner.observed, planner.start, refreshed = before
            planner.refreshed.update(refreshed)

        return restore

    def saved(self) -> dict[str, Array]:
        """Return the steps of the latest refreshes."""
        steps = [self.planner.refreshed.get(work.key, NEVER) for work in self.planner.works]
        return {"steps": np.array(steps, np.float64)}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restore a state that ``saved`` returned."""
        steps = self._engine.collection.backend.to_numpy(saved["steps"]).tolist()
        pairs = zip(self.planner.works, steps, strict=True)
        self.planner.refreshed = {work.key: int(step) for work, step in pairs if 0 <= step < inf}


def fewest_measured(engine: Engine) -> int:
    """Return the least number of examples in a part: two if batch statistics need a variance."""
    return 2 if engine.buffers else 1


def rotating_part(step: int, rows: RowRange, part: float, least: int = 1) -> Array:
    """Return ascending indices in a shard: another part of the batch in each step.

    The part, in (0, 1], has the same number of examples in each step, ``least`` or more if the
    batch has that many. Its examples are spread evenly over the batch, so that each shard has its
    share of them.
    """
    size = min(max(least, round(rows.whole * part)), rows.whole)
    edges = np.arange(rows.start, rows.start + rows.count + 1) + step
    return np.flatnonzero(np.diff(edges * size // rows.whole))
