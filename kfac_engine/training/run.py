"""Runs the steps of training, from a position in the data to the end of the budget."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from kfac_engine.datasets.examples import Batch, numbered_in_data
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.metrics import MetricChoice, default_metrics, metrics_of
from kfac_engine.errors import InputError
from kfac_engine.training.batches import Batches
from kfac_engine.training.budget import Budget, Position, ScheduleFunction
from kfac_engine.training.history import STEP_ENTRIES, Record
from kfac_engine.training.hooks import Hooks
from kfac_engine.training.optimizer import Optimizer, StepReport
from kfac_engine.training.recovery import Recovery

# Numbers of a step report that records have where they are defined.
_NUMBERS = ("momentum", "damping", "reduction_ratio")
# Answers of a step report: yes or no.
_EVENTS = ("skipped", "rolled_back")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run."""

    position: Position  # the position after the step
    record: Record
    spent: float  # part of the budget that is spent, in [0, 1]
    ends_epoch: bool  # whether the step is the last step of an epoch
    ends_run: bool  # whether the step ends the budget


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run."""

    optimizer: Optimizer  # changes the parameters
    batches: Batches  # the data
    budget: Budget  # when the run ends
    schedule: ScheduleFunction  # factor of the learning rate
    validation: Iterable[Batch] | None  # batches that are evaluated; None for no validation
    # Metrics of the validation; None for the metrics of the losses.
    metrics: Sequence[MetricChoice] | None
    hooks: Hooks  # the callbacks of a validation
    recovery: Recovery  # the steps of the optimizer, with roll-backs

    def steps(self, position: Position) -> Iterator[Step]:
        """Train from a position to the end of the budget."""
        start, agreement = perf_counter() - position.seconds, self.optimizer.engine.passes.agreement
        per_epoch = self.batches.per_epoch
        spent = self.budget.spent(position, per_epoch)
        while spent < 1:
            for batch, is_last in _marked(self._rest_of_epoch(position)):
                report = self.recovery.step(batch, self.schedule(spent))
                epoch = position.epoch
                position = replace(
                    position,
                    epoch=epoch + is_last,
                    batch=0 if is_last else position.batch + 1,
                    steps=position.steps + 1,
                    # The clock of the first process decides for all of them.
                    seconds=float(agreement.of_all(perf_counter() - start)[0, 0]),
                )
                spent = self.budget.spent(position, per_epoch)
                record = _record(position, epoch, report) | {"spent": spent}
                if is_last:
                    self.evaluate(record)
                yield Step(position, record, spent, is_last, spent >= 1)
                if spent >= 1:
                    return

    def evaluate(self, record: Record) -> None:
        """Add the metrics on the validation data to the record of the latest step."""
        if self.validation is None:
            return
        optimizer = self.optimizer
        read: deque[Batch] = deque(maxlen=1)
        batches = _remembered(self.validation, read)
        with self.hooks.evaluating(record, optimizer), numbered_in_data(read):
            values = optimizer.engine.evaluate(batches, metrics=self.metrics)
            record.update({_recorded(name): value for name, value in values.items()})
            self.hooks.on_validation_end(record, optimizer)

    def _rest_of_epoch(self, position: Position) -> Iterator[list[Batch]]:
        """Return the batches of the epoch after those that the run has used."""
        remaining = self.batches.steps(position.epoch, position.batch)
        first = next(remaining, None)
        if first is None:
            raise InputError(
                "the data give no batch in this epoch; an iterable must start again each time."
            )
        yield first
        yield from remaining


def recorded_metrics(metrics: Sequence[MetricChoice] | None, engine: Engine) -> list[str]:
    """Return the names of metrics of ``Engine.evaluate`` in records; None for those of the losses.

    A function with the name of another entry of a record raises an InputError.
    """
    names = list(metrics_of(default_metrics(engine.objective) if metrics is None else metrics))
    for name in names:
        if name in (STEP_ENTRIES - {"loss"}) | {"validation_loss"}:
            raise InputError(
                f"'{name}' is the name of another number in records; rename the metric's function."
            )
    return [_recorded(name) for name in names]


def _recorded(name: str) -> str:
    """Return the name of a metric in records, where ``loss`` is the loss of the training batch."""
    return "validation_loss" if name == "loss" else name


def _record(position: Position, epoch: int, report: StepReport) -> Record:
    """Return the record of a step."""
    record: Record = {
        "step": position.steps,
        "epoch": epoch,
        "seconds": position.seconds,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
    }
    numbers = {name: getattr(report, name) for name in _NUMBERS}
    record |= {name: value for name, value in numbers.items() if value is not None}
    record["refreshed"] = list(report.refreshed)
    record |= {name: getattr(report, name) for name in _EVENTS}
    record |= {f"loss/{output}": value for output, value in report.losses.items()}
    return record | {f"seconds/{stage}": value for stage, value in report.seconds.items()}


def _remembered(batches: Iterable[Batch], read: deque[Batch]) -> Iterator[Batch]:
    """Yield batches; ``read`` receives each of them before."""
    for batch in batches:
        read.append(batch)
        yield batch


def _marked(batches: Iterator[list[Batch]]) -> Iterator[tuple[list[Batch], bool]]:
    """Return batches, each with whether it is the last one."""
    present = next(batches, None)
    while present is not None:
        following = next(batches, None)
        yield present, following is None
        present = following
