"""``differentiate``: the gradient of a model as a plain ONNX file."""

from pathlib import Path
from typing import Literal

import click

from kfac_engine.cli.display import working
from kfac_engine.cli.options import debug_option, file_path


@click.command
@click.argument("model", type=file_path)
@click.option("--loss", help="Loss, by name; without one a cotangent becomes an input.")
@click.option("--output", help="Value to differentiate; the only model output by default.")
@click.option(
    "--wrt",
    multiple=True,
    metavar="PATTERN",
    help="Parameters and inputs to differentiate with respect to; may be repeated.",
)
@click.option("--class-axis", default=-1, show_default=True, help="Axis of classes or features.")
@click.option(
    "--reduction",
    type=click.Choice(["mean", "batch_mean", "sum"]),
    default="mean",
    show_default=True,
    help="How the loss runs over examples and positions.",
)
@click.option("-o", "target", type=file_path, required=True, help="File to write.")
@debug_option
def differentiate(
    model: Path,
    loss: str | None,
    output: str | None,
    wrt: tuple[str, ...],
    class_axis: int,
    reduction: Literal["mean", "batch_mean", "sum"],
    target: Path,
) -> None:
    """Write the gradient of a model as an ONNX model of standard operators."""
    import kfac_engine as ke
    from kfac_engine.checkpoint import write_atomically
    from kfac_engine.graph.write import serialize

    with working("differentiating the model"):
        gradient = ke.differentiate(
            model, loss, output, wrt or None, class_axis=class_axis, reduction=reduction
        )
        write_atomically(target, serialize(gradient))
    click.echo(f"in:  {', '.join(entry.name for entry in gradient.graph.input)}")
    click.echo(f"out: {', '.join(entry.name for entry in gradient.graph.output)}")
    click.echo(f"written to {target}")
