"""The updates of the K-FAC optimizer: at a learning rate, or of fixed length for each matrix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import numpy as np

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.training.optimizer import Rate, SlotArrays, evaluated_rate, zeros
from kfac_engine.training.rules import AdaptiveMoments

# Kinds of layers whose arrays are updated by Adam: their updates have few entries that are not
# zero, or scale single features.
_BY_ADAM = {"embedding", "embedding_multi", "scale_and_shift", "shift", "generic"}
_BETA2, _EPSILON = 0.999, 1e-8
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What an update is computed from.

    Attributes:
        gradients: Parameter name to gradient.
        parameters: Parameter name to value.
        slots: The state of the optimizer.
        step: Number of steps so far.
        rate: Learning rate of the step, times the value of the schedule.
        scale: Value of the schedule.
    """

    gradients: Mapping[str, Array]
    parameters: Mapping[str, Array]
    slots: SlotArrays
    step: int
    rate: float
    scale: float


@dataclass(frozen=True, slots=True)
class Move:
    """An update that is not applied yet.

    Attributes:
        updates: Parameter name to the array that is subtracted from the parameter.
        slots: The new state of the optimizer.
        predict: Computes the change of the loss that the quadratic model predicts.
    """

    updates: dict[str, Array]
    slots: SlotArrays
    predict: Callable[[], float]


class Update(Protocol):
    """A way to compute the update of a step."""

    def new_slots(self, parameters: Mapping[str, Array]) -> SlotArrays:
        """Return the state before the first step."""

    def __call__(self, step: StepInputs) -> Move:
        """Compute the update of a step."""


@dataclass(frozen=True, slots=True)
class RatedUpdate:
    """Updates at a learning rate η, as TensorFlow's K-FAC library defines them.

    Attributes:
        engine: The engine that preconditions.
        momentum: μ in [0, 1).
        precondition_first: Whether natural gradients are averaged, in place of gradients.
        norm_constraint: Bound of ``η² uᵀ(F + λ)u``, or None.
        weight_decay: Multiple of the parameters that is added to the direction.
    """

    engine: Engine
    momentum: float
    precondition_first: bool
    norm_constraint: float | None
    weight_decay: float

    def new_slots(self, parameters: Mapping[str, Array]) -> SlotArrays:
        """Return velocities of zero."""
        return {"momentum": zeros(parameters)}

    def __call__(self, step: StepInputs) -> Move:
        """Compute the update of a step."""
        gradients, velocity = step.gradients, step.slots["momentum"]
        if self.precondition_first:
            natural = self._clipped(self.engine.precondition(gradients), gradients, step.rate)
            velocity = direction = self._averaged(velocity, natural)
            solves = False
        else:
            velocity = self._averaged(velocity, gradients)
            natural = self.engine.precondition(velocity)
            direction = self._clipped(natural, velocity, step.rate)
            solves = direction is natural and not self.weight_decay
        updates = {
            name: step.rate * (array + self.weight_decay * step.parameters[name])
            for name, array in direction.items()
        }

        def predict() -> float:
            if not solves:
                return quadratic_change(self.engine, gradients, updates)
            # (F + λ) u = v, up to the age of the inverses, so that no product with F is needed.
            along, against = dot(direction, velocity), dot(direction, gradients)
            return 0.5 * step.rate**2 * along - step.rate * against

        return Move(updates, {"momentum": velocity}, predict)

    def _averaged(
        self, velocity: Mapping[str, Array], vectors: Mapping[str, Array]
    ) -> dict[str, Array]:
        return {n: self.momentum * velocity[n] + vector for n, vector in vectors.items()}

    def _clipped(
        self, natural: dict[str, Array], vectors: Mapping[str, Array], rate: float
    ) -> dict[str, Array]:
        """Shorten natural gradients so that ``η² ⟨natural, vectors⟩`` is at most the bound."""
        product = rate**2 * dot(natural, vectors)
        if self.norm_constraint is None or product <= self.norm_constraint:
            return natural
        factor = sqrt(self.norm_constraint / product)
        return {name: factor * array for name, array in natural.items()}


@dataclass(frozen=True, slots=True)
class FixedLengthUpdate:
    """Natural gradients of the averaged gradient, each matrix scaled to a fixed length.

    The optimal length of a natural gradient step depends on the curvature, the noise and the
    damping. An update of fixed length depends on the direction only. The Frobenius norm is
    ``L √outputs``, as Muon's: each output of a layer changes by the same amount whatever their
    number. Vectors, embeddings and parameters without a layer are updated by Adam.

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

    def new_slots(self, parameters: Mapping[str, Array]) -> SlotArrays:
        """Return moments of zero; squares for the parameters that Adam updates only."""
        by_adam = {name: value for name, value in parameters.items() if name not in self.roots}
        return {"momentum": zeros(parameters), "second_moment": zeros(by_adam)}

    def __call__(self, step: StepInputs) -> Move:
        """Compute the update of a step."""
        adam = AdaptiveMoments(self.momentum, _BETA2, _EPSILON)
        adam_rate = step.scale * evaluated_rate(self.adam_rate, step.step)
        moments: dict[str, Array] = {}
        squares: dict[str, Array] = {}
        updates: dict[str, Array] = {}
        rates: dict[str, float] = {}
        for name, gradient in step.gradients.items():
            state = {slot: arrays[name] for slot, arrays in step.slots.items() if name in arrays}
            if name in step.slots["second_moment"]:
                direction, state = adam(gradient, state, step.step + 1)
                squares[name], rates[name] = state["second_moment"], adam_rate
                moments[name], updates[name] = state["momentum"], adam_rate * direction
            else:
                rates[name] = step.rate
                old = self.momentum * state["momentum"]
                moments[name] = old + (1 - self.momentum) * gradient
        updates |= self._natural(moments, step)
        if self.weight_decay:
            updates = {
                name: update + rates[name] * self.weight_decay * step.parameters[name]
                for name, update in updates.items()
            }
        slots = {"momentum": moments, "second_moment": squares}
        return Move(updates, slots, lambda: quadratic_change(self.engine, step.gradients, updates))

    def _natural(self, moments: Mapping[str, Array], step: StepInputs) -> dict[str, Array]:
        """Return the updates of the matrices."""
        debiased = 1 / (1 - self.momentum ** (step.step + 1))
        natural = self.engine.precondition({n: debiased * m for n, m in moments.items()})
        return {
            name: natural[name] * (step.rate * root / (_norm(natural[name]) + _TINY))
            for name, root in self.roots.items()
        }


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


def quadratic_change(
    engine: Engine, gradients: Mapping[str, Array], updates: Mapping[str, Array]
) -> float:
    """Return ``½ δᵀFδ + gᵀδ`` for ``δ = −updates``, with the block-diagonal Fisher matrix F.

    The damped product is reduced by ``½ λ δᵀδ``: the damping is no part of the loss.
    """
    damped = 0.5 * dot(updates, engine.precondition(updates, exp=1))
    return damped - 0.5 * engine.damping * dot(updates, updates) - dot(gradients, updates)


def dot(left: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    """Return the inner product of two vectors over the parameters."""
    return sum(float(np.vdot(array, right[name])) for name, array in left.items())
