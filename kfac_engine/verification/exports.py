"""Compares the exported file with the model's file and predictions, in ONNX Runtime."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import on_host
from kfac_engine.errors import BackendError
from kfac_engine.sessions.session import run_file
from kfac_engine.verification.checks import Check, Measurement
from kfac_engine.verification.specimen import Specimen

NAME = "export"
REMEDY = "the exported file computes other outputs: do not use it, and report the model"
# float32 outputs of differently optimized sessions, and of half precision, relative to the largest.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2


def check_export(
    specimen: Specimen, file: Path, source: str | os.PathLike[str] | bytes | None
) -> Check:
    """Compare the outputs of the exported file with the outputs of its source.

    The exported file has unchanged parameters. ``source`` is the file of the model; if it is None,
    the predictions of the engine take its place.
    """
    model = specimen.model
    if model.draws and not specimen.engine.options.train_form:
        return Check.without(NAME, "the model draws random numbers")
    feeds = _feeds(specimen)
    try:
        outputs = run_file(file, feeds)
        original = None if source is None else run_file(source, feeds)
    except BackendError as error:
        return Check.without(NAME, f"ONNX Runtime alone does not run the file: {error}")
    tolerance = _HALF_TOLERANCE if model.loaded.stored else _TOLERANCE
    measurements = []
    if original is not None:
        measurements = [_compared(n, outputs[n], original[n], _TOLERANCE) for n in original]
    elif not model.buffers or specimen.engine.options.train_form:
        names = [name for name in model.graph.outputs if name in model.facts]
        result = specimen.engine.predict(specimen.inputs)
        arrays = result if isinstance(result, Mapping) else {names[0]: result}
        host = on_host(arrays, specimen.engine.collection.backend)
        measurements = [_compared(n, outputs[n], a, tolerance) for n, a in host.items()]
    if not measurements:
        return Check.without(NAME, "the file is in training form, and its source is unknown")
    other = "the input file" if original is not None else "the predictions of the engine"
    detail = f"outputs of the exported file and of {other} in ONNX Runtime"
    return Check(NAME, tuple(measurements), detail, {}, REMEDY)


def _feeds(specimen: Specimen) -> dict[str, Array]:
    """Return the inputs in the element types of the file."""
    arrays = on_host(specimen.inputs, specimen.engine.collection.backend)
    declared = {entry.name: entry for entry in specimen.model.loaded.graph.inputs}
    return {
        name: np.asarray(array).astype(declared[name].stored or declared[name].dtype)
        for name, array in arrays.items()
    }


def _compared(name: str, output: Array, expected: Array, tolerance: float) -> Measurement:
    if output.shape != expected.shape:
        return Measurement(name, float("inf"), tolerance)
    a, b = output.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    size = float(abs(b[np.isfinite(b)]).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, abs(a - b))
    return Measurement(name, float(difference.max(initial=0.0)) / size, tolerance)
