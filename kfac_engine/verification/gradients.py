"""Compares the engine's gradients with differences of the loss."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from kfac_engine.verification.checks import FAINT, MOST_TOLERANCE, Check, Measurement
from kfac_engine.verification.differences import Difference, differentiate_along, sizes
from kfac_engine.verification.specimen import Floats, Specimen

NAME = "gradients"
ALL = "all parameters"
REMEDY = (
    "the derivative of an operator between the parameter and the loss is wrong: exclude the "
    "parameter with freeze, and report the model"
)
# Errors of correct gradients: of sums in float32, and of differences in float32.
_DOUBLE_TOLERANCE, _SINGLE_TOLERANCE = 1e-3, 5e-2
# A doubt about a difference, relative to the tolerance, that decides nothing.
_SETTLED = 0.25
# Gradients below this part of the mean gradient of an entry are compared with this part.
_FLOOR = 1e-3
# The change of a gradient by one rounding of the parameters and probabilities, times this, is a
# rounding error.
_ROUNDINGS = 8
_SIGNS = 3


class GradientCheck:
    """Compares directional derivatives along signs and along the gradient.

    ``rng`` draws the signs. A vector ``r`` of random signs has the mean square ``E⟨e, r⟩² = ‖e‖²``
    for every error ``e`` of a gradient. Differences along few such vectors therefore estimate the
    norm of the error.
    """

    def __init__(self, specimen: Specimen, rng: np.random.Generator) -> None:
        self._specimen, self._rng = specimen, rng
        self._scales = sizes(specimen.parameters)
        self._base = _DOUBLE_TOLERANCE if specimen.copy.is_double else _SINGLE_TOLERANCE
        self._noise = self._rounding()
        self._size = _norm({n: self._scales[n] * g for n, g in specimen.gradients.items()})
        self._steps: set[float] = set()

    def run(self, names: tuple[str, ...]) -> Check:
        """Check all parameters together, and the parameters ``names`` one by one."""
        everything = tuple(self._specimen.parameters)
        measurements, skipped = [], {}
        for subject, members in [(ALL, everything), *((name, (name,)) for name in names)]:
            measurement = self._measure(subject, members)
            if isinstance(measurement, str):
                skipped[subject] = measurement
            else:
                measurements.append(measurement)
        copy = self._specimen.copy
        detail = (
            f"central differences in {'float64' if copy.is_double else 'float32'}, {copy.passes} "
            f"passes"
        )
        if self._steps:
            steps = f"{min(self._steps):.1g} to {max(self._steps):.1g}"
            detail += f", steps of {steps} of the size of the entries"
        if copy.why_not:
            detail += f"; no float64: {copy.why_not.rstrip('.')}"
        return Check(NAME, tuple(measurements), detail, skipped, REMEDY)

    def _measure(self, subject: str, names: tuple[str, ...]) -> Measurement | str:
        """Return the error of the gradients of some parameters, or why it cannot be measured."""
        gradients = {n: self._scales[n] * self._specimen.gradients[n] for n in names}
        size = max(_norm(gradients), self._floor(names))
        rounding = self._specimen.resolution + self._noise_of(names, size)
        tolerance = max(self._base, _ROUNDINGS * rounding)
        if tolerance > MOST_TOLERANCE:
            return FAINT
        errors = []
        for direction in self._directions(gradients, _SIGNS if subject == ALL else 1):
            along = {n: self._scales[n] * array for n, array in direction.items()}
            # Along signs a derivative has the size of the gradient.
            measured = self._along(along, _SETTLED * tolerance * size)
            if measured.doubt > 2 * _SETTLED * tolerance * size:
                return "the loss is not smooth enough there: steps disagree"
            self._steps.add(measured.step)
            computed = sum(float(np.vdot(gradients[n], direction[n])) for n in names)
            errors.append(abs(computed - float(measured.value)) / size)
        along_gradient, *along_signs = errors
        estimate = float(np.sqrt(np.mean(np.square(along_signs))))
        return Measurement(subject, max(estimate, along_gradient), tolerance)

    def _directions(
        self, gradients: Mapping[str, Floats], signs: int
    ) -> Iterator[dict[str, Floats]]:
        """Yield the direction of the gradient, and vectors of random signs."""
        norm = _norm(gradients)
        yield {n: g / (norm or 1.0) for n, g in gradients.items()}
        for _ in range(signs):
            yield {n: self._rng.choice([-1.0, 1.0], g.shape) for n, g in gradients.items()}

    def _along(self, direction: Mapping[str, Floats], enough: float) -> Difference:
        copy, parameters = self._specimen.copy, self._specimen.parameters
        function: Callable[[Mapping[str, Floats]], Floats] = partial(_loss, copy.loss)
        return differentiate_along(copy, function, parameters, direction, absolute=enough)

    def _floor(self, names: tuple[str, ...]) -> float:
        """Return the smallest size to which an error is related."""
        parameters = self._specimen.parameters
        entries = sum(array.size for array in parameters.values())
        members = sum(parameters[n].size for n in names)
        return (_FLOOR * self._size * (members / entries) ** 0.5) or 1.0

    def _rounding(self) -> dict[str, Floats]:
        """Return the change of the gradients by one rounding of parameters and probabilities."""
        specimen = self._specimen
        types = {name: specimen.model.parameters[name].dtype for name in specimen.parameters}
        moved = {
            n: (a * (1 + np.finfo(types[n]).eps * self._rng.choice([-1.0, 1.0], a.shape)))
            for n, a in specimen.parameters.items()
        }
        before = self._propagated(specimen.parameters, 0.0)
        after = self._propagated(moved, specimen.rounding)
        return {name: after[name] - before[name] for name in before}

    def _propagated(self, parameters: Mapping[str, Floats], rounding: float) -> dict[str, Floats]:
        """Return the gradients at other parameters, by a backward pass of the engine.

        Probabilities have errors of the size ``rounding``.
        """
        model, objective = self._specimen.model, self._specimen.engine.objective
        feeds = {entry.name: self._specimen.trace[entry.name] for entry in model.graph.inputs}
        single = {n: a.astype(model.parameters[n].dtype) for n, a in parameters.items()}
        named = objective.named_targets(self._specimen.targets)
        trace = model.run(feeds, named, parameters=single)
        cotangents = objective.cotangents(trace)
        for name, weight in self._specimen.probability_weights.items() if rounding else ():
            errors = weight * rounding * self._rng.choice([-1.0, 1.0], cotangents[name].shape)
            like = errors.astype(cotangents[name].dtype)
            cotangents[name] = cotangents[name] + model.memory_space.to_device(like)
        gradients = trace.vjp(cotangents, tuple(parameters))
        return {n: model.memory_space.on_host(g).astype(np.float64) for n, g in gradients.items()}

    def _noise_of(self, names: tuple[str, ...], size: float) -> float:
        return _norm({n: self._scales[n] * self._noise[n] for n in names}) / size


def _loss(
    loss: Callable[[Mapping[str, Floats]], float], parameters: Mapping[str, Floats]
) -> Floats:
    return np.asarray(loss(parameters))


def _norm(arrays: Mapping[str, Floats]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(array)) for array in arrays.values())))
