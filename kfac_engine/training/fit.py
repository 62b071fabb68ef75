"""``fit``: trains a model on data, with validation, a log and checkpoints.

A run is a function of the seed, the data and the position: the order of the examples of an epoch
depends on the seed and the number of the epoch only. A resumed run therefore needs the position.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from kfac_engine.arguments import flag, texts, whole
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.evaluation import METRICS
from kfac_engine.engine.loss_bindings import LossChoice
from kfac_engine.errors import InputError
from kfac_engine.graph.load import ModelSource
from kfac_engine.registry import Registry
from kfac_engine.system.writing import checked_path
from kfac_engine.training.batches import Batches, Data, batches_of, validation_batches
from kfac_engine.training.budget import Budget, Position, budget_of
from kfac_engine.training.examples import Batch, ExampleAxes
from kfac_engine.training.first_order import SGD, Adam, AdamW, Muon
from kfac_engine.training.history import History, Log, Record
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.schedules import ScheduleFunction, schedule_function

# Called after each step with its record and the optimizer; True ends the run.
Callback: TypeAlias = Callable[[Mapping[str, float], Optimizer], object]

CHECKPOINT = "training.safetensors"
_SGD_RATE = 0.01

OPTIMIZERS: Registry[Callable[[Engine], Optimizer]] = Registry(
    "optimizer",
    {
        "kfac": KfacOptimizer,
        "adam": Adam,
        "adamw": AdamW,
        "muon": Muon,
        "sgd": lambda engine: SGD(engine, _SGD_RATE),
    },
)


def fit(  # noqa: PLR0913 (the options of a run)
    model_or_engine: ModelSource | Engine,
    data: Data,
    loss: LossChoice | Sequence[LossChoice] = "categorical",
    optimizer: str | Optimizer = "kfac",
    epochs: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    batch_size: int = 128,
    validation: Data | None = None,
    metrics: Sequence[str] = ("loss",),
    schedule: str | ScheduleFunction = "tail",
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    log: str | Path | None = None,
    *,
    checkpoint_every: int | None = None,
) -> History:
    """Train a model on data.

    Args:
        model_or_engine: Path, bytes or ``ModelProto`` of a model, or an engine.
        data: A pair ``(inputs, targets)`` with all examples, or an iterable of such pairs, one a
            batch, that can be iterated again. Inputs are a dictionary of arrays by input name; a
            model of one input takes the array alone.
        loss: Loss of a model; an engine has its own.
        optimizer: ``"kfac"``, ``"adam"``, ``"adamw"``, ``"muon"``, ``"sgd"``, or an optimizer of
            the engine.
        epochs: Bound of the number of epochs. Without any bound, the run has ten epochs.
        steps: Bound of the number of batches.
        seconds: Bound of the wall time, validation included.
        batch_size: Examples in a batch, where ``data`` are arrays.
        validation: Data that are evaluated at the end of each epoch and of the run.
        metrics: Metrics of ``Engine.evaluate`` for ``validation``.
        schedule: Factor of the learning rate by the part of the budget that is spent:
            ``"constant"``, ``"cosine"`` (to zero), ``"tail"`` (constant to 60 %, then linear to
            zero) or a function of the part.
        callbacks: Functions that are called after each step with its record and the optimizer. A
            function that returns True ends the run.
        seed: Seed of the order of the examples, and of an engine that is made here.
        checkpoint: Folder for the state of the run, which is written at the end of each epoch and
            of the run.
        resume: Whether to continue from the state in ``checkpoint``, if there is one. The run then
            has the same bits as one without interruption, unless ``seconds`` bounds it.
        log: File for the records, each a line of JSON.
        checkpoint_every: Number of steps from one checkpoint to the next, in place of epochs.

    Returns:
        The trained engine, the optimizer and the records.

    Raises:
        InputError: An argument is wrong, or does not fit the others.
        UnknownNameError: An optimizer, a schedule or a metric has no such name.
        NonFiniteError: A batch yields NaN or infinity.
    """
    budget, factor = budget_of(epochs, steps, seconds), schedule_function(schedule)
    whole("batch_size", batch_size, least=1)
    whole("seed", seed, least=0)
    flag("resume", resume)
    texts("metrics", metrics, "('loss', 'accuracy')")
    for name in metrics:
        METRICS[name]  # an unknown name is an error before the run, not after an epoch
    chosen = _optimizer(model_or_engine, loss, optimizer, seed)
    axes = ExampleAxes(chosen.engine)
    batches = batches_of(data, axes, batch_size, seed)
    held_out = None if validation is None else validation_batches(validation, axes, batch_size)
    store = _Store(checkpoint, checkpoint_every, {"seed": seed, "batch_size": batch_size})
    position, records = store.restore(chosen) if resume else (Position(), [])
    run = _Run(chosen, batches, budget, factor, held_out, tuple(metrics))
    file = Log(log, records)
    for reached, record, ends in run.steps(position):
        records.append(record)
        stop = [callback(record, chosen) is True for callback in callbacks]
        if any(stop) and not ends.run:
            if not ends.epoch:
                record.update(run.evaluated())
            ends = _Ends(ends.epoch, True)
        file.add(record)
        if store.is_due(reached, ends):
            store.write(chosen, reached, records)
        if ends.run:
            break
    return History(chosen.engine, chosen, records)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Whether a step is the last step of an epoch or of the run.

    Attributes:
        epoch: Whether the step ends an epoch.
        run: Whether the step ends the run.
    """

    epoch: bool
    run: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """The parts of a run.

    Attributes:
        optimizer: Changes the parameters.
        batches: The data.
        budget: When the run ends.
        schedule: Factor of the learning rate.
        validation: Batches that are evaluated; None for no validation.
        metrics: What is evaluated.
    """

    optimizer: Optimizer
    batches: Batches
    budget: Budget
    schedule: ScheduleFunction
    validation: Sequence[Batch] | None
    metrics: tuple[str, ...]

    def steps(self, position: Position) -> Iterator[tuple[Position, Record, _Ends]]:
        """Train from a position to the end of the budget.

        Yields:
            After each step: the position, the record, and whether an epoch or the training ends.
        """
        start = perf_counter() - position.seconds
        per_epoch = self.batches.per_epoch
        spent = self.budget.spent(position, per_epoch)
        while spent < 1:
            for batch, is_last in _marked(self._rest_of_epoch(position)):
                scale = self.schedule(spent)
                report = self.optimizer.step(*batch, scale)
                position = replace(
                    position,
                    epoch=position.epoch + is_last,
                    batch=0 if is_last else position.batch + 1,
                    steps=position.steps + 1,
                    seconds=perf_counter() - start,
                )
                spent = self.budget.spent(position, per_epoch)
                record: Record = {
                    "step": position.steps,
                    "epoch": position.epoch - is_last,
                    "seconds": position.seconds,
                    "loss": report.loss,
                    "learning_rate": report.learning_rate,
                }
                if is_last or spent >= 1:
                    record.update(self.evaluated())
                yield position, record, _Ends(is_last, spent >= 1)
                if spent >= 1:
                    return

    def evaluated(self) -> Record:
        """Return the metrics on the validation data, by their names in records."""
        if self.validation is None:
            return {}
        values = self.optimizer.engine.evaluate(self.validation, metrics=self.metrics)
        return {"validation_loss" if name == "loss" else name: v for name, v in values.items()}

    def _rest_of_epoch(self, position: Position) -> Iterator[Batch]:
        """Return the batches of the epoch after those that the run has used."""
        remaining = iter(self.batches.epoch(position.epoch))
        for _ in range(position.batch):
            next(remaining, None)
        first = next(remaining, None)
        if first is None:
            raise InputError(
                "an epoch of the data has no batch left; an iterable must give batches each time."
            )
        yield first
        yield from remaining


class _Store:
    """The checkpoints of a run.

    Args:
        folder: Folder of the file; None for no checkpoints.
        every: Steps from one checkpoint to the next; None for epochs.
        options: Options that a resumed run must have, by name.
    """

    def __init__(
        self, folder: str | Path | None, every: int | None, options: Mapping[str, int]
    ) -> None:
        if every is not None:
            whole("checkpoint_every", every, least=1)
        self._every, self._options = every, options
        self._file = None if folder is None else checked_path(folder) / CHECKPOINT

    def is_due(self, position: Position, ends: _Ends) -> bool:
        """Return whether a checkpoint is written after a step."""
        periodic = ends.epoch if self._every is None else position.steps % self._every == 0
        return self._file is not None and (ends.run or periodic)

    def write(self, optimizer: Optimizer, position: Position, records: Sequence[Record]) -> None:
        """Write a checkpoint; the file is replaced whole or not at all."""
        assert self._file is not None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise InputError(
                f"cannot create the folder '{self._file.parent}': {failure.strerror}."
            ) from failure
        run = {
            "epoch": position.epoch,
            "batch": position.batch,
            "steps": position.steps,
            "seconds": position.seconds,
            "options": dict(self._options),
            "records": list(records),
        }
        optimizer.save_run(self._file, run)

    def restore(self, optimizer: Optimizer) -> tuple[Position, list[Record]]:
        """Load the checkpoint, if there is one; return the position and the records."""
        if self._file is None:
            raise InputError("resume=True needs the folder of the run: give checkpoint=FOLDER.")
        if not self._file.exists():
            return Position(), []
        run = optimizer.load_run(self._file, self._check)
        place = {name: run[name] for name in ("epoch", "batch", "steps", "seconds")}
        return Position(**place), list(run["records"])

    def _check(self, run: Mapping[str, Any]) -> None:
        """Refuse the state of a run with other options."""
        if "options" not in run:
            raise InputError(
                f"'{self._file}' is the state of an optimizer, not of fit; use optimizer.load."
            )
        for name, value in self._options.items():
            if run["options"].get(name) != value:
                raise InputError(
                    f"the run in '{self._file}' has {name}={run['options'].get(name)}, and this "
                    f"run has {name}={value}; resume with the same value."
                )


def _optimizer(
    source: ModelSource | Engine,
    loss: LossChoice | Sequence[LossChoice],
    optimizer: str | Optimizer,
    seed: int,
) -> Optimizer:
    """Return the optimizer of a run, with its engine."""
    if isinstance(optimizer, Optimizer):
        if optimizer.engine is not source:
            raise InputError(
                "the optimizer belongs to another engine; call fit(optimizer.engine, …)."
            )
        return optimizer
    if not isinstance(optimizer, str):
        raise InputError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)}, or an optimizer, got "
            f"{optimizer!r:.80}."
        )
    make = OPTIMIZERS[optimizer]
    if isinstance(source, Engine):
        return make(source)
    return make(Engine.from_onnx(source, loss=loss, seed=seed, gradient_dtype="float32"))


def _marked(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Return batches, each with whether it is the last one."""
    present = next(batches, None)
    while present is not None:
        following = next(batches, None)
        yield present, following is None
        present = following
