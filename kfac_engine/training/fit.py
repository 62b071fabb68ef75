"""``fit``: trains a model on data, with validation, a log and checkpoints.

A run is a function of the seed, the data and the position: the order of the examples of an epoch
depends on the seed and the number of the epoch only. A resumed run therefore needs the position.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

from kfac_engine.arguments import check_bool, check_int, check_seed
from kfac_engine.datasets.files import files_of
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.datasets.forms import Data, refuse_separate_targets
from kfac_engine.datasets.shards import Share
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.engine.metrics import MetricChoice
from kfac_engine.engine.options import EngineOptions
from kfac_engine.engine.report import inference_notes
from kfac_engine.errors import (
    InferenceFormWarning,
    InputError,
    OverfittingWarning,
    UnknownNameError,
    suggestion,
    warn,
)
from kfac_engine.graph.load import ModelSource
from kfac_engine.registry import Registry
from kfac_engine.system.signals import DeferredSignals
from kfac_engine.system.writing import check_outputs, checked_path
from kfac_engine.training.batches import run_data
from kfac_engine.training.budget import Position, ScheduleFunction, budget_of, schedule_function
from kfac_engine.training.callbacks.best import VALIDATION_LOSS, BestWeights, EarlyStop
from kfac_engine.training.callbacks.log import Log
from kfac_engine.training.callbacks.progress import Progress
from kfac_engine.training.description import contents, describe, without_addresses
from kfac_engine.training.first_order import SGD, Adam, AdamW, Muon
from kfac_engine.training.gauss_newton import GaussNewton
from kfac_engine.training.history import History, Record
from kfac_engine.training.hooks import Callback, Hooks, StepFunction
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.recovery import Recovery
from kfac_engine.training.run import Run, Step, recorded_metrics
from kfac_engine.training.run_checkpoint import Options, RunCheckpoint

# Validations since the lowest loss, and the rise from it, that a run ends with a warning for.
_LONG, _RISEN = 5, 0.5


# Each takes an engine, and the options of the class.
OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry(
    "optimizer",
    {
        "kfac": KfacOptimizer,
        "gauss_newton": GaussNewton,
        "adam": Adam,
        "adamw": AdamW,
        "muon": Muon,
        "sgd": SGD,
    },
)


def fit(  # noqa: PLR0913 (the options of a run, one after the other)
    model_or_engine: ModelSource | Engine,
    data: Data,
    loss: LossChoices = "categorical",
    optimizer: str | Optimizer = "kfac",
    epochs: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    batch_size: int = 128,
    validation: Data | float | None = None,
    metrics: Sequence[MetricChoice] | None = ("loss",),
    schedule: str | ScheduleFunction = "tail",
    callbacks: Sequence[Callback | StepFunction] = (),
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    log: str | Path | None = None,
    *,
    accumulate: int = 1,
    checkpoint_every: int | None = None,
    rollbacks: int = 3,
    progress: bool = False,
    **options: Any,
) -> History:
    """Train a model on data.

    If the engine has a communicator of several processes, all of them call ``fit`` with the same
    arguments. Each trains on its share of the examples of each batch, and the results are the same
    as with one process. The first process writes the log and the checkpoints, and shows the
    progress. Callbacks run in every process, unless they write files (``Callback.on_every_rank``).
    Any number of processes can resume a run; the folder of the checkpoint must be visible to all of
    them.

    Args:
        model_or_engine: Path, bytes or ``ModelProto`` of a model, or an engine.
        data: All examples, as ``(inputs, targets)`` or ``(inputs, targets, weights)``, or as arrays
            by name with ``targets`` and, optionally, ``weights``; the path of an ``.npz`` file with
            such arrays, or of a folder of such files; or an iterable of batches that can be
            iterated again. Inputs are a dictionary of arrays by input name; a model of one input
            takes the array alone. ``weights`` say how much each target counts; see ``Weighted``.
        loss: Loss of the model. An engine already has its loss.
        optimizer: ``"kfac"``, ``"gauss_newton"``, ``"adam"``, ``"adamw"``, ``"muon"``, ``"sgd"``,
            or an optimizer of the engine.
        epochs: Bound of the number of epochs. Without any bound, the run has ten epochs.
        steps: Bound of the number of steps.
        seconds: Bound of the wall time, validation included.
        batch_size: Number of examples in a batch over all processes, for data that are not batches
            already. See ``accumulate``.
        validation: Data that are evaluated at the end of each epoch and of the run, in a form of
            ``data``; or the fraction of the examples that is split off for it.
        metrics: Metrics of ``Engine.evaluate`` for ``validation``: names or functions; None for the
            loss, and the accuracy where all targets are discrete.
        schedule: Factor of the learning rate by the part of the budget that is spent:
            ``"constant"``, ``"cosine"`` (to zero), ``"tail"`` (constant to 60 %, then linear to
            zero) or a function of the part.
        callbacks: Objects of ``Callback``, or functions that are called after each step with its
            record and the optimizer. A function that returns True ends the run.
        seed: Seed of the order of the examples, and of an engine that is made here.
        checkpoint: Folder for the state of the run, which is written at the end of each epoch and
            of the run. Ctrl-C and SIGTERM then end the run after the present step, with a
            checkpoint; a second signal ends it at once.
        resume: Whether to continue from the state in ``checkpoint``, if there is one. The run then
            gives bit by bit the results of an uninterrupted run, unless ``seconds`` bounds it.
        log: File of JSON lines: the description of the run, a record for each step, and the spectra
            of the factors after the last step.
        accumulate: Number of parts of a step, which are computed one after the other: only one part
            is in memory at a time. ``batch_size`` is the size of a part. A step has ``batch_size ·
            accumulate`` examples, the same as a run with batches of this size. If ``data`` is an
            iterable of batches, ``accumulate`` consecutive batches are the parts of a step.
        checkpoint_every: Number of steps from one checkpoint to the next, in place of epochs.
        rollbacks: How often the run returns to earlier parameters, with smaller steps, where the
            loss explodes; 0 for never.
        progress: Whether to show the progress on stderr: a bar on a terminal, lines elsewhere.
        options: Further arguments of the class of an optimizer that ``optimizer`` names, such as
            ``learning_rate`` and ``weight_decay``.

    Returns:
        The trained engine, the optimizer and the records.

    Raises:
        InputError: An argument is wrong, or does not fit the others.
        UnknownNameError: An optimizer, a schedule or a metric has no such name.
        NonFiniteError: A batch yields NaN or infinity.
        DivergenceError: The loss explodes after the last roll-back.
        RankError: Processes have different arguments or states, or another process has failed.

    Warns:
        DivergenceWarning: The loss exploded, and the run returned to earlier parameters.
        InferenceFormWarning: The model has normalizations or dropouts in inference form.
        OverfittingWarning: The last validation loss is more than 50 % above the lowest loss, which
            was at least five validations earlier, and no callback stops early or returns the best
            weights.
    """
    alone = Agreement(Alone())
    agreement = model_or_engine.passes.agreement if isinstance(model_or_engine, Engine) else alone
    share, is_first = Share(agreement.rank, agreement.communicator.size), agreement.rank == 0
    with agreement.operation("fit", ends=True):
        budget, factor = budget_of(epochs, steps, seconds), schedule_function(schedule)
        refuse_separate_targets(loss, "fit(model, (inputs, targets), …)")
        _check_plain(batch_size, accumulate, seed, resume=resume, progress=progress)
        hooks = Hooks(callbacks)
        chosen = _maker(optimizer, options, model_or_engine)(
            _engine(model_or_engine, data, loss, seed)
        )
        measured = recorded_metrics(metrics, chosen.engine)
        hooks.check_metrics(() if validation is None else measured)
        _warn_of(inference_notes(chosen.engine.passes.model) if is_first else ())
        sources = run_data(
            data, validation, chosen.engine.example_axes, batch_size, seed, share, accumulate
        )
        compared: Options = {
            "seed": seed, "batch_size": batch_size, "accumulate": accumulate,
            "examples": sources.examples,
        }  # fmt: skip
        rest = {**compared, "metrics": metrics, "schedule": schedule, "rollbacks": rollbacks}
        description = describe(chosen, asdict(budget) | rest)
        arguments = without_addresses(f"{description['settings']} {sources.train.per_epoch}")
        agreement.require_equal({"arguments of fit": arguments})
        if checkpoint is not None:
            compared |= contents(chosen.engine, sources)
        store = RunCheckpoint(checkpoint, checkpoint_every, compared, agreement)
        log = checked_path(log) if log is not None and is_first else None
        _check_files(log, store, chosen.engine, {"data": data, "validation": validation})
        recovery = Recovery(chosen, rollbacks)
        display = Progress(progress, budget.epochs)
        hooks.add([recovery, Log(log, description), display], agreement.rank)
        run = Run(
            chosen, sources.train, budget, factor, sources.validation, metrics, hooks, recovery
        )
        with store:
            position, records = _restored(run, store) if resume else (Position(), [])
            store.begin()
            with hooks:
                _train(run, position, records, store)
    _warn_of_rise(records if is_first else (), callbacks)
    return History(chosen.engine, chosen, records, description)


def _check_plain(batch_size: int, accumulate: int, seed: int, **flags: bool) -> None:
    check_int("batch_size", batch_size, least=1)
    check_int("accumulate", accumulate, least=1)
    check_seed(seed)
    for name, value in flags.items():
        check_bool(name, value)


def _warn_of(notes: Iterable[str]) -> None:
    for note in notes:
        warn(f"{note}.", InferenceFormWarning)


def _warn_of_rise(records: Sequence[Record], callbacks: Sequence[object]) -> None:
    """Warn if the validation loss has risen for long, and no callback cares for it."""
    if any(isinstance(callback, BestWeights | EarlyStop) for callback in callbacks):
        return
    validations = [record for record in records if VALIDATION_LOSS in record]
    losses = [float(record[VALIDATION_LOSS]) for record in validations]
    best = min(range(len(losses)), key=losses.__getitem__, default=0)
    if len(losses) - best <= _LONG or losses[-1] <= losses[best] + _RISEN * abs(losses[best]):
        return
    warn(
        f"the validation loss has risen from {losses[best]:.3g} in step "
        f"{validations[best]['step']} to {losses[-1]:.3g} in step {validations[-1]['step']}; "
        f"callbacks=[kfac_engine.BestWeights()] returns the best weights, and "
        f"kfac_engine.EarlyStop() ends such a run.",
        OverfittingWarning,
    )


def _check_files(
    log: Path | None, store: RunCheckpoint, engine: Engine, data: Mapping[str, object]
) -> None:
    """Refuse a log or a checkpoint in the place of a file that the run reads."""
    model = engine.passes.model.loaded.files
    read = {name: files_of(value) for name, value in data.items()}
    check_outputs(
        {"log": log, "the state of the checkpoint": store.state_file},
        {**read, "the model": model, "the records of the checkpoint": store.record_files},
        appended=("log",),
    )


def _restored(run: Run, store: RunCheckpoint) -> tuple[Position, list[Record]]:
    """Restore the state of a run; return its position and its records."""
    states = run.hooks.states(run.optimizer)
    position, records, parts = store.restore(run.optimizer, states)
    run.hooks.restore_all(parts)
    return position, records


def _train(run: Run, position: Position, records: list[Record], store: RunCheckpoint) -> None:
    """Train from a position to the end of the run, or to a signal; append the records.

    The validation of a run that ends inside an epoch comes after its checkpoint. A run that is
    resumed from there is then the run without an end, which has no validation in that step.
    """
    optimizer, hooks = run.optimizer, run.hooks
    with DeferredSignals(bool(store)) as signals:
        agreement = optimizer.engine.passes.agreement
        ended = agreement.any(hooks.on_run_start(optimizer, tuple(records)))
        step: Step | None = None
        for step in () if ended else run.steps(position):
            records.append(step.record)
            stops = hooks.on_step_end(step.record, optimizer)
            if step.ends_epoch:
                stops |= hooks.on_epoch_end(step.record, optimizer)
            ends = agreement.any(stops) or step.ends_run
            # A signal that one process has received ends all of them.
            received = int(agreement.of_all(signals.received or 0).max())
            if received:
                signals.received = received
            if ends or received or store.is_due(step.position, step.ends_epoch):
                store.write(optimizer, step.position, records, hooks.states(optimizer))
            if ends and not (step.ends_epoch or received):
                run.evaluate(step.record)
            hooks.on_record(step.record, optimizer)
            if ends or received:
                break
        if step is None and position.batch:  # a run that has ended before
            run.evaluate(records[-1])
    hooks.on_run_end(optimizer, tuple(records))


def _maker(
    optimizer: str | Optimizer, options: Mapping[str, Any], source: ModelSource | Engine
) -> Callable[[Engine], Optimizer]:
    """Return a function from the engine of a run to its optimizer."""
    if not isinstance(optimizer, Optimizer):
        return optimizer_by_name(optimizer, options, "fit", signature(fit).parameters)
    if optimizer.engine is not source:
        raise InputError("the optimizer belongs to another engine; call fit(optimizer.engine, …).")
    if options:
        raise InputError(f"the optimizer has its options already; leave out: {', '.join(options)}.")
    return lambda engine: optimizer


def optimizer_by_name(
    name: str, options: Mapping[str, Any], call: str, others: Collection[str] = ()
) -> Callable[[Engine], Optimizer]:
    """Return a function from an engine to an optimizer, after a check of its name and options.

    Args:
        name: A name of ``OPTIMIZERS``.
        options: Arguments of the class of the optimizer.
        call: What has the options, for messages.
        others: Names of other arguments of the call, which may be meant.

    Returns:
        The function.

    Raises:
        InputError: The name is not text.
        UnknownNameError: There is no such optimizer or option.
    """
    if not isinstance(name, str):
        raise InputError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)}, or an optimizer, got {name!r:.80}."
        )
    make = OPTIMIZERS[name]
    known = list(signature(make).parameters)[1:]
    for option in options:
        if option not in known:
            of_engine = option in signature(EngineOptions).parameters
            near = suggestion(option, [*known, *others])
            advice = (
                "; it is an option of Engine.from_onnx: pass an engine in place of the model"
                if of_engine
                else near or f"; the options of '{name}' are: {', '.join(known)}"
            )
            raise UnknownNameError(f"{call} has no option '{option}'{advice}.")
    return lambda engine: make(engine, **options)


def _engine(
    source: ModelSource | Engine,
    data: Data,
    loss: LossChoices,
    seed: int,
) -> Engine:
    """Return the engine of a run."""
    if isinstance(source, Engine):
        return source
    _, sample = with_first_examples(source, data)
    return Engine.from_onnx(
        source, loss=loss, seed=seed, gradient_dtype="float32", sample_inputs=sample
    )
