"""``prune``: write a model whose weights of small saliency are zero."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Command, Group, file_path
from kfac_engine.cli.curvature_files import curvature_option, read_curvature
from kfac_engine.cli.display import print_json, report_beside, say, show_shape, working
from kfac_engine.cli.options import (
    debug_option,
    json_option,
    keywords,
    one_or_more,
    sample_option,
)
from kfac_engine.cli.saliency import damping_option, method_option
from kfac_engine.cli.tables import print_table

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine._types import Array

_SELECTION = (
    Group.PRUNING.option(
        "--sparsity", type=float, help="Fraction of the chosen weights to set to zero, in [0, 1)."
    ),
    Group.PRUNING.option("--count", type=int, help="Number of weights to set to zero."),
    Group.PRUNING.option(
        "--pattern",
        metavar="N:M",
        help="Largest number of nonzero weights among consecutive inputs of a layer, such as 2:4.",
    ),
    method_option,
    damping_option,
    Group.PRUNING.option(
        "--parameters",
        metavar="PATTERN",
        multiple=True,
        callback=one_or_more,
        help="Name or pattern of parameters to prune; by default the weights of all layers. May "
        "be repeated.",
    ),
)


@click.command(
    cls=Command,
    example="kfac-engine prune mlp.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --sparsity 0.5 -o pruned.onnx",
)
@click.argument("model", type=file_path)
@curvature_option
@sample_option
@keywords(*_SELECTION)
@Group.OUTPUT.file("-o", "--out", required=True, help="The pruned model (.onnx).")
@json_option
@debug_option
def prune(
    model: Path,
    curvature: Path,
    inputs: Path | None,
    options: dict[str, Any],
    out: Path,
    as_json: bool,
) -> None:
    """Write a model whose weights of small saliency are zero."""
    import kfac_engine as ke
    from kfac_engine.cli.files import check_files, with_weights

    check_files(with_weights("--out", out), {"--curvature": curvature, "--inputs": inputs}, model)
    result = read_curvature(curvature, model, inputs)
    with working("pruning"):
        pruned = ke.prune(result, **options)
        rise = _rise(result, pruned)
    with working("writing the model"):
        result.model.set_parameters(pruned)
        result.model.export(out)
    with report_beside(out):
        _report(pruned, rise, options, out, as_json)


def _rise(curvature: "ke.Curvature", pruned: "Mapping[str, Array]") -> float:
    """Return ``½ δᵀ F δ`` of the change ``δ`` of the parameters."""
    import numpy as np

    before = curvature.parameters
    step = {name: array.astype(np.float64) - before[name] for name, array in pruned.items()}
    product = curvature.multiply(step)
    return 0.5 * float(sum((array * product[name]).sum() for name, array in step.items()))


def _report(
    pruned: "Mapping[str, Array]", rise: float, options: Mapping[str, Any], out: Path, as_json: bool
) -> None:
    zeros = {name: int((array == 0).sum()) for name, array in pruned.items()}
    if as_json:
        parameters = {
            name: {"shape": list(array.shape), "zeros": zeros[name]}
            for name, array in pruned.items()
        }
        print_json(
            {"method": options["method"], "rise": rise, "parameters": parameters, "out": str(out)}
        )
        return
    total = sum(array.size for array in pruned.values())
    rows = [
        (name, show_shape(array.shape), f"{zeros[name]:,}", _percent(zeros[name], array.size))
        for name, array in pruned.items()
    ]
    rows.append(
        ("all", f"{total:,}", f"{sum(zeros.values()):,}", _percent(sum(zeros.values()), total))
    )
    print_table(f"zeros by {options['method']}", ("parameter", "shape", " zeros", " share"), rows)
    say(f"rise of the loss in its quadratic model: {rise:.4g} nats for an example")
    say(f"written to {out}")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
