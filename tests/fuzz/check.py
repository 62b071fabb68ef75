"""Whether a model is differentiated right, or refused by an error of ours.

``python -m tests.fuzz.check --cases 100000`` runs as many as one likes.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

import kfac_engine as ke
from tests.fuzz.graphs import random_model
from tests.fuzz.mutants import mutated

STEP = 1e-6
# Central differences in float64: rounding of about 1e-10 / STEP, relative to the values in between.
TOLERANCE = 1e-5
LARGE = 1e3  # a sine of 1e38, say, has no differences
BATCH = 3  # another than that of the sample run, so that a baked-in size shows


RUNTIME_REFUSES = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
)


class WrongError(AssertionError):
    """A gradient that differs from finite differences."""


def check(model: onnx.ModelProto) -> str:
    """What became of a model: ``right``, refused, or why nothing can be said; or WrongError."""
    try:
        gradient = ke.differentiate(model, wrt=["x", *_parameters(model)])
    except ke.KfacError as refused:
        return f"refused: {type(refused).__name__}"
    rng = np.random.default_rng(0)
    try:
        forward, backward = _session(model), _session(gradient)
        entries, outputs = forward.get_inputs(), forward.get_outputs()
        if [entry.name for entry in entries] != ["x"] or len(outputs) != 1:
            return "of other inputs or outputs"
        x = rng.normal(size=[side if isinstance(side, int) else BATCH for side in entries[0].shape])
        (y,) = forward.run(None, {"x": x})
        cotangent = rng.normal(size=y.shape)
        names = [e.name for e in backward.get_outputs() if e.name.startswith("gradient/")]
        feeds = {"x": x, "cotangent": cotangent}
        wanted = {entry.name for entry in backward.get_inputs()}
        found = backward.run(names, {name: feeds[name] for name in wanted})
    except RUNTIME_REFUSES:
        return "not for the runtime"  # false declarations, or no such batch
    constants = (numpy_helper.to_array(entry) for entry in model.graph.initializer)
    wide = (array for array in constants if array.dtype == np.float64)
    if not (np.isfinite(y).all() and all((abs(array) < LARGE).all() for array in wide)):
        return "not for differences"
    gradients = {n.removeprefix("gradient/"): g for n, g in zip(names, found, strict=True)}
    if not all(np.isfinite(gradient).all() for gradient in gradients.values()):
        return "not for differences"  # the root of a constant zero, say
    # Where a kink lies within the step, another direction meets none.
    errors = [_error(model, gradients, x, cotangent, seed) for seed in range(3)]
    if not min(errors) <= TOLERANCE:
        raise WrongError(f"errors {errors} along directions of {', '.join(gradients)}")
    return "right"


def _parameters(model: onnx.ModelProto) -> list[str]:
    wide = (e.name for e in model.graph.initializer if e.data_type == onnx.TensorProto.DOUBLE)
    return [name for name in wide if name.startswith("w")]


def _error(
    model: onnx.ModelProto,
    gradients: dict[str, np.ndarray],
    x: np.ndarray,
    cotangent: np.ndarray,
    seed: int,
) -> float:
    """Derivative along a random direction of everything, against finite differences."""
    rng = np.random.default_rng(seed)
    directions = {name: rng.normal(size=g.shape) for name, g in gradients.items()}
    values = []
    for step in (STEP, -STEP):
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        for entry in moved.graph.initializer:
            if entry.name in directions:
                array = numpy_helper.to_array(entry) + step * directions[entry.name]
                entry.CopyFrom(numpy_helper.from_array(array, entry.name))
        (y,) = _session(moved).run(None, {"x": x + step * directions["x"]})
        values.append(float((y * cotangent).sum()))
    slope = (values[0] - values[1]) / (2 * STEP)
    exact = sum(float((directions[name] * g).sum()) for name, g in gradients.items())
    return abs(slope - exact) / max(abs(slope), abs(exact), abs(values[0]), 1.0)


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options)


MAKERS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "valid": random_model,
    "damaged": partial(mutated, base="random"),
}


def main() -> int:
    """Run cases; print seeds that went wrong, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        for kind, make in MAKERS.items():
            try:
                outcome = check(make(seed))
            except Exception as failure:  # whatever comes out is to be told
                outcome = f"FAILED {type(failure).__name__}"
                print(kind, seed, outcome, str(failure)[:300].replace("\n", " "))
            counts[kind, outcome] += 1
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:8} {outcome:32} {count:8}")
    return int(any("FAILED" in outcome for _, outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
