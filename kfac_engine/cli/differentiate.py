"""``differentiate``: the gradient of a model as a plain ONNX file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Group, file_path
from kfac_engine.cli.display import report_beside, say, working
from kfac_engine.cli.engine_options import LOSSES, OBJECTIVE, EngineCommand
from kfac_engine.cli.options import (
    by_output,
    debug_option,
    keywords,
    one_or_all,
    provider_option,
    sample_option,
    target_options,
)

if TYPE_CHECKING:
    from kfac_engine.graph.write import ModelProto

_OPTIONS = (
    Group.LOSS.option(
        "--loss",
        metavar="[OUTPUT=]NAME",
        multiple=True,
        callback=by_output,
        names=LOSSES,
        help="Name of the loss; without a loss, the result has an input for the cotangent. May be "
        "repeated: the result is the gradient of the sum.",
    ),
    Group.LOSS.option(
        "--output",
        metavar="NAME",
        multiple=True,
        callback=one_or_all,
        help="Value that is differentiated, one for each loss; by default the output from which "
        "no other is computed.",
    ),
    Group.MODEL.option(
        "--wrt",
        multiple=True,
        callback=one_or_all,
        metavar="PATTERN",
        help="Name or pattern of parameters and inputs to differentiate with respect to; by "
        "default the trainable parameters. May be repeated.",
    ),
    *target_options,
    provider_option,
)


@click.command(
    cls=EngineCommand,
    example="kfac-engine differentiate mlp.onnx --loss cross_entropy -o gradient.onnx",
    names=OBJECTIVE,
)
@click.argument("model", type=file_path)
@keywords(*_OPTIONS)
@sample_option
@Group.OUTPUT.file("-o", "target", required=True, help="File of the result (.onnx).")
@debug_option
def differentiate(model: Path, options: dict[str, Any], inputs: Path | None, target: Path) -> None:
    """Write the gradient of a model as a plain ONNX model."""
    import kfac_engine as ke
    from kfac_engine.cli.files import check_files, read_inputs, with_weights

    check_files(with_weights("-o", target), {"--inputs": inputs}, model)

    with working("differentiating the model"):
        sample = read_inputs(inputs, model)
        gradient = ke.differentiate(model, **options, sample_inputs=sample, path=target)
    with report_beside(target):
        _report(gradient, target)


def _report(gradient: "ModelProto", target: Path) -> None:
    say(f"in:  {', '.join(entry.name for entry in gradient.graph.input)}")
    say(f"out: {', '.join(entry.name for entry in gradient.graph.output)}")
    for line in gradient.doc_string.splitlines():
        say(line)
    say(f"written to {target}")
