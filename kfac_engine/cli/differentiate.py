"""``differentiate``: the gradient of a model as a plain ONNX file."""

from pathlib import Path
from typing import Any

import click

from kfac_engine.cli.display import working
from kfac_engine.cli.options import (
    debug_option,
    file_path,
    keywords,
    objective_options,
    one_or_all,
    sample_option,
)

_OPTIONS = (
    click.option(
        "--loss",
        multiple=True,
        callback=one_or_all,
        help="Loss, by name; repeated, one an output. Without one a cotangent becomes an input.",
    ),
    click.option(
        "--output",
        multiple=True,
        callback=one_or_all,
        help="Value to differentiate, one for each loss; the model's own.",
    ),
    click.option(
        "--wrt",
        multiple=True,
        callback=one_or_all,
        metavar="PATTERN",
        help="Parameters and inputs to differentiate with respect to; may be repeated.",
    ),
    *objective_options,
)


@click.command
@click.argument("model", type=file_path)
@keywords(_OPTIONS)
@sample_option
@click.option("-o", "target", type=file_path, required=True, help="File to write.")
@debug_option
def differentiate(model: Path, options: dict[str, Any], inputs: Path | None, target: Path) -> None:
    """Write the gradient of a model as a plain ONNX model."""
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    with working("differentiating the model"):
        sample = None if inputs is None else read_inputs(inputs, model)
        gradient = ke.differentiate(model, **options, sample_inputs=sample, path=target)
    click.echo(f"in:  {', '.join(entry.name for entry in gradient.graph.input)}")
    click.echo(f"out: {', '.join(entry.name for entry in gradient.graph.output)}")
    click.echo(f"written to {target}")
