"""``differentiate``: the gradient of a model as a plain ONNX file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from kfac_engine.cli.display import working
from kfac_engine.cli.options import (
    debug_option,
    file_path,
    gathered,
    objective_options,
    sample_option,
)


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """What is differentiated: the arguments of ``differentiate``."""

    loss: tuple[str, ...]
    output: tuple[str, ...]
    loss_weight: tuple[float, ...]
    find_logits: bool
    wrt: tuple[str, ...]
    class_axis: int
    reduction: Literal["mean", "batch_mean", "sum"]
    gradient_dtype: Literal["file", "float32"]


_OPTIONS = (
    click.option(
        "--loss",
        multiple=True,
        help="Loss, by name; repeated, one an output. Without one a cotangent becomes an input.",
    ),
    click.option(
        "--output",
        multiple=True,
        help="Value to differentiate, one for each loss; the model's own.",
    ),
    click.option(
        "--wrt",
        multiple=True,
        metavar="PATTERN",
        help="Parameters and inputs to differentiate with respect to; may be repeated.",
    ),
    *objective_options,
)


@click.command
@click.argument("model", type=file_path)
@gathered("options", GradientOptions, _OPTIONS)
@sample_option
@click.option("-o", "target", type=file_path, required=True, help="File to write.")
@debug_option
def differentiate(model: Path, options: GradientOptions, inputs: Path | None, target: Path) -> None:
    """Write the gradient of a model as a plain ONNX model."""
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    with working("differentiating the model"):
        sample = None if inputs is None else read_inputs(inputs, model)
        gradient = ke.differentiate(
            model,
            _one_or_all(options.loss),
            _one_or_all(options.output),
            options.wrt or None,
            class_axis=options.class_axis,
            find_logits=options.find_logits,
            loss_weights=options.loss_weight or None,
            reduction=options.reduction,
            gradient_dtype=options.gradient_dtype,
            sample_inputs=sample,
            path=target,
        )
    click.echo(f"in:  {', '.join(entry.name for entry in gradient.graph.input)}")
    click.echo(f"out: {', '.join(entry.name for entry in gradient.graph.output)}")
    click.echo(f"written to {target}")


def _one_or_all(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The only name, several, or none."""
    return names[0] if len(names) == 1 else names or None
