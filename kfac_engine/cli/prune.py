"""``saliency`` and ``prune``: find weights that hardly change the loss, and remove them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import MODEL, Option, command, output
from kfac_engine.cli.display import print_json, print_table, say, working
from kfac_engine.cli.options import (
    curvature_option,
    json_option,
    one_or_more,
    read_curvature,
    sample_option,
)
from kfac_engine.summary import dimensions

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine._types import Array


_SALIENCY = (
    Option("Pruning", "--method", metavar="NAME", default="obd",
        names=("analysis.pruning.pruning.METHODS",),
        help="Saliency of a weight: obd, the rise of the loss if only this weight becomes zero; "
        "obs, the rise if the other weights of its block compensate for it; or its magnitude."),
    Option("Pruning", "--damping", type=click.FloatRange(min=0), default=0.0,
        help="Damping λ, added to the Fisher matrix. obs needs a positive damping where the matrix "
        "is singular."),
)  # fmt: skip


@command(
    "Write the rise of the loss for each weight that becomes zero.",
    "kfac-engine saliency mlp.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --method obd -o saliency.safetensors",
    MODEL,
    curvature_option,
    sample_option,
    output("-o", "--out", required=True, help="File of the result (.safetensors)."),
    json_option,
    options=_SALIENCY,
)
def run_saliency(
    model: Path,
    curvature: Path,
    inputs: Path | None,
    options: dict[str, Any],
    out: Path,
    as_json: bool,
) -> None:
    import kfac_engine as ke
    from kfac_engine.system.state_files import write_tensors

    result = read_curvature(curvature, model, inputs)
    with working("computing saliencies"):
        scores = ke.saliency(result, **options)
        write_tensors(out, scores, {name: f"{value}" for name, value in options.items()})
    _report_scores(scores, options["method"], out, as_json)


def _report_scores(scores: "Mapping[str, Array]", method: str, out: Path, as_json: bool) -> None:
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
            (name, dimensions(scores[name].shape), *(f"{number:.4g}" for number in numbers))
            for name, numbers in rows.items()
        ],
    )
    say("A saliency is the rise of the loss for an example, in nats, in the quadratic model.")
    say(f"written to {out}")


_SELECTION = (
    Option("Pruning", "--sparsity", type=float,
        help="Fraction of the chosen weights to set to zero, in [0, 1)."),
    Option("Pruning", "--count", type=int, help="Number of weights to set to zero."),
    Option("Pruning", "--pattern", metavar="N:M",
        help="Largest number of nonzero weights among consecutive inputs of a layer, such as 2:4."),
    *_SALIENCY,
    Option("Pruning", "--parameters", metavar="PATTERN", multiple=True, callback=one_or_more,
        help="Name or pattern of parameters to prune; by default the weights of all layers."),
)  # fmt: skip


@command(
    "Write a model whose weights of small saliency are zero.",
    "kfac-engine prune mlp.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --sparsity 0.5 -o pruned.onnx",
    MODEL,
    curvature_option,
    sample_option,
    output("-o", "--out", writes="model", required=True, help="The pruned model (.onnx)."),
    json_option,
    options=_SELECTION,
)
def run_prune(
    model: Path,
    curvature: Path,
    inputs: Path | None,
    options: dict[str, Any],
    out: Path,
    as_json: bool,
) -> None:
    import kfac_engine as ke

    result = read_curvature(curvature, model, inputs)
    with working("pruning"):
        pruned = ke.prune(result, **options)
        rise = _rise(result, pruned)
    with working("writing the model"):
        result.model.set_parameters(pruned)
        result.model.export(out)
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
        (name, dimensions(array.shape), f"{zeros[name]:,}", _percent(zeros[name], array.size))
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
