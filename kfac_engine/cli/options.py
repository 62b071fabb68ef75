"""Defines options that several commands share, and options for several processes."""

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Group, Option
from kfac_engine.cli.display import shown_warnings, working

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.engine.loss_bindings import LossChoice, LossChoices


json_option = Group.OUTPUT.option(
    "--json", "as_json", is_flag=True, help="Print the report as JSON."
)


def _sample_option(default: str) -> Option:
    return Group.DATA.file(
        "--inputs",
        help=f"Batch from which shapes and sequence lengths are inferred, .npz or .npy; {default} "
        "by default.",
    )


sample_option = _sample_option("generated")
# Of a command with ``labeled_data``.
data_sample_option = _sample_option("the first examples of --data")


def labeled_data(flag: str, what: str = "Data") -> tuple[Option, Option]:
    """Return the options of inputs with their targets, in one file or two."""
    return (
        Group.DATA.file(
            flag,
            required=True,
            help=f"{what}: .npz with the inputs by name and 'targets', or a folder of such files. "
            "With --targets: the inputs, .npz or .npy.",
        ),
        Group.DATA.file("--targets", help="Targets in a separate file, .npz or .npy."),
    )


provider_option = Group.OUTPUT.option(
    "--provider",
    type=click.Choice(("any", "webgpu")),
    default="any",
    help="webgpu: write convolutions and splits so that onnxruntime-web computes them on WebGPU.",
)


# What the targets of a written file are, and which of them have weights.
target_options = (
    Group.LOSS.option(
        "--probabilities", is_flag=True,
        help="The targets of a softmax loss are probabilities in the shape of the logits."),
    Group.LOSS.option(
        "--weights", type=click.Choice(("targets", "predictions", "examples")),
        help="Add an input with a weight for each entry of the targets, prediction or example; 0 "
        "leaves it out."),
)  # fmt: skip


def one_or_all(
    _: click.Context, __: click.Parameter, values: tuple[Any, ...]
) -> str | tuple[Any, ...] | None:
    """Return the only value, a tuple of several, or None if the option was not given."""
    return values[0] if len(values) == 1 else values or None


# A loss by name, with options in brackets and the output that has it.
_LOSS = re.compile(r"(?:(?P<output>.*?)=)?(?P<loss>\w+(?:\(.*\))?)", re.S)


def chosen_losses(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> "LossChoices | None":
    """Return losses, or for values OUTPUT=LOSS a map from outputs to losses."""
    matches = [_LOSS.fullmatch(value) for value in values]
    outputs = [match["output"] if match else None for match in matches]
    if not any(match and match["output"] is not None for match in matches):
        return one_or_all(context, parameter, tuple(_loss(value) for value in values))
    if not all(outputs):
        raise click.BadParameter(
            f"expected LOSS or OUTPUT=LOSS in all of them, such as 'box*=normal'; got "
            f"{', '.join(values)}."
        )
    if len(set(outputs)) < len(outputs):
        raise click.BadParameter(f"an output is given twice: {', '.join(values)}.")
    return {str(m["output"]): _loss(m["loss"]) for m in matches if m}


def _loss(text: str) -> "LossChoice":
    """Return a loss of a text such as ``categorical(ignore_index=255)``, or a name as it is.

    Values are literals of Python. A text is the name of a file with numbers, such as
    ``class_weights='weights.npy'``.
    """
    name, bracket, _ = text.partition("(")
    if not bracket:
        return name
    from kfac_engine.datasets.files import numbers_in
    from kfac_engine.losses.kinds import loss_named

    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError(text)
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
        if len(options) < len(call.keywords):
            raise ValueError(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise click.BadParameter(
            f"expected NAME or NAME(OPTION=VALUE, …), such as categorical(ignore_index=255, "
            f"label_smoothing=0.1); got {text:.80}."
        ) from failure
    files = {option: numbers_in(v) for option, v in options.items() if isinstance(v, str)}
    return loss_named(name, **{**options, **files})


def one_or_more(
    _: click.Context, __: click.Parameter, values: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Return the values, or None if the option was not given."""
    return values or None


curvature_option = Group.DATA.file(
    "--curvature",
    required=True,
    help="Curvature of the model, a file that the command curvature wrote.",
)

batch_option = Group.DATA.count(
    "--batch-size",
    help="Number of examples in a batch, 128 by default. The result does not depend on it.",
)


def read_curvature(path: Path, model: Path, sample: Path | None = None) -> "ke.Curvature":
    """Return the curvature in a file.

    ``model`` is the file of the model with the weights that were measured, and ``sample`` a file
    with a batch from which shapes are inferred. ``InputError`` is raised if a file is wrong, or if
    the model has other weights.
    """
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    with working("reading the curvature"), shown_warnings():
        inputs = read_inputs(sample, model)
        return ke.Curvature.load(path, model, sample_inputs=inputs)
