"""``merge``: write the Fisher-weighted mean of several models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfac_engine.cli.command import Option, command, file_option, file_path, output
from kfac_engine.cli.display import print_json, print_table, say, tell, working
from kfac_engine.cli.options import json_option, read_curvature, sample_option
from kfac_engine.errors import InputError
from kfac_engine.printable import printable, quoted
from kfac_engine.summary import dimensions

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine._types import Array

# Number of names in a warning.
_MOST_NAMES = 5


@command(
    "Write the mean of models of one architecture, weighted by their Fisher matrices.",
    "kfac-engine merge mlp.onnx other.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --curvature other.curvature.safetensors -o merged.onnx",
    click.Argument(["models"], type=file_path, nargs=-1, required=True),
    file_option("Data", "--curvature", "curvatures", multiple=True, required=True,
        help="Curvature of each model, a file that the command curvature wrote; repeated for each "
        "model, in their order."),
    Option(
        "Data", "--weight", "weights", type=click.FloatRange(min=0, min_open=True), multiple=True,
        help="Weight of each model, repeated in their order; by default all are equal."),
    sample_option,
    output("-o", "--out", writes="model", required=True, help="The merged model (.onnx)."),
    json_option,
)  # fmt: skip
def run_merge(
    models: tuple[Path, ...],
    curvatures: tuple[Path, ...],
    weights: tuple[float, ...],
    inputs: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    import kfac_engine as ke

    if len(models) < 2 or len(curvatures) != len(models):
        raise InputError(
            f"merge needs two or more models and --curvature for each, got {len(models)} models "
            f"and {len(curvatures)} curvatures."
        )
    results = [
        read_curvature(path, model, inputs) for path, model in zip(curvatures, models, strict=True)
    ]
    with working("merging"):
        parameters = [result.parameters for result in results]
        merged = ke.merge(parameters, results, weights or None)
    _warn_of_constants(results)
    with working("writing the model"):
        first = results[0].model
        distances = _distances(parameters, merged)
        first.set_parameters(merged)
        first.export(out)
    _report(merged, distances, models, out, as_json)


def _warn_of_constants(curvatures: "Sequence[ke.Curvature]") -> None:
    """Name the constants that differ between the models and are not parameters."""
    from kfac_engine.analysis.fisher_matrix.files import weight_hashes

    first, *others = (weight_hashes(entry.layout.assembly) for entry in curvatures)
    names = [
        name
        for name in first
        if name not in curvatures[0].vector.shapes
        and any(other.get(name) != first[name] for other in others)
    ]
    if names:
        tell(
            "warning",
            printable(
                f"{quoted(names, _MOST_NAMES)} differ between the models and are not "
                f"among the parameters; the merged model has the values of the first model."
            ),
        )


def _distances(
    models: "Sequence[Mapping[str, Array]]", merged: "Mapping[str, Array]"
) -> dict[str, list[float]]:
    """Return, for each parameter, the Euclidean distances of the models from the merged model."""
    import numpy as np

    return {
        name: [float(np.linalg.norm(array.astype(np.float64) - model[name])) for model in models]
        for name, array in merged.items()
    }


def _report(
    merged: "Mapping[str, Array]",
    distances: Mapping[str, Sequence[float]],
    models: Sequence[Path],
    out: Path,
    as_json: bool,
) -> None:
    if as_json:
        parameters = {
            name: {"shape": list(array.shape), "distances": distances[name]}
            for name, array in merged.items()
        }
        files = [str(model) for model in models]
        print_json({"models": files, "parameters": parameters, "out": str(out)})
        return
    heads = [f" from model {number}" for number in range(1, len(models) + 1)]
    rows = [
        (name, dimensions(array.shape), *(f"{distance:.4g}" for distance in distances[name]))
        for name, array in merged.items()
    ]
    print_table("distance of the merged parameters", ("parameter", "shape", *heads), rows)
    say(f"written to {out}")
