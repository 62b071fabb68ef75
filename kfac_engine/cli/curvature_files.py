"""Options of the commands on curvature, and the reading of a stored curvature."""

from pathlib import Path
from typing import TYPE_CHECKING

from kfac_engine.cli.command import Group
from kfac_engine.cli.display import shown_warnings, working

if TYPE_CHECKING:
    import kfac_engine as ke

curvature_option = Group.DATA.file(
    "--curvature",
    required=True,
    help="Curvature of the model, a file that the command curvature wrote.",
)

batch_option = Group.DATA.count(
    "--batch",
    help="Number of examples in a batch, 128 by default. The result does not depend on it.",
)


def read_curvature(path: Path, model: Path, sample: Path | None = None) -> "ke.Curvature":
    """Return the curvature in a file.

    ``model`` is the file of the model with the weights that were measured, and ``sample`` a file
    with a batch from which shapes are inferred. ``InputError`` is raised if a file is wrong, or if
    the model has other weights.
    """
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs

    with working("reading the curvature"), shown_warnings():
        inputs = read_inputs(sample, model)
        return ke.Curvature.load(path, model, sample_inputs=inputs)
