"""Multiplies vectors by the damped blocks and by their inverses."""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.report import LayerReport
from kfac_engine.errors import MemoryLimitError
from kfac_engine.verification.checks import Check, Measurement
from kfac_engine.verification.differences import sizes
from kfac_engine.verification.specimen import Floats, Rebuild, Specimen, multiplied

NAME = "inverses"
REMEDY = (
    "the inverse of this block is inaccurate: increase damping; if the error stays, report the "
    "model"
)
# Error of products that are much better conditioned than float32 requires.
_LEAST = 1e-4
# Above this error an inverse is useless, whatever its condition.
_MOST = 2e-2
_ROUNDINGS = 16
_POWER_STEPS = 4


def check_inverses(
    specimen: Specimen, rebuild: Rebuild, layers: Sequence[LayerReport], rng: np.random.Generator
) -> Check:
    """Measure ``‖(F̂ + λI)(F̂ + λI)⁻¹ v − v‖ / ‖v‖`` of each layer after one update.

    ``rng`` draws the vectors v.
    """
    exps = specimen.engine.options.exps
    if -1 not in exps:
        return Check.without(NAME, "the engine stores no inverses: -1 is not in exps")
    if not layers:
        return Check.without(NAME, "every inverse of this model takes too long for a check")
    names = tuple(dict.fromkeys(name for layer in layers for name in layer.parameters))
    probe = rebuild.engine(
        trainable=names, freeze=None, schedule=Schedule(), gradient_dtype="float32"
    )
    try:
        probe.observe(specimen.inputs, specimen.targets)
    except MemoryLimitError as failure:
        return Check.without(NAME, str(failure))
    scales = sizes(specimen.parameters)
    vectors = {
        name: scales.get(name, 1.0) * rng.standard_normal(np.shape(array))
        for name, array in probe.parameters.items()
    }
    back = multiplied(probe, multiplied(probe, vectors, -1), 1)
    largest = _largest(probe, vectors, layers)
    measurements = []
    for layer in layers:
        subject = ", ".join(layer.parameters)
        error = _norm(layer, {n: back[n] - vectors[n] for n in vectors}) / _norm(layer, vectors)
        condition = largest[subject] / probe.damping
        eps = float(np.finfo(np.float32).eps)
        tolerance = min(max(_LEAST, _ROUNDINGS * eps * condition), _MOST)
        measurements.append(Measurement(subject, error, tolerance))
    detail = f"one update, damping {probe.damping:g}, {len(layers)} layers"
    return Check(NAME, tuple(measurements), detail, {}, REMEDY)


def _largest(
    probe: Engine, vectors: Mapping[str, Floats], layers: Sequence[LayerReport]
) -> dict[str, float]:
    """Return an estimate of the largest eigenvalue of each damped block, by power iteration."""
    current = dict(vectors)
    growth: dict[str, float] = {}
    for _ in range(_POWER_STEPS):
        product = multiplied(probe, current, 1)
        for layer in layers:
            before, after = _norm(layer, current), _norm(layer, product)
            growth[", ".join(layer.parameters)] = after / (before or 1.0)
        norms = {n: float(np.linalg.norm(a)) or 1.0 for n, a in product.items()}
        top = max(norms.values())
        current = {n: a / top for n, a in product.items()}
    return growth


def _norm(layer: LayerReport, vectors: Mapping[str, Floats]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(vectors[n])) for n in layer.parameters)))
