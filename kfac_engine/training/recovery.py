"""Returns a run whose loss explodes to stored weights, and continues with smaller steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from statistics import median
from types import MappingProxyType
from typing import TypeVar

from kfac_engine.arguments import check_int
from kfac_engine.datasets.examples import Batch, numbered_in_data
from kfac_engine.errors import DivergenceError, DivergenceWarning, NonFiniteError, warn
from kfac_engine.system.signals import HeldInterrupts
from kfac_engine.training.checkpoint import COUNTER, LEARNING_RATE, Number, SavedState
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer, StepReport
from kfac_engine.training.weights import Weights

_WINDOW = 5  # losses of a median
_SNAPSHOT_EVERY = 50
# Prefix of the optimizer's state in a checkpoint's part.
_STATE = "optimizer/"
Value = TypeVar("Value")


class Recovery(Callback):
    """Steps of an optimizer, with a roll-back where the loss explodes.

    A snapshot has the weights and the state of the optimizer. It is taken before the first step,
    and after each 50 further steps.

    The loss has exploded if two conditions hold. The median of the latest five losses is above the
    second smallest S of the first five losses, and above ``r + 9 |r|``, where r is S or a lower
    median of five losses at a snapshot. And the loss of the present batch is above ``s + 9 |s|``,
    where s is its loss at the snapshot. A batch with NaN or infinity needs the second condition
    only.

    Args:
        optimizer: The optimizer.
        most: Number of roll-backs of a run, at least 0; 0 for steps without a snapshot.

    Raises:
        InputError: ``most`` is not a whole number of at least 0.
    """

    part = "rollback"
    _table = MappingProxyType(
        {
            "count": Number("_count", COUNTER),
            "attempts": Number("_attempts", COUNTER),
            "age": Number("_age", COUNTER),
            "reference": Number("_reference"),
            "first": Number("_first"),
            "latest": Number("_latest"),
        }
    )

    def __init__(self, optimizer: Optimizer, most: int) -> None:
        check_int("rollbacks", most, least=0)
        self._optimizer, self._most = optimizer, most
        self._count = 0
        self._first: list[float] = []
        self._latest: list[float] = []
        self._reference = inf
        if most:
            self._take_snapshot()

    def step(self, batch: Sequence[Batch], scale: float) -> StepReport:
        """Change the parameters by the parts of one batch, or return to the snapshot.

        ``scale`` is a factor of the learning rate. If the loss explodes after the last roll-back, a
        DivergenceError is raised, and the engine and the optimizer have the state of the snapshot.
        A batch that yields NaN or infinity at the snapshot as well raises a NonFiniteError.
        """
        if not self._most:
            return self._step(batch, scale)
        try:
            report = self._step(batch, scale)
        except NonFiniteError:
            if not self._exceeds_snapshot(batch, self._loss(batch)):
                raise
            return self._roll_back(StepReport(nan, 0.0), inf)
        if report.skipped:
            if self._exceeds_snapshot(batch, self._loss(batch)):
                return self._roll_back(report, inf)
            return report
        self._add(report.loss)
        if self._is_suspicious and self._exceeds_snapshot(batch, report.loss):
            return self._roll_back(report, median(self._latest))
        self._age += 1
        if self._age >= _SNAPSHOT_EVERY and not self._is_suspicious:
            self._take_snapshot()
        return report

    def state(self, optimizer: Optimizer) -> SavedState:
        """Return the state that checkpoints store; empty without roll-backs."""
        if not self._most:
            return SavedState()
        state, snapshot, bounds = super().state(optimizer), self._saved, optimizer.state().bounds
        return SavedState(
            {**state.numbers, **_of_snapshot(snapshot.numbers)},
            {**self._weights.arrays, **_of_snapshot(snapshot.arrays)},
            {**state.bounds, **_of_snapshot(bounds)},
        )

    def restore(self, state: SavedState) -> None:
        """Restore the state of a checkpoint."""
        super().restore(state)
        self._weights = Weights.stored(state.arrays)
        self._saved = SavedState(_of_optimizer(state.numbers), _of_optimizer(state.arrays))

    def _step(self, batch: Sequence[Batch], scale: float) -> StepReport:
        """Call ``step`` of the optimizer, with a list of parts only if there are several."""
        if len(batch) > 1:
            return self._optimizer.step(batch, None, scale)
        ((inputs, targets),) = batch
        with numbered_in_data(batch):
            return self._optimizer.step(inputs, targets, scale)

    def _take_snapshot(self) -> None:
        """Store copies of the weights and of the state of the optimizer."""
        state = self._optimizer.state()
        self._weights = Weights.present(self._optimizer.engine).copy()
        self._saved = SavedState(
            # A roll-back keeps a learning rate that was set after the snapshot.
            {name: value for name, value in state.numbers.items() if name != LEARNING_RATE},
            {
                slot: {n: a.copy() for n, a in arrays.items()}
                for slot, arrays in state.arrays.items()
            },
        )
        self._age = self._attempts = 0
        if self._latest:
            self._reference = min(self._reference, median(self._latest))

    def _add(self, loss: float) -> None:
        """Add the loss of a step."""
        self._latest = [*self._latest, loss][-_WINDOW:]
        if len(self._first) < _WINDOW:
            self._first = [*self._first, loss]
            if len(self._first) == _WINDOW:
                self._reference = sorted(self._first)[1]

    @property
    def _is_suspicious(self) -> bool:
        """Whether the latest losses are far above those at the start and at the snapshot."""
        if min(len(self._first), len(self._latest)) < _WINDOW:
            return False
        bound = max(sorted(self._first)[1], _tenfold(self._reference))
        return median(self._latest) > bound

    def _exceeds_snapshot(self, batch: Sequence[Batch], loss: float) -> bool:
        """Return whether the loss of a batch is far above its loss at the snapshot."""
        with self._weights.applied(self._optimizer.engine):
            return loss > _tenfold(self._loss(batch))

    def _loss(self, batch: Sequence[Batch]) -> float:
        """Return the loss of a batch; infinity where it is not finite."""
        try:
            return self._optimizer.engine.loss(batch)
        except NonFiniteError:
            return inf

    def _roll_back(self, report: StepReport, loss: float) -> StepReport:
        """Return to the snapshot, with an optimizer that takes smaller steps."""
        optimizer, failed = self._optimizer, self._optimizer.steps
        skipped = optimizer.skipped
        with HeldInterrupts():
            self._weights.apply(optimizer.engine)
            optimizer.restore(self._saved)
            optimizer.skipped = skipped
        self._count += 1
        self._attempts += 1
        self._age = 0
        self._latest = []
        message = f"the loss rose from {self._reference:.3g} to {loss:.3g} at step {failed}"
        place = f"the parameters of step {optimizer.steps} are restored"
        if self._count > self._most:
            raise DivergenceError(
                f"{message}, after {self._most} roll-backs; {place}. Lower the learning rate, "
                f"raise the damping or allow more roll-backs, and look for outliers in the data."
            )
        for _ in range(self._attempts):
            optimizer.restrain()
        if optimizer.engine.passes.agreement.rank == 0:
            warn(
                f"{message}; {place}, and the next steps are smaller (roll-back {self._count} of "
                f"{self._most}).",
                DivergenceWarning,
            )
        return replace(report, rolled_back=True)


def _tenfold(loss: float) -> float:
    """Return a bound above a loss; losses may be negative."""
    return loss + 9 * abs(loss)


def _of_snapshot(entries: Mapping[str, Value]) -> dict[str, Value]:
    """Return the entries of the state of the optimizer, under their names in a checkpoint."""
    return {f"{_STATE}{name}": value for name, value in entries.items()}


def _of_optimizer(entries: Mapping[str, Value]) -> dict[str, Value]:
    """Return the entries of the state of the optimizer, under their names there."""
    return {k.removeprefix(_STATE): v for k, v in entries.items() if k.startswith(_STATE)}
