"""``saliency``: write the rise of the loss for each weight that would become zero."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfac_engine.cli.command import Command, Group, file_path
from kfac_engine.cli.curvature_files import curvature_option, read_curvature
from kfac_engine.cli.display import print_json, report_beside, say, show_shape, working
from kfac_engine.cli.options import debug_option, json_option, sample_option
from kfac_engine.cli.tables import print_table

if TYPE_CHECKING:
    from kfac_engine._types import Array


method_option = Group.PRUNING.option(
    "--method",
    metavar="NAME",
    default="obd",
    names=("analysis.pruning.saliency.METHODS",),
    help="Saliency of a weight: obd, the rise of the loss if it alone becomes zero; obs, the rise "
    "if the other weights of its block make up for it; or its magnitude.",
)
damping_option = Group.PRUNING.option(
    "--damping",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Damping λ, added to the Fisher matrix. obs needs a positive damping where the matrix is "
    "singular.",
)


@click.command(
    cls=Command,
    example="kfac-engine saliency mlp.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --method obd -o saliency.safetensors",
)
@click.argument("model", type=file_path)
@curvature_option
@sample_option
@method_option
@damping_option
@Group.OUTPUT.file("-o", "--out", required=True, help="File of the result (.safetensors).")
@json_option
@debug_option
def saliency(
    model: Path,
    curvature: Path,
    inputs: Path | None,
    method: str,
    damping: float,
    out: Path,
    as_json: bool,
) -> None:
    """Write the rise of the loss for each weight that becomes zero."""
    import kfac_engine as ke
    from kfac_engine.cli.files import check_files
    from kfac_engine.system.state_files import write_tensors

    check_files({"--out": out}, {"--curvature": curvature, "--inputs": inputs}, model)
    result = read_curvature(curvature, model, inputs)
    with working("computing saliencies"):
        scores = ke.saliency(result, method, damping)
        write_tensors(out, scores, {"method": method, "damping": repr(damping)})
    with report_beside(out):
        _report(scores, method, out, as_json)


def _report(scores: "Mapping[str, Array]", method: str, out: Path, as_json: bool) -> None:
    import numpy as np

    rows = {
        name: [float(value) for value in (array.sum(), np.median(array), array.max())]
        for name, array in scores.items()
    }
    heads = ("sum", "median", "largest")
    if as_json:
        parameters = {
            name: {"shape": list(scores[name].shape), **dict(zip(heads, numbers, strict=True))}
            for name, numbers in rows.items()
        }
        print_json({"method": method, "parameters": parameters, "out": str(out)})
        return
    print_table(
        f"saliencies by {method}",
        ("parameter", "shape", *(f" {head}" for head in heads)),
        [
            (name, show_shape(scores[name].shape), *(f"{number:.4g}" for number in numbers))
            for name, numbers in rows.items()
        ],
    )
    say("A saliency is the rise of the loss for an example, in nats, in the quadratic model.")
    say(f"written to {out}")
