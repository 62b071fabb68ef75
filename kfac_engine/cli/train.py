"""``train`` and ``report``: train a model, and draw the log."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from inspect import signature
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import (
    MODEL,
    Option,
    command,
    count_option,
    file_option,
    file_path,
    output,
)
from kfac_engine.cli.display import print_json, say, shown_warnings, tell, working
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.cli.interruption import Invocation, SignalReceived
from kfac_engine.cli.options import json_option, labeled_data, number_or, one_or_more
from kfac_engine.distributed.job import launched_by_mpi
from kfac_engine.errors import InferenceFormWarning, InputError
from kfac_engine.printable import printable
from kfac_engine.system.writing import check_outputs

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.training.hooks import Callback
    from kfac_engine.training.optimizer import Optimizer


OPTIMIZERS = ("kfac", "gauss_newton", "adam", "adamw", "muon", "sgd")
SCHEDULES = ("tail", "cosine", "constant")
# Fields of an engine's options that the command sets itself: an optimizer needs parameters in
# single precision, and K-FAC sets the damping of the engine.
SET_HERE = ("damping", "gradient_dtype")


def _callbacks(choices: SimpleNamespace) -> "Iterator[Callback]":
    """Yield the callbacks of a run."""
    import kfac_engine as ke

    if choices.early_stop is not None:
        yield ke.EarlyStop(choices.best or "validation_loss", choices.early_stop)
    if choices.decay is not None:
        yield ke.WeightAverage(choices.decay)
    if choices.best is not None:
        yield ke.BestWeights(choices.best)
    if choices.tensorboard is not None:
        yield ke.TensorBoard(choices.tensorboard)


_CHOICES = (
    count_option("Length of the run", "--early-stop", metavar="N",
        help="End the run after N validations in a row that do not improve the metric of --best, "
        "by default validation_loss."),
    Option("Validation", "--best", metavar="METRIC",
        help="Write the weights of the validation with the best metric, such as validation_loss, "
        "not the last step's weights."),
    Option("Validation", "--average", "decay", metavar="DECAY|tail", callback=number_or(str),
        help="Evaluate and write an average of the weights: an exponential average with a decay "
        "such as 0.99, or the mean over the last 40 % of the run."),
    output("--tensorboard", writes="folder", metavar="DIR",
        help="Folder for event files of TensorBoard; needs the extra tensorboard."),
)  # fmt: skip


_FILES = (
    *labeled_data("--data"),
    Option("Validation", "--validation", metavar="FILE|FRACTION", callback=number_or(Path),
        help="Data to evaluate after each epoch, as for --data; or the fraction of --data to split "
        "off, such as 0.1."),
    file_option("Checkpoints", "--checkpoint", writes="folder",
        help="Folder for the state of the run, to resume from."),
    output("--log", writes="log", help="File for a line of JSON for each step."),
    output("--report", help="File for a page with the charts of the run (.html)."),
    file_option("Data", "--inputs",
        help="Batch from which shapes and sequence lengths are inferred, .npz or .npy; the first "
        "examples of --data by default."),
    output("-o", "--out", writes="model", required=True, help="The trained model (.onnx)."),
)  # fmt: skip
_UPDATE = (
    Option("Optimizer", "--optimizer", type=click.Choice(OPTIMIZERS), default=OPTIMIZERS[0],
        help="The optimizer."),
    Option("Optimizer", "--learning-rate", type=float,
        help="Learning rate; by default the optimizer's own."),
    Option("Optimizer", "--damping", type=float,
        help="Damping for kfac and gauss_newton. Without --learning-rate, kfac's damping is "
        "relative to the mean eigenvalue of each block, and 0.1 by default."),
    Option("Optimizer", "--weight-decay", type=float,
        help="Weight decay; by default the optimizer's own."),
    Option("Refreshes of the inverses, with --optimizer kfac", "--refresh-every", type=int,
        help="Number of steps from one refresh of a factor to the next."),
)  # fmt: skip
_COURSE = (
    count_option("Length of the run", "--epochs",
        help="Largest number of epochs; 10 without a budget."),
    count_option("Length of the run", "--steps", help="Largest number of steps."),
    Option("Length of the run", "--seconds", type=float, help="Largest time, validation included."),
    count_option("Optimizer", "--batch-size", default=128,
        help="Examples in a batch, or in a part of it with --accumulate."),
    count_option("Optimizer", "--accumulate", default=1, metavar="PARTS",
        help="Parts of a step, computed one after the other: the step equals the step of a "
        "batch of PARTS times --batch-size examples, in the memory of one part."),
    Option("Optimizer", "--schedule", type=click.Choice(SCHEDULES), default=SCHEDULES[0],
        help="Factor of the learning rate: constant to 60 % of the run and then linear to zero, a "
        "cosine, or constant."),
    Option("Validation", "--metrics", metavar="NAME", multiple=True, callback=one_or_more,
        names=("engine.metrics.METRICS",),
        help="Metric of --validation; by default the loss, and the accuracy of classes. top5 may "
        "have another number."),
    count_option("Checkpoints", "--checkpoint-every", metavar="STEPS",
        help="Steps from one checkpoint to the next; by default epochs."),
    count_option("Checkpoints", "--rollbacks", least=0, metavar="N", default=3,
        help="Largest number of returns to earlier parameters if the loss explodes."),
    Option("Checkpoints", "--resume", is_flag=True,
        help="Continue from --checkpoint, if it has a state."),
)  # fmt: skip


_DISTRIBUTION = Option(
    "Machine",
    "--distribution",
    type=click.Choice(("replicate", "shard")),
    help="Division of the curvature among the processes of mpirun: each stores all inverses, "
    "or the inverses of its layers. By default replicate.",
)


@contextmanager
def _among_processes(options: dict[str, Any]) -> Iterator[None]:
    """Return a context in which the command is one of the processes of an MPI job.

    An error of one process becomes an error of all. Only the first process prints. ``options`` has
    the distribution and receives the communicator.
    """
    distribution = options.pop("distribution")
    if distribution is None and not launched_by_mpi():
        yield
        return
    from kfac_engine.distributed.agreement import Agreement
    from kfac_engine.distributed.mpi import over_mpi

    communicator = over_mpi()
    options |= {"communicator": communicator, "distribution": distribution or "replicate"}
    with Agreement(communicator).operation("command"), ExitStack() as silence:
        if communicator.rank:
            silence.enter_context(redirect_stdout(None))
            silence.enter_context(redirect_stderr(None))
        yield


@command(
    "Train a model, and write it with its new weights.\n\n"
    "Of several processes that mpirun starts, each trains on its share of every batch.",
    "kfac-engine train mlp.onnx --data digits.npz --validation 0.1 \\\n"
    "  --epochs 3 --log run.jsonl -o trained.onnx",
    MODEL,
    json_option,
    files=_FILES,
    update=_UPDATE,
    course=_COURSE,
    choices=_CHOICES,
    around=_among_processes,
    options=(_DISTRIBUTION, *engine_options(without=SET_HERE)),
)
def train(
    model: Path,
    files: SimpleNamespace,
    update: SimpleNamespace,
    course: SimpleNamespace,
    choices: SimpleNamespace,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs
    from kfac_engine.datasets.first_examples import with_first_examples
    from kfac_engine.engine.report import inference_notes

    _check_checkpoint(files, resume=course.resume)
    with working("preparing the model"), shown_warnings():
        if files.inputs is not None:
            sample = read_inputs(files.inputs, model)
        else:
            _, sample = with_first_examples(model, _data(files), options["batch_axes"])
        engine = ke.Engine.from_onnx(
            model, sample_inputs=sample, gradient_dtype="float32", **options
        )
        optimizer = _optimizer(engine, **vars(update))
    for note in inference_notes(engine.passes.model):
        tell("note", f"{printable(note)}.")
    history = _fit(optimizer, files, course, options["seed"], list(_callbacks(choices)))
    with working("writing the model"):
        engine.export(files.out)
        if files.report is not None and engine.passes.agreement.rank == 0:
            ke.report(history, files.report)
    _report(history, files.out, as_json)


def _data(files: SimpleNamespace) -> Any:
    return files.data if files.targets is None else (files.data, files.targets)


def _check_checkpoint(files: SimpleNamespace, *, resume: bool) -> None:
    """Refuse to overwrite the checkpoint by another file, or by another run."""
    from kfac_engine.training.run_checkpoint import RunCheckpoint

    checkpoint = RunCheckpoint(files.checkpoint)
    written = {"--out": files.out, "--log": files.log, "--report": files.report}
    check_outputs(
        {"the state in --checkpoint": checkpoint.state_file, **written},
        {"the records in --checkpoint": checkpoint.record_files},
        appended=("--log",),
    )
    if not resume and checkpoint.exists():
        raise InputError(
            f"'{files.checkpoint}' has the checkpoint of a run; give --resume to continue it, or "
            f"name another folder."
        )


def _optimizer(engine: "ke.Engine", optimizer: str, **values: Any) -> "Optimizer":
    """Return an optimizer with the options that are given; refuse those that it does not take."""
    from kfac_engine.training.fit import OPTIMIZERS

    chosen = {name: value for name, value in values.items() if value is not None}
    takes = {name: signature(make).parameters for name, make in OPTIMIZERS.items()}
    for option in chosen:
        if option not in takes[optimizer]:
            others = ", ".join(name for name, known in takes.items() if option in known)
            flag = f"--{option.replace('_', '-')}"
            raise InputError(f"{flag} belongs to {others}; {optimizer} has no such option.")
    return OPTIMIZERS[optimizer](engine, **chosen)


def _fit(
    optimizer: "Optimizer",
    files: SimpleNamespace,
    course: SimpleNamespace,
    seed: int,
    callbacks: "list[Callback]",
) -> "ke.History":
    import kfac_engine as ke

    invocation = click.get_current_context().ensure_object(Invocation)
    if files.checkpoint is not None:
        callbacks.append(_patience(invocation))
    try:
        with shown_warnings():
            warnings.simplefilter("ignore", InferenceFormWarning)
            return ke.fit(
                optimizer.engine,
                _data(files),
                optimizer=optimizer,
                validation=files.validation,
                callbacks=callbacks,
                seed=seed,
                checkpoint=files.checkpoint,
                log=files.log,
                progress=True,
                **vars(course),
            )
    except SignalReceived:
        invocation.advice = _advice(files)
        raise


def _patience(invocation: Invocation) -> "Callback":
    """Return a callback that lets a run write its checkpoint after the first signal."""
    from kfac_engine.training.hooks import Callback

    class Patience(Callback):
        def on_run_start(self, *_: object) -> None:
            invocation.patient = True

        def close(self) -> None:
            invocation.patient = False

    return Patience()


def _advice(files: SimpleNamespace) -> str:
    """Return how a run continues after a signal, or why it does not."""
    from kfac_engine.training.run_checkpoint import RunCheckpoint

    if files.checkpoint is None:
        return "nothing is written, because the run has no --checkpoint"
    if not RunCheckpoint(files.checkpoint).exists():
        return "the run has no checkpoint yet"
    return f"the same command with --resume continues from '{files.checkpoint}'"


def _report(history: "ke.History", path: Path, as_json: bool) -> None:
    last = history.records[-1]
    if as_json:
        entries = ("step", "epoch", "seconds", "loss", "best_step")
        numbers = {name: last[name] for name in entries if name in last}
        finite = {n: v if isfinite(v) else None for n, v in {**numbers, **history.metrics}.items()}
        print_json({**finite, "out": str(path)})
        return
    for name, value in history.metrics.items():
        say(f"{name} {value:.6g}")
    if "best_step" in last:
        say(f"weights of step {last['best_step']} of {last['step']}")
    say(f"written to {path}")


@command(
    "Write a page with the charts and tables of a training run.",
    "kfac-engine report run.jsonl -o run.html",
    click.Argument(["log"], type=file_path),
    output("-o", "--out", required=True, help="File of the page (.html)."),
)
def run_report(log: Path, out: Path) -> None:
    import kfac_engine as ke

    ke.report(log, out)
    say(f"wrote {out}")
