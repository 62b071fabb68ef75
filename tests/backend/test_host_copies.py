"""Copies from a device to the host are made in few places: elsewhere they would hide in a step."""

import ast
from pathlib import Path

from tests.violations import assert_none

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted(
    path for folder in ("kfac_engine", "kernels") for path in (ROOT / folder).rglob("*.py")
)

# What copies an array of CuPy to the host, to the places that may write it: those that make the
# copies, and those that see arrays of the host only.
COPIES = {
    "asnumpy": (
        "kfac_engine/backend/cuda/device.py",
        "kfac_engine/backend/cuda/device.py",
        "kfac_engine/distributed/mpi.py",  # messages of an MPI that reads host memory only
    ),
    "get()": (
        "kfac_engine/backend/cuda/reads.py",  # what waits for a read
        "kfac_engine/backend/threads.py",
        "kfac_engine/cli/display.py",  # the text of a table
        "kfac_engine/compat/collection.py",  # the default collection
        "kfac_engine/datasets/shards.py",  # data of the user, which a checksum reads
        "kfac_engine/losses/outliers.py",  # counts, for special functions of SciPy
        "kfac_engine/training/adaptive_lengths.py",  # a product for each matrix
    ),
    "item()": (
        "kfac_engine/autodiff/lowering/",
        "kfac_engine/autodiff/rules/",
        "kfac_engine/graph/",
        "kfac_engine/layers/",
        "kfac_engine/training/history.py",  # numbers of records
        "kfac_engine/losses/",  # sums of a batch
        "kfac_engine/curvature/factors/statistics.py",  # sums of weights
        "kfac_engine/training/adaptive_lengths.py",
    ),
    "tolist()": (
        "kfac_engine/backend/cpu/blas.py",
        "kfac_engine/sessions/adapter_files.py",  # arrays of a file
        "kfac_engine/sessions/device_session.py",
        "kfac_engine/autodiff/lowering/",
        "kfac_engine/autodiff/rules/",
        "kfac_engine/cli/",
        "kfac_engine/datasets/",
        "kfac_engine/graph/",
        "kfac_engine/layers/",
        # A measured curvature is in float64 on the host.
        "kfac_engine/analysis/fisher_matrix/",
        "kfac_engine/analysis/influence/",
        "kfac_engine/analysis/laplace/",
        # Records of a run, and checks in float64, are arrays of the host.
        "kfac_engine/html_report/",
        "kfac_engine/verification/",
        # Numbers that were downloaded together.
        "kfac_engine/backend/cuda/many_arrays.py",
        "kfac_engine/curvature/blocks/grouped.py",
        "kfac_engine/curvature/factors/refresh.py",
        "kfac_engine/curvature/factors/stacked.py",
        "kfac_engine/engine/batch_shards.py",  # sums of residuals, which ranks add
        "kfac_engine/engine/distribution.py",
        "kfac_engine/engine/evaluation.py",  # sums of metrics
        "kfac_engine/engine/rollback.py",
        "kfac_engine/training/adaptive_lengths.py",
        "kfac_engine/training/curvature_updates.py",
        "kfac_engine/losses/collection.py",  # options of losses
        "kfac_engine/losses/observed.py",  # the bounds of weights, together
        "kfac_engine/training_files/",  # arrays of the host
        "kfac_engine/recording/",  # recorded arrays, which have no values
    ),
}


def written(tree):
    """Attributes, and calls of attributes without arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            yield f"{ast.unparse(node.func).rpartition('.')[2]}()"


def test_device_arrays_are_copied_to_host_in_listed_places_only():
    places = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}
    assert_none(
        f"{name} in {place}"
        for place, path in places.items()
        for name in written(ast.parse(path.read_text(encoding="utf-8")))
        if name in COPIES and not place.startswith(COPIES[name])
    )
