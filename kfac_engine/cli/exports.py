"""``differentiate``, ``derivatives`` and ``export-training``: write derivatives as ONNX files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import MODEL, Option, command, count_option, output
from kfac_engine.cli.display import say, shown_warnings, working
from kfac_engine.cli.engine_options import LOSSES, engine_options
from kfac_engine.cli.options import chosen_losses, one_or_all, sample_option
from kfac_engine.cli.train import OPTIMIZERS

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.graph.write import ModelProto


# Fields of the options of an engine that the files depend on.
_NAMES = (
    "loss", "output", "class_axis", "reduction", "trainable", "freeze", "tie_weights",
    "batch_axes", "train_form",
)  # fmt: skip
# Those that the gradient of a model depends on, besides losses and outputs.
_OBJECTIVE = ("class_axis", "reduction", "freeze", "gradient_dtype", "batch_axes")
# A file cannot have the decomposition that GaussNewton needs.
_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name != "gauss_newton")
# What the targets of a written file are, and which of them have weights.
_WRITTEN = (
    Option("Loss", "--probabilities", is_flag=True,
        help="The targets of a softmax loss are probabilities in the shape of the logits."),
    Option("Loss", "--weights", type=click.Choice(("targets", "predictions", "examples")),
        help="Add an input with a weight for each entry of the targets, prediction or example; 0 "
        "leaves it out."),
    Option("Output", "--provider", type=click.Choice(("any", "webgpu")), default="any",
        help="webgpu: write convolutions and splits so that onnxruntime-web computes them on "
        "WebGPU."),
)  # fmt: skip
_OPTIONS = (
    Option("Optimizer", "--optimizer", type=click.Choice(_OPTIMIZERS), default="kfac",
        help="The optimizer."),
    Option("Optimizer", "--learning-rate", type=float,
        help="Learning rate; kfac has none. By default the optimizer's own."),
    Option("Optimizer", "--weight-decay", type=float,
        help="Weight decay; by default the optimizer's own."),
    count_option("Output", "--accumulate", default=1,
        help="Number of parts into which a step divides the batch, one after the other."),
    Option("Output", "--noise", type=click.Choice(("internal", "input")), default="internal",
        help="Whether the file draws the random numbers of kfac, or has an input for them."),
    *_WRITTEN,
)  # fmt: skip


@command(
    "Write the training step of a model as plain ONNX files.",
    "kfac-engine export-training mlp.onnx --optimizer kfac -o train",
    MODEL,
    sample_option,
    output("-o", "target", writes="folder", required=True,
        help="Folder of the files, created if needed."),
    options=(*_OPTIONS, *engine_options(*_NAMES)),
)  # fmt: skip
def run_export_training(
    model: Path, options: dict[str, Any], inputs: Path | None, target: Path
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    chosen = {name: value for name, value in options.items() if value is not None}
    with working("writing the training step"), shown_warnings():
        sample = read_inputs(inputs, model)
        files = ke.export_training(model, **chosen, sample_inputs=sample, path=target)
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


_GRADIENT_OPTIONS = (
    Option("Loss", "--loss", metavar="[OUTPUT=]LOSS", multiple=True, callback=chosen_losses,
        names=LOSSES,
        help="The loss, with options such as 'categorical(ignore_index=255)'; without a loss, the "
        "result has an input for the cotangent. May be repeated: the result is the gradient of "
        "the sum."),
    Option("Loss", "--output", metavar="NAME", multiple=True, callback=one_or_all,
        help="Value that is differentiated, one for each loss; by default the output from which "
        "no other output is computed."),
    Option("Model", "--wrt", multiple=True, callback=one_or_all, metavar="PATTERN",
        help="Name or pattern of parameters and inputs to differentiate with respect to; by "
        "default the trainable parameters."),
    *_WRITTEN,
)  # fmt: skip


@command(
    "Write the gradient of a model as a plain ONNX model.",
    "kfac-engine differentiate mlp.onnx --loss cross_entropy -o gradient.onnx",
    MODEL,
    sample_option,
    output("-o", "target", writes="model", required=True, help="File of the result (.onnx)."),
    options=(*_GRADIENT_OPTIONS, *engine_options(*_OBJECTIVE)),
)
def run_differentiate(
    model: Path, options: dict[str, Any], inputs: Path | None, target: Path
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    with working("differentiating the model"):
        sample = read_inputs(inputs, model)
        gradient = ke.differentiate(model, **options, sample_inputs=sample, path=target)
    _report_model(gradient, target, gradient.doc_string.splitlines())


def _names_of_each(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> list[list[str]]:
    return [value.split(",") for value in values]


_KINDS = (
    Option("Model", "--output", "outputs", metavar="NAME", multiple=True, callback=one_or_all,
        help="Output u to differentiate; by default all outputs that depend on the input."),
    Option("Output", "--jacobian", is_flag=True,
        help="Add 'jacobian of u', the derivatives by all features."),
    Option("Output", "--laplacian", is_flag=True,
        help="Add 'laplacian of u', the sum of second derivatives."),
    Option("Output", "--hessian", is_flag=True, help="Add 'hessian of u', all second derivatives."),
    Option("Output", "--directional", is_flag=True,
        help="Add the input 'direction', and 'first directional of u' and 'second directional of "
        "u', the derivatives along it."),
    Option("Output", "--selected", metavar="FEATURES", multiple=True, callback=_names_of_each,
        help="Add 'derivative of u by FEATURES': by one feature, as t, or by two, as x,x."),
)  # fmt: skip


@command(
    "Write derivatives of a model with respect to an input as a plain ONNX model.",
    "kfac-engine derivatives mlp.onnx --wrt image --jacobian -o jacobian.onnx",
    MODEL,
    Option("Model", "--wrt", required=True, metavar="INPUT[=NAMES]",
        help="Name of the input x to differentiate with respect to, of the shape (n, d), and "
        "names of its features, as x=t,y; by default numbers from zero."),
    sample_option,
    output("-o", "target", writes="model", required=True, help="File of the result (.onnx)."),
    options=_KINDS,
)  # fmt: skip
def run_derivatives(
    model: Path, wrt: str, options: dict[str, Any], inputs: Path | None, target: Path
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    with working("differentiating the model"), shown_warnings():
        sample = read_inputs(inputs, model)
        name, _, features = wrt.partition("=")
        named = {name: features.split(",")} if features else name
        result = ke.derivatives(model, named, **options, sample_inputs=sample, path=target)
    _report_model(result, target)


def _report_model(model: "ModelProto", target: Path, notes: Sequence[str] = ()) -> None:
    say(f"in:  {', '.join(entry.name for entry in model.graph.input)}")
    say(f"out: {', '.join(entry.name for entry in model.graph.output)}")
    for line in (*notes, f"written to {target}"):
        say(line)
