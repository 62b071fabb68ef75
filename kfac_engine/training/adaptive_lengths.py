"""The updates of the K-FAC optimizer whose lengths need no learning rate.

A layer is updated in the direction of its natural gradient. The length of the update follows from
the agreement of the next gradient with the last update: an update that still descends was short.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.training.kfac_updates import Move, StepInputs, natural_gradients, quadratic_change
from kfac_engine.training.optimizer import Rate, SlotArrays, evaluated_rate
from kfac_engine.training.rules import AdaptiveMoments
from kfac_engine.training.vectors import Vector, combine, zeros

# Kinds of layers whose arrays are updated by Adam: their updates have few entries that are not
# zero, or scale single features.
_BY_ADAM = {"embedding", "embedding_multi", "scale_and_shift", "shift", "generic"}
_BETA2, _EPSILON = 0.999, 1e-8
_TINY = 1e-12

# log k decays by this part in a step and grows by the agreement times the gain. An agreement of 1
# doubles k in two steps; a constant agreement c leads to k = exp(4 c).
_DECAY, _GAIN = 0.1, 0.4
_LEAST, _LARGEST = 0.1, 20.0


@dataclass(frozen=True, slots=True)
class AdaptiveLengthUpdate:
    """Natural gradients of the averaged gradient, each matrix scaled to a length of its own.

    The Frobenius norm of an update is ``k L √outputs``: with ``k = 1``, each output of a layer
    changes by the same amount whatever their number, as with Muon. The multiple ``k`` of a matrix
    follows from the agreement ``c = ⟨g, p⟩ / ⟨g', p⟩`` of the gradient g with the last natural
    gradient p, where g' is the gradient from which p was computed::

        log k ← 0.9 log k + 0.4 s min(max(c, −1), 1)        0.1 ≤ k ≤ 20

    with the value s of the schedule. While the loss falls along one direction, c is near 1 and the
    updates become longer. In the noise of the batches c is near 0 and k returns to 1. An update
    beyond the minimum along its direction has c < 0. g' contains the noise of its batch, as p does,
    so that c is too small rather than too large. Vectors, embeddings and parameters without a layer
    are updated by Adam.

    Attributes:
        engine: The engine that preconditions.
        roots: √outputs of the matrices: see ``root_outputs``.
        momentum: Decay of the average of gradients, in [0, 1).
        adam_rate: Learning rate of Adam.
        weight_decay: Parameters shrink by this number times the rate of their update.
    """

    engine: Engine
    roots: Mapping[str, float]
    momentum: float
    adam_rate: Rate
    weight_decay: float

    def new_slots(self, parameters: Vector) -> SlotArrays:
        """Return the state before the first step.

        Returns:
            Averaged gradients; squared gradients of the parameters that Adam updates; for each
            matrix the last natural gradient p, ``⟨g', p⟩`` and ``log k``.
        """
        matrices = {name: parameters[name] for name in self.roots}
        by_adam = {name: value for name, value in parameters.items() if name not in matrices}
        return {
            "momentum": zeros(parameters),
            "second_moment": zeros(by_adam),
            "natural_gradient": zeros(matrices),
            "slope": {name: np.zeros(()) for name in matrices},
            "log_length": {name: np.zeros(()) for name in matrices},
        }

    def __call__(self, step: StepInputs) -> Move:
        """Compute the new parameters of a step, and write the new state."""
        adam = AdaptiveMoments(self.momentum, _BETA2, _EPSILON)
        adam_rate = step.scale * evaluated_rate(self.adam_rate, step.step)
        old, new = step.slots, step.new_slots
        values: dict[str, Array] = {}
        for name, gradient in step.gradients.items():
            if name in self.roots:
                moments = new["momentum"][name], self.momentum, old["momentum"][name]
                combine(*moments, 1 - self.momentum, gradient)
            else:
                before, after = ({slot: s[slot][name] for slot in adam.slots} for s in (old, new))
                values[name] = direction = adam(gradient.copy(), before, after, step.step + 1)
                shrunk = 1 - adam_rate * self.weight_decay
                combine(direction, -adam_rate, direction, shrunk, step.parameters[name])
        values |= self._matrices(step)
        predicted = quadratic_change(self.engine, step, values) if step.predicts else None
        return Move(values, predicted)

    def _matrices(self, step: StepInputs) -> dict[str, Array]:
        """Return the new values of the matrices."""
        with step.clock("precondition"):
            natural = natural_gradients(self.engine, step.new_slots["momentum"])
        debiased = 1 / (1 - self.momentum ** (step.step + 1))
        shrunk = 1 - step.rate * self.weight_decay
        values = {}
        for name, root in self.roots.items():
            array, gradient = natural[name], step.gradients[name]
            length = step.rate * root * self._multiple(name, step)
            step.new_slots["natural_gradient"][name] = array
            step.new_slots["slope"][name][...] = float(np.vdot(gradient, array))
            factor = length * debiased / (debiased * _norm(array) + _TINY)
            # The memory of a gradient that is not needed any more receives the new value.
            values[name] = np.empty_like(gradient) if step.predicts else gradient
            combine(values[name], -factor, array, shrunk, step.parameters[name])
        return values

    def _multiple(self, name: str, step: StepInputs) -> float:
        """Return k of a matrix, and write its logarithm."""
        slope = float(step.slots["slope"][name])
        next_slope = float(np.vdot(step.gradients[name], step.slots["natural_gradient"][name]))
        agreement = min(max(next_slope / slope, -1.0), 1.0) if slope > 0 else 0.0
        grown = (1 - _DECAY) * float(step.slots["log_length"][name])
        grown += _GAIN * min(step.scale, 1.0) * agreement
        length = min(max(grown, log(_LEAST)), log(_LARGEST))
        step.new_slots["log_length"][name][...] = length
        return exp(length)


def _norm(array: Array) -> float:
    return float(np.linalg.norm(array))


def root_outputs(engine: Engine) -> dict[str, float]:
    """Return √outputs for the matrices of layers; embeddings and vectors are absent.

    The number of outputs is the size of the output factor, where the weight has an axis of this
    size. The factors of groups are smaller; the first axis of the weight then has the outputs.
    """
    parameters = engine.parameters
    roots = {}
    for layer in engine.layers:
        for name in layer.parameters if layer.kind not in _BY_ADAM else ():
            shape, size = parameters[name].shape, layer.factor_shapes[-1][-1]
            if len(shape) > 1:
                roots[name] = sqrt(size if size in shape else shape[0])
    return roots
