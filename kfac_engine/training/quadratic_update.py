"""Chooses the learning rate and momentum that minimize the quadratic model of the loss.

Source: Martens & Grosse 2015, arXiv:1503.05671, section 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.curvature_products import CurvatureProducts
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import NonFiniteError
from kfac_engine.training.curvature_updates import PartialBatch
from kfac_engine.training.kfac_updates import Move, StepInputs, Update, natural_gradients
from kfac_engine.training.optimizer import SlotArrays
from kfac_engine.training.vectors import Vector, Zeros, combine, dot


@dataclass(frozen=True, slots=True)
class QuadraticModel:
    """The change ``cᵀx + ½ xᵀ(C + λB)x`` of the damped loss for the update ``Σ xᵢ directionᵢ``."""

    # c, the inner products of the gradient with the directions, ``(m,)``.
    slopes: NDArray[np.float64]
    curvature: NDArray[np.float64]  # C, the forms ``directionᵢᵀ F directionⱼ``, ``(m, m)``
    gram: NDArray[np.float64]  # B, the inner products of the directions, ``(m, m)``
    damping: float  # λ, which contains ``l2``
    l2: float  # part of λ that belongs to the loss
    precision: float  # machine epsilon of the directions

    def minimum(self, last: float | None = None) -> NDArray[np.float64]:
        """Return the coefficients ``(m,)`` that minimize the model.

        If the last coefficient is given, the minimum is one over the others. Directions that are
        equal up to rounding share their part of the update, and a direction of zeros has the
        coefficient zero. A curvature that overflows raises a NonFiniteError.
        """
        H, c = self.curvature + self.damping * self.gram, self.slopes
        if not (np.isfinite(H).all() and np.isfinite(c).all()):
            raise NonFiniteError(
                "the quadratic model of the loss overflows; check the gradient and the data for "
                "huge numbers."
            )
        if last is None:
            return self._solution(H, -c)
        free = self._solution(H[:-1, :-1], -c[:-1] - last * H[:-1, -1])
        return np.append(free, last)

    def change(self, x: NDArray[np.float64]) -> float:
        """Return the change of the loss for the coefficients ``x``, without the damping."""
        H = self.curvature + self.l2 * self.gram
        return float(self.slopes @ x + 0.5 * x @ H @ x)

    def _solution(self, H: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Solve ``H x = right``; the smallest solution where ``H`` is singular."""
        diagonal = np.diag(H)
        scale = np.where(diagonal > 0, 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1)), 0)
        # Entries of the scaled matrix are at most 1, with some roundings of the precision.
        inverse = np.linalg.pinv(
            scale[:, None] * H * scale, rcond=16 * self.precision, hermitian=True
        )
        solution: NDArray[np.float64] = scale * (inverse @ (scale * right))
        return solution


# Largest change of a parameter in a step, as a part of its norm.
_LARGEST_CHANGE = 1.0


@dataclass(frozen=True, slots=True)
class QuadraticUpdate(Update):
    """``v ← μ v − α p``, ``θ ← θ − v`` for the natural gradient p, with α from the quadratic model.

    The model predicts the change for the update ``α p + μ d`` with the previous update ``d = −v``.
    Its curvature is the whole Fisher matrix on a part of the batch. μ is solved as well, or given;
    where the model rises with a given μ, the step has μ = 0. Both are multiplied by a part if a
    parameter would otherwise change by more than its norm, in a network of several layers.

    Source: Martens & Grosse 2015, arXiv:1503.05671, section 7.
    """

    engine: Engine  # the engine that preconditions
    # Chooses the part of a batch on which the curvature of the model is computed.
    part: PartialBatch
    weight_decay: float  # part of the parameters that is subtracted in each step

    def new_slots(self, parameters: Vector) -> SlotArrays:
        """Return velocities of zero."""
        return {"momentum": Zeros(parameters)}

    def _products(self, parts: Sequence[Batch], examples: int | None) -> CurvatureProducts | None:
        """Return products with the Fisher matrix of examples; None if no target of them counts."""
        products = self.engine.curvature_products(parts, examples=examples)
        return products if all(products.totals) or examples is None else None

    def __call__(self, step: StepInputs) -> Move:
        """Compute the new parameters of a step, and write the new velocities."""
        with step.clock("precondition"):
            natural = natural_gradients(self.engine, step.gradients)
        with step.clock("curvature"):
            products = self.part.first(step.step, step.batch, self._products)
        old, new = step.slots["momentum"], step.new_slots["momentum"]
        moves = any(bool(array.any()) for array in old.values())
        model = _model(step, products, (natural, old) if moves else (natural,))
        # The velocity is the negative previous update.
        last = None if step.momentum is None or not moves else -step.momentum
        x = model.minimum(last)
        if last is not None and model.change(x) > 0:
            x = model.minimum(0.0)
        mu = -float(x[1]) if moves else step.momentum or 0.0
        for name, array in natural.items():
            combine(new[name], mu, old[name], -float(x[0]), array)
        # The model of a single layer is exact, or nearly so.
        several = len(self.engine.collection.fisher_blocks) > 1
        if several and (part := _allowed_part(new, step)) < 1:
            x, mu = part * x, part * mu
            for array in new.values():
                array *= part
        predicted = model.change(step.rate * x)
        for name, array in natural.items():  # their memory receives the new values
            shrunk = 1 - step.rate * self.weight_decay
            combine(array, -step.rate, new[name], shrunk, step.parameters[name])
        if self.weight_decay and step.predicts:
            change = {name: value - step.parameters[name] for name, value in natural.items()}
            predicted = _model(step, products, (change,)).change(np.ones(1))
        exact = step.predicts or not self.weight_decay
        return Move(natural, predicted if exact else None, -step.rate * float(x[0]), mu)


def _allowed_part(velocity: Vector, step: StepInputs) -> float:
    """Return the part of an update in which no parameter changes by more than its norm.

    A norm below 1 counts as 1, so that parameters that start at zero move. Far from the parameters
    the quadratic model of a network is wrong: layers multiply each other's changes.
    """
    part = 1.0
    for name, value in step.parameters.items():
        change = step.rate * sqrt(dot({name: velocity[name]}, velocity))
        allowed = _LARGEST_CHANGE * max(1.0, sqrt(dot({name: value}, step.parameters)))
        part = min(part, allowed / change) if change > allowed else part
    return part


def _model(
    step: StepInputs, products: CurvatureProducts, directions: tuple[Vector, ...]
) -> QuadraticModel:
    with step.clock("curvature"):
        curvature = products.quadratic_forms(*directions)
    gram = np.array([[dot(one, other) for other in directions] for one in directions])
    slopes = np.array([dot(step.gradients, one) for one in directions])
    types = {array.dtype for array in step.gradients.values()}
    precision = max(float(np.finfo(dtype).eps) for dtype in types)
    return QuadraticModel(slopes, curvature, gram, step.damping, step.l2, precision)
