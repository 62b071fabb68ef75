"""``export-training``: the training step of a model as plain ONNX files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Choice, Group, file_path
from kfac_engine.cli.display import report_beside, say, shown_warnings, working
from kfac_engine.cli.engine_options import EngineCommand
from kfac_engine.cli.options import (
    debug_option,
    keywords,
    provider_option,
    sample_option,
    target_options,
)
from kfac_engine.cli.train import OPTIMIZERS

if TYPE_CHECKING:
    import kfac_engine as ke

# Fields of the options of an engine that the files depend on.
_NAMES = (
    "loss", "output", "class_axis", "find_logits", "loss_weights", "reduction", "trainable",
    "ignore_index", "class_weights", "positive_weights", "label_smoothing", "freeze",
    "tie_weights", "batch_axes", "train_form",
)  # fmt: skip
_OPTIONS = (
    Group.OPTIMIZER.option(
        "--optimizer", type=Choice(OPTIMIZERS), default="kfac", help="The optimizer."
    ),
    Group.OPTIMIZER.option(
        "--learning-rate",
        type=float,
        help="Learning rate; kfac has none. By default the optimizer's own.",
    ),
    Group.OPTIMIZER.option(
        "--weight-decay", type=float, help="Weight decay; by default the optimizer's own."
    ),
    Group.OUTPUT.count(
        "--steps-per-call",
        default=1,
        help="Number of steps in a call; with more than one, inputs have a first axis of steps.",
    ),
    Group.OUTPUT.count(
        "--accumulate",
        default=1,
        help="Number of parts into which a step divides the batch, one after the other.",
    ),
    Group.OUTPUT.option(
        "--noise",
        type=Choice(("internal", "input")),
        default="internal",
        help="Whether the file draws the random numbers of kfac, or has an input for them.",
    ),
    *target_options,
    provider_option,
)


@click.command(
    "export-training",
    cls=EngineCommand,
    example="kfac-engine export-training mlp.onnx --optimizer kfac -o train",
    names=_NAMES,
)
@click.argument("model", type=file_path)
@keywords(*_OPTIONS)
@sample_option
@Group.OUTPUT.file("-o", "target", required=True, help="Folder of the files; created if needed.")
@debug_option
def export_training(
    model: Path, options: dict[str, Any], inputs: Path | None, target: Path
) -> None:
    """Write the training step of a model as plain ONNX files."""
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    chosen = {name: value for name, value in options.items() if value is not None}
    with working("writing the training step"), shown_warnings():
        sample = read_inputs(inputs, model)
        files = ke.export_training(model, **chosen, sample_inputs=sample, path=target)
    with report_beside(target):
        _report(files)


def _report(files: "ke.TrainingFiles") -> None:
    about = files.description
    weights = (name for name, _ in about.weights.values())
    names = (*about.inputs, *about.targets, *weights, "rate")
    say(f"a step of {about.optimizer}: {', '.join(names)}")
    say(f"out: {', '.join(about.metrics)}, and the new state")
    numbers = sum(array.nbytes for array in files.initial().values())
    say(f"state: {len(about.state)} arrays, {numbers / 1e6:.2f} MB")
    say(f"written to {files.folder}; README.md there has the loop")
