"""``replace-head``: edits of a model in its own form, written as another model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Command, Group, file_path
from kfac_engine.cli.display import report_beside, say, working
from kfac_engine.cli.options import debug_option, keywords

if TYPE_CHECKING:
    from kfac_engine.graph.write import ModelProto

model_option = Group.OUTPUT.file("-o", "--out", required=True, help="The new model (.onnx).")

_HEAD = (
    Group.MODEL.count("--classes", default=None, help="Number of classes of the new head."),
    Group.MODEL.count(
        "--outputs",
        default=None,
        help="Number of real outputs, in place of --classes; Softmax and Sigmoid after the head "
        "are removed.",
    ),
    Group.MODEL.option(
        "--at",
        metavar="VALUE",
        help="The value that the head reads; by default the head is the last dense layer.",
    ),
    Group.MODEL.count("--seed", default=0, least=0, help="Seed of the new weights."),
)


@click.command(
    "replace-head",
    cls=Command,
    example="kfac-engine replace-head mlp.onnx --classes 5 -o new.onnx",
)
@click.argument("model", type=file_path)
@keywords(*_HEAD)
@model_option
@debug_option
def replace_head(model: Path, options: dict[str, Any], out: Path) -> None:
    """Write a model whose last dense layer has new weights, for other classes."""
    import kfac_engine as ke
    from kfac_engine.cli.files import check_files, with_weights

    check_files(with_weights("--out", out), {}, model)
    with working("replacing the head"):
        edited = ke.replace_head(model, **options, path=out)
    with report_beside(out):
        _report(edited, "head.", out)


def _report(edited: "ModelProto", part: str, out: Path) -> None:
    """Print the new weights, whose names contain a text, and the outputs of a model."""
    from kfac_engine.summary import dimensions

    for entry in edited.graph.initializer:
        if part in entry.name:
            say(f"{entry.name}: {dimensions(entry.dims)}")
    say(f"outputs: {', '.join(entry.name for entry in edited.graph.output)}")
    say(f"written to {out}")
