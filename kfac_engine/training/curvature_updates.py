"""When an optimizer updates statistics and inverses, and on which part of the batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.arguments import positive, whole
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError
from kfac_engine.losses.objective import Targets
from kfac_engine.runtime.trace import Trace
from kfac_engine.training.examples import ExampleAxes
from kfac_engine.training.report import StageClock

_NEVER = -1


@dataclass(frozen=True, slots=True)
class Periods:
    """How often statistics and inverses are updated.

    Both periods grow: an update is due as soon as ``min(period, max(1, step // 2))`` steps have
    passed, because the curvature changes quickly at the beginning of a run.

    Attributes:
        statistics_every: Largest number of steps between two updates of the statistics.
        statistics_part: Part of the batch whose statistics are computed, in (0, 1].
        refresh_every: Largest number of steps between two refreshes of the inverses.
    """

    statistics_every: int
    statistics_part: float
    refresh_every: int

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A value lies outside its range.
        """
        whole("statistics_every", self.statistics_every, least=1)
        whole("refresh_every", self.refresh_every, least=1)
        check_part("statistics_part", self.statistics_part)


def check_part(name: str, value: float) -> None:
    """Raise an InputError unless a value is a number in (0, 1]."""
    positive(name, value)
    if value > 1:
        raise InputError(f"{name} must lie in (0, 1], got {value!r}.")


@dataclass(frozen=True, slots=True)
class LastUpdates:
    """The steps of the latest updates; −1 before the first one.

    Attributes:
        statistics: Step of the latest statistics.
        inverses: Step of the latest refresh.
        start: Step from which the periods grow, and whose statistics replace the averages; −1 for
            the beginning of the run.
    """

    statistics: int = _NEVER
    inverses: int = _NEVER
    start: int = _NEVER


class PartialTrace:
    """Evaluates a model on a part of a batch, another part in each step.

    A model that runs with one batch size only is evaluated on the whole batch.

    Args:
        engine: The engine of the model.
        part: Part of the examples, in (0, 1].
    """

    def __init__(self, engine: Engine, part: float) -> None:
        self._engine, self._part = engine, part
        self._axes = ExampleAxes(engine)

    def __call__(
        self, step: int, inputs: Mapping[str, Array], targets: Targets
    ) -> tuple[Trace, int | None]:
        """Return the evaluation of the part, and the number of examples of the whole batch.

        Args:
            step: Number of the step, from 0.
            inputs: Input name to array.
            targets: The targets.

        Returns:
            The trace, and the number; None if the trace is that of the whole batch.
        """
        examples = None
        if self._part < 1 and not self._axes.obstacle:
            examples = self._axes.check(inputs, targets)
            selection = rotating_part(step, examples, self._part)
            inputs, targets = self._axes.part(inputs, targets, selection)
        return self._engine.trace(inputs, targets), examples


class CurvatureUpdates:
    """Updates the statistics and the inverses of an engine as its optimizer needs them.

    Args:
        engine: The engine.
        periods: How often.
    """

    def __init__(self, engine: Engine, periods: Periods) -> None:
        self._engine = engine
        self._periods = periods
        self._evaluate = PartialTrace(engine, periods.statistics_part)

    def is_due(self, step: int, last: LastUpdates) -> bool:
        """Return whether a step updates statistics or inverses."""
        return any(self._due(step, last))

    def update(
        self,
        step: int,
        last: LastUpdates,
        batch: tuple[Mapping[str, Array], Targets],
        clock: StageClock,
    ) -> LastUpdates:
        """Update statistics and inverses where they are due.

        Args:
            step: Number of the step, from 0.
            last: The latest updates.
            batch: Inputs and targets.
            clock: Measures the stages ``"statistics"`` and ``"inverses"``.

        Returns:
            The latest updates after this step.
        """
        statistics, inverses = last.statistics, last.inverses
        observes, refreshes = self._due(step, last)
        if observes:
            replaces = statistics == _NEVER and last.start != _NEVER
            with clock("statistics"), self._decay(0.0 if replaces else None):
                self.observe(step, *batch)
            statistics = step
        if refreshes:
            with clock("inverses"):
                self._engine.estimator.update_inverses()
            inverses = step
        return LastUpdates(statistics, inverses, last.start)

    @contextmanager
    def _decay(self, decay: float | None) -> Iterator[None]:
        """Return a context in which the averages have another decay; None for their own."""
        estimator = self._engine.estimator
        present = estimator.cov_ema_decay
        estimator.cov_ema_decay = present if decay is None else decay
        try:
            yield
        finally:
            estimator.cov_ema_decay = present

    def _due(self, step: int, last: LastUpdates) -> tuple[bool, bool]:
        """Return whether a step updates the statistics, and whether it updates the inverses."""
        periods, age = self._periods, step - max(last.start, 0)
        observes = is_due(step, last.statistics, periods.statistics_every, age)
        return observes, is_due(step, last.inverses, periods.refresh_every, age)

    def observe(
        self, step: int, inputs: Mapping[str, Array], targets: Targets, *, decays: bool = True
    ) -> None:
        """Average the statistics of a part of a batch.

        Args:
            step: Number of the step, which chooses the part.
            inputs: Input name to array.
            targets: The targets.
            decays: False for the plain mean of all batches so far.
        """
        trace, examples = self._evaluate(step, inputs, targets)
        # The reduction "sum" multiplies the Fisher matrix by the number of examples of the batch.
        scales = self._engine.objective.fisher_scales(trace, examples=examples)
        self._engine.estimator.update_covariances(trace, scales=scales, should_decay=decays)


def is_due(step: int, last: int, period: int, age: int | None = None) -> bool:
    """Return whether an update is due: at first in each step, later once in a period.

    Args:
        step: Number of the step, from 0.
        last: Step of the latest update; −1 before the first one.
        period: Largest number of steps between two updates.
        age: Number of steps from which the period grows; None for all steps.
    """
    grown = max(1, (step if age is None else age) // 2)
    return last == _NEVER or step - last >= min(period, grown)


def rotating_part(step: int, count: int, part: float) -> slice:
    """Return the range of examples of a step: another part of the batch in each step.

    Args:
        step: Number of the step.
        count: Number of examples in the batch.
        part: Part of the examples, in (0, 1].
    """
    size = max(1, round(count * part))
    start = min(step * size % count, count - size)
    return slice(start, start + size)
