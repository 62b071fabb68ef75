"""``curvature``: measure the Fisher matrix of a model on a data set, and store it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import MODEL, Option, command, file_option, output
from kfac_engine.cli.display import (
    print_json,
    print_table,
    say,
    shown_warnings,
    working,
)
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.cli.inspect import print_legend
from kfac_engine.cli.options import batch_option, json_option
from kfac_engine.summary import dimensions

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.engine.spectra import FactorSpectrum

_FILES = (
    file_option("Data", "--inputs", required=True,
        help="Data: .npz with the inputs by name and 'targets', or a folder of such files. With "
        "--targets or without targets: the inputs, .npz or .npy."),
    file_option("Data", "--targets",
        help="Targets in a separate file, .npz or .npy. Only --fisher empirical needs "
        "targets."),
    output("--plot",
        help="Picture of the eigenvalues of the blocks, next to --damping: .png, .svg, .pdf or "
        ".html. All but .html need matplotlib."),
    output("-o", "--out", required=True, help="File of the curvature (.safetensors)."),
)  # fmt: skip
# Options of ``CurvatureOptions``.
OPTIONS = (
    *engine_options(
        "loss", "output", "class_axis", "threads", "backend", "seed", "batch_axes", "trainable",
        "freeze", "approximations"),
    Option("Curvature", "--structure", metavar="NAME", default="kron",
        names=("analysis.fisher_matrix.options.STRUCTURES",), help="Structure of the matrix."),
    Option("Curvature", "--fisher", metavar="NAME", default="exact",
        names=("analysis.fisher_matrix.options.FISHERS",),
        help="Which Fisher matrix: exact, an estimate from one sampled target for each "
        "prediction, or the empirical matrix of the targets of the data."),
    Option("Curvature", "--layers", metavar="NAME", default="all",
        names=("analysis.fisher_matrix.options.LAYERS",),
        help="Layers that are measured: all, or last for the last layer before each loss."),
)  # fmt: skip
_FORM = (
    Option("Output", "--damping", type=click.FloatRange(min=0, min_open=True), default=1e-3,
        help="Damping λ > 0 of the log-determinants and effective dimensions of the table. The "
        "file is stored without damping."),
    json_option,
)  # fmt: skip


@command(
    "Measure the Fisher matrix of a model on a data set, and store it.",
    "kfac-engine curvature mlp.onnx --inputs images.npy --targets labels.npy \\\n"
    "  --structure ekfac -o mlp.curvature.safetensors",
    MODEL,
    batch_option,
    files=_FILES,
    form=_FORM,
    options=OPTIONS,
)
def run_curvature(
    model: Path,
    files: SimpleNamespace,
    batch_size: int | None,
    form: SimpleNamespace,
    options: dict[str, Any],
) -> None:
    from kfac_engine.cli.spectra import check_picture, write_picture

    if files.plot is not None:
        check_picture(files.plot)
    result = _measured(model, files, batch_size, options)
    with working("writing"):
        result.save(files.out)
        if files.plot is not None:
            title = f"Eigenvalues of the curvature of {model.name}"
            write_picture(files.plot, title, spectra_of(result, form.damping))
    _report(result, path=files.out, **vars(form))


def _measured(
    model: Path, files: SimpleNamespace, size: int | None, options: dict[str, Any]
) -> "ke.Curvature":
    """Return the curvature of a model on the data of files."""
    from kfac_engine.analysis.fisher_matrix.measure import measured
    from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions, assembled
    from kfac_engine.cli.files import ShownBatches, read_data
    from kfac_engine.datasets.first_examples import with_first_examples

    with working("reading"):
        _, data = read_data(files.inputs, files.targets, model, mapped=True)
        _, sample = with_first_examples(
            model, data, options["batch_axes"], labeled=False, divided=False, size=size
        )
    with working("preparing the model"), shown_warnings():
        record = CurvatureOptions(**options, sample_inputs=sample)
        assembly, estimator = assembled(model, record)
        batches = ShownBatches(assembly, data, size, record.passes, labeled=False)
    with shown_warnings():
        return measured(assembly, estimator, record, batches)


def _report(curvature: "ke.Curvature", damping: float, path: Path, *, as_json: bool) -> None:
    """Print a report on a stored curvature, whose log-determinants have the given damping."""
    rows, totals, notes = _rows(curvature, damping), _totals(curvature, damping), _notes(curvature)
    if as_json:
        names = ("structure", "fisher", "biases", "layers")
        measured = {name: getattr(curvature.options, name) for name in names}
        print_json({**measured, **totals, "blocks": rows, "notes": notes, "out": str(path)})
        return
    _print_blocks(rows)
    print_legend(block.formula for block in curvature.blocks)
    _print_totals(curvature, totals)
    for note in notes:
        say(f"note: {note}.")
    say(f"written to {path}")


def spectra_of(curvature: "ke.Curvature", damping: float) -> "Sequence[FactorSpectrum]":
    """Return the spectrum of each block, next to a damping."""
    import numpy as np

    from kfac_engine.engine.spectra import FactorSpectrum

    spectra = []
    for block in curvature.blocks:
        # Averages have float32 at least.
        dtypes = [curvature.parameters[name].dtype for name in block.parameters]
        rounding = float(np.finfo(np.result_type(np.float32, *dtypes)).eps)
        resolution = max(block.places.shape[1:]) * rounding
        values = np.sort(block.spectrum.eigenvalues, axis=None)
        sides = (block.places.size,) * 2
        spectra.append(
            FactorSpectrum(block.parameters, "F", sides, resolution, values, np.asarray(damping))
        )
    return spectra


def _rows(curvature: "ke.Curvature", damping: float) -> list[dict[str, Any]]:
    """Return a row of the table, a dictionary of sizes and eigenvalues, for each block."""
    from kfac_engine.curvature.blocks.base import uses

    rows, extents = [], _extents(curvature)
    for block in curvature.blocks:
        owners = [name for part in block.parts for name in part.parameters]
        keys = [key for part in block.parts for key in uses(part.key)]
        values = block.spectrum.eigenvalues
        rows.append(
            {
                "parameters": owners,
                # The entries of each parameter in the block, such as ``[0:4, :]``; empty for all.
                "parts": [extents.get(key, "") for key in keys],
                "shapes": [curvature.vector.shapes[name] for name in owners],
                "formula": block.formula,
                "eigenvalues": values.size,
                "trace": float(values.sum()),
                "largest": float(values.max()),
                "smallest": float(values.min()),
                "log_determinant": float(block.log_eigenvalues(damping).sum()),
                "effective_dimension": float((values * block.powers(damping, -1.0)).sum()),
            }
        )
    return rows


def _extents(curvature: "ke.Curvature") -> dict[str, str]:
    """Return the entries of the parameter that each slice has, as text, by name of the slice."""
    from kfac_engine.engine.parameter_entries import ParameterEntries

    assembly = curvature.layout.assembly
    entries = ParameterEntries(assembly.discovery, assembly.model.parameters)
    extents: dict[str, str] = {}
    for layer in entries.layers:
        extents |= zip(layer.parameters, entries.extents(layer), strict=True)
    unused = (b.parts[0].key for b in curvature.blocks if b.formula == "0")
    return extents | {key: "unused entries" for key in unused if isinstance(key, str)}


def _notes(curvature: "ke.Curvature") -> list[str]:
    """Return clauses on interpretations of the model that may be wrong."""
    from kfac_engine.engine.report import inference_notes

    model = curvature.model
    coupled = (
        f"examples depend on each other, first by {loss.coupling}: the curvature takes them for "
        f"independent"
        for loss in model.losses
        if loss.coupling
    )
    notes = (*curvature.layout.assembly.notes, *inference_notes(model.passes.model), *coupled)
    return list(dict.fromkeys(notes))


def _totals(curvature: "ke.Curvature", damping: float) -> dict[str, float | int | None]:
    """Return the numbers of the whole matrix."""
    above = (int((b.spectrum.eigenvalues > damping).sum()) for b in curvature.blocks)
    return {
        "examples": curvature.examples,
        "log_likelihood": curvature.log_likelihood,
        "parameters": curvature.vector.size,
        "damping": damping,
        "trace": curvature.trace(),
        "log_determinant": curvature.log_determinant(damping),
        "effective_dimension": curvature.effective_dimension(damping),
        "above_damping": sum(above),
    }


def _print_blocks(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = (
        "parameters", "shapes", "block", " trace", " largest", " smallest", " log det",
        " effective dimension",
    )  # fmt: skip
    numbers = {"trace": ".4g", "largest": ".3g", "smallest": ".3g"}
    numbers |= {"log_determinant": ".4g", "effective_dimension": ".4g"}
    cells = [
        (
            [
                f"{n} {part}".rstrip()
                for n, part in zip(row["parameters"], row["parts"], strict=True)
            ],
            [dimensions(shape) for shape in row["shapes"]],
            row["formula"],
            *(f"{row[name]:{form}}" for name, form in numbers.items()),
        )
        for row in rows
    ]
    print_table("blocks", heads, cells)


def _print_totals(curvature: "ke.Curvature", totals: Mapping[str, float | int | None]) -> None:
    options, likelihood = curvature.options, curvature.log_likelihood
    rows = [
        ("matrix", f"{options.structure}, Fisher matrix {options.fisher}"),
        ("examples", f"{curvature.examples:,}"),
        ("parameters", f"{curvature.vector.size:,}"),
        ("damping λ", f"{totals['damping']:g}"),
        ("trace of F", f"{totals['trace']:.6g}"),
        ("log det of F + λI", f"{totals['log_determinant']:.6g}"),
        ("effective dimension, tr F (F + λI)⁻¹", f"{totals['effective_dimension']:.6g}"),
        ("eigenvalues above λ", f"{totals['above_damping']:,}"),
    ]
    if likelihood is not None:
        mean = likelihood / curvature.examples
        rows.insert(2, ("log-likelihood for an example", f"{mean:.6g} nats"))
    print_table("totals", ("quantity", "value"), rows)
