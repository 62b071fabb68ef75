"""Compares blocks with the Fisher matrix of one example, for blocks that are exact there."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kfac_engine.engine.report import LayerReport
from kfac_engine.errors import UnsupportedError
from kfac_engine.verification.checks import FAINT, MOST_TOLERANCE, Check, Measurement
from kfac_engine.verification.dense_fisher import (
    CURVED_ERROR,
    MOST_ROWS,
    DenseFisher,
    Entries,
    dense_fisher,
)
from kfac_engine.verification.differences import sizes
from kfac_engine.verification.specimen import Rebuild, Specimen, multiplied, spread_evenly

NAME = "blocks"
REMEDY = (
    "the block of this layer is wrong: choose another approximation of its kind with "
    "approximations (--approx KIND=diagonal), and report the model"
)
# Errors of float32 averages and products, relative to the largest entry.
_TOLERANCE = 2e-3
# A damping whose root is below the rounding of the blocks, also where predictions are certain.
_DAMPING = 1e-30
# Errors of the probabilities in the definition and, where they are squared, in float32 blocks.
_UNIT = 8 * CURVED_ERROR
# Kinds whose Kronecker block is exact for one example with one use at one position.
_KRONECKER = frozenset(
    {"fully_connected", "conv1d", "conv2d", "convolution", "conv_transpose", "embedding"}
)
_EXACT_ONCE = frozenset({"kron", "kron_reduce"})
# Forms that are exact for every example.
_EXACT_ALWAYS = frozenset({"full", "diagonal"})


def verify_blocks(
    specimen: Specimen, rebuild: Rebuild, layers: Sequence[LayerReport], most: int, entries: int
) -> Check:
    """Compare products with blocks on one example, in the mode of exact expectations.

    At most ``most`` of the layers are checked, each with a slice of ``entries`` rows.
    """
    alone = specimen.alone()
    if alone is None:
        return Check.without(NAME, "the model does not run with one example alone")
    exact = spread_evenly([layer for layer in layers if _is_exact(alone, layer)], most)
    if not exact:
        return Check.without(NAME, "no layer has a block that is exact for one example")
    count = sum(alone.trace[name].size for name in specimen.engine.objective.inputs)
    mode = "exact" if count <= MOST_ROWS else "empirical"
    names = tuple(dict.fromkeys(name for layer in exact for name in layer.parameters))
    try:
        probe = rebuild.engine(trainable=names, freeze=None, estimation_mode=mode, damping=_DAMPING)
    except UnsupportedError as failure:
        return Check.without(NAME, str(failure))
    one = replace(alone, engine=probe)
    trace = one.trace
    probe.estimator.update_covariances(
        trace, scales=probe.objective.fisher_scales(probe.objective.observe(trace))
    )
    measurements, skipped = [], {}
    for index, layer in enumerate(exact):
        rows = Entries.draw(one.parameters, layer.parameters, entries, index)
        measurement = _measure(one, layer, mode, rows)
        if isinstance(measurement, str):
            skipped[", ".join(layer.parameters)] = measurement
        else:
            measurements.append(measurement)
    detail = f"one example, mode {mode}, {len(exact)} of {len(specimen.engine.layers)} layers"
    return Check(NAME, tuple(measurements), detail, skipped, REMEDY)


def _is_exact(alone: Specimen, layer: LayerReport) -> bool:
    """Check whether the block of a whole layer is exact for one example."""
    if any(layer.parts):
        return False
    if layer.approximation in _EXACT_ALWAYS:
        return True
    if layer.kind not in _KRONECKER or layer.approximation not in _EXACT_ONCE:
        return False
    output = layer.outputs
    return isinstance(output, str) and alone.trace[output].size == layer.factor_shapes[-1][-1]


def _measure(one: Specimen, layer: LayerReport, mode: str, rows: Entries) -> Measurement | str:
    """Return the error of a product with the block of a layer, or why it cannot be measured."""
    scales, rng = sizes(one.parameters), np.random.default_rng(0)
    vector = {n: scales[n] * rng.standard_normal(one.parameters[n].shape) for n in layer.parameters}
    product = rows.of(multiplied(one.engine, vector, 1))
    errors = np.zeros(len(rows))
    if mode == "empirical":
        objective = one.engine.objective
        # The source is the gradient of the sum over positions, the gradient that of the mean.
        ratio = objective.fisher_ratio(objective.observe(one.trace))
        if ratio is None:
            return "predictions or losses have weights of their own"
        gradients = {name: ratio * one.gradients[name] for name in layer.parameters}
        along = sum(float(np.vdot(gradients[n], vector[n])) for n in vector)
        part = rows.of(gradients)
        expected = (
            part * part * rows.of(vector) if layer.approximation == "diagonal" else part * along
        )
    else:
        dense = dense_fisher(one, rows, [vector])
        if not isinstance(dense, DenseFisher):
            return dense
        if layer.approximation == "diagonal":
            expected = dense.diagonal() * rows.of(vector)
            errors = dense.diagonal_errors(_UNIT) * abs(rows.of(vector))
        else:
            expected, errors = dense.products()[0], dense.product_errors(_UNIT)[0]
    size = float(abs(expected).max()) or 1.0
    tolerance = max(_TOLERANCE, float(errors.max()) / size)
    if tolerance > MOST_TOLERANCE:
        return FAINT
    error = float(abs(product - expected).max()) / size
    return Measurement(", ".join(layer.parameters), error, tolerance)
