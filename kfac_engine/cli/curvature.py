"""``curvature``: measure the Fisher matrix of a model on a data set, and store it."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Group, file_path
from kfac_engine.cli.curvature_files import batch_option
from kfac_engine.cli.display import report_beside, shown_warnings, working
from kfac_engine.cli.engine_options import EngineCommand, curvature_record
from kfac_engine.cli.options import debug_option, gathered, json_option, keywords

if TYPE_CHECKING:
    import kfac_engine as ke


_FILES = (
    Group.DATA.file(
        "--inputs",
        required=True,
        help="Data: .npz with the inputs by name and 'targets', or a folder of such files. With "
        "--targets or without targets: the inputs, .npz or .npy.",
    ),
    Group.DATA.file(
        "--targets",
        help="Targets in a file of their own, .npz or .npy. Only --fisher empirical needs targets.",
    ),
    Group.OUTPUT.file(
        "--plot",
        help="Picture of the eigenvalues of the blocks, next to --damping: .png, .svg, .pdf or "
        ".html. All but .html need matplotlib.",
    ),
    Group.OUTPUT.file("-o", "--out", required=True, help="File of the curvature (.safetensors)."),
)
_FORM = (
    Group.OUTPUT.option(
        "--damping",
        type=click.FloatRange(min=0, min_open=True),
        default=1e-3,
        help="Damping λ > 0 of the log-determinants and effective dimensions of the table. The "
        "file is stored without damping.",
    ),
    Group.OUTPUT.option(
        "--wide", is_flag=True, help="Show all columns of the blocks in a narrow terminal."
    ),
    json_option,
)


@click.command(
    cls=EngineCommand,
    record=curvature_record,
    example="kfac-engine curvature mlp.onnx --inputs images.npy --targets labels.npy \\\n"
    "  --structure ekfac -o mlp.curvature.safetensors",
)
@click.argument("model", type=file_path)
@gathered("files", *_FILES)
@batch_option
@gathered("form", *_FORM)
@keywords()
@debug_option
def curvature(
    model: Path,
    files: SimpleNamespace,
    batch: int | None,
    form: SimpleNamespace,
    options: dict[str, Any],
) -> None:
    """Measure the Fisher matrix of a model on a data set, and store it."""
    from kfac_engine.cli.curvature_report import print_curvature, write_spectra
    from kfac_engine.cli.files import check_files
    from kfac_engine.cli.spectra import check_picture

    if files.plot is not None:
        check_picture(files.plot)
    outputs = {"--out": files.out, "--plot": files.plot}
    check_files(outputs, {"--inputs": files.inputs, "--targets": files.targets}, model)
    result = _measured(model, files, batch, options)
    with working("writing"):
        result.save(files.out)
        if files.plot is not None:
            write_spectra(files.plot, model.name, result, form.damping)
    with report_beside(files.out):
        print_curvature(result, path=files.out, **vars(form))


def _measured(
    model: Path, files: SimpleNamespace, size: int | None, options: dict[str, Any]
) -> "ke.Curvature":
    """Return the curvature of a model on the data of files."""
    from kfac_engine.analysis.fisher_matrix.assembly import assembled
    from kfac_engine.analysis.fisher_matrix.measure import measured
    from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
    from kfac_engine.cli.curvature_data import file_batches, first_examples
    from kfac_engine.cli.files import read_data
    from kfac_engine.system.arrays import map_arrays

    with working("reading"):
        inputs, data = read_data(files.inputs, files.targets, model, map_arrays)
        sample = first_examples(inputs, model, options["batch_axes"] or {}, size)
    with working("preparing the model"), shown_warnings():
        record = CurvatureOptions(**options, sample_inputs=sample)
        assembly, estimator = assembled(model, record)
        batches = file_batches(assembly, data, size, record.passes)
    with shown_warnings():
        return measured(assembly, estimator, record, batches)
