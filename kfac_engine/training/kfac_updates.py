"""Computes K-FAC updates at a given learning rate, and defines the base of all its updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kfac_engine._types import Array
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import StageClock
from kfac_engine.training.optimizer import SlotArrays
from kfac_engine.training.vectors import Vector, Zeros, combine, dot


class Correction(NamedTuple):
    """Scales and shifts predictions that are far off their targets, in the first step.

    It changes the layers that compute the predictions of a loss, in place of a step: see
    ``Prediction``. If the errors spread ρ > 2 times as far as the targets, about their means, the
    weights are divided by ρ, and the bias becomes the mean of the targets. If only the mean error
    is larger than twice the spread of the targets, or if the predictions are not whole, it is
    subtracted from the bias. For probabilities, the bias receives the difference between the logits
    of the mean target and of the mean prediction, where that matters; for classes and counts, that
    between the logarithms. Far too large logits of classes are divided with their biases, unless
    the rates of the classes are far off, too: then the biases become the logarithms of the rates.
    """

    weights: Any  # what weights are multiplied by
    divides: Any  # whether weights change; ``centre`` replaces biases if ``due``, too
    shift: Any  # what predictions receive in other cases, ``(features,)``; zeros unless ``due``
    centre: Any  # mean target of each feature, ``(features,)``
    due: Any  # whether the means or rates of predictions change


class StepInputs(NamedTuple):
    """The inputs of an update."""

    gradients: Vector  # gradients by parameter name; may be overwritten, unless ``predicts``
    parameters: Vector  # values by parameter name
    slots: SlotArrays  # the state of the optimizer
    new_slots: SlotArrays  # arrays that receive the new state
    step: int  # number of steps so far
    loss: float  # the loss of the batch before the step
    rate: float  # learning rate of the step, times the value of the schedule
    scale: float  # value of the schedule; for ``"auto"``, times a factor for small residuals
    momentum: float | None  # momentum of the step; None if the quadratic model solves it
    damping: float  # λ of the step
    l2: float  # part of λ that belongs to the loss
    batch: Sequence[Batch]  # the parts of the batch, each with inputs and targets
    examples: int  # number of examples of the batch, of all processes
    predicts: bool  # whether the change of the loss is predicted
    clock: StageClock  # measures the stages ``"precondition"`` and ``"curvature"``
    decay: float = 1.0  # factor of the weight decay, for ``"auto"``
    # Spreads of the targets, by input of a loss, for ``"auto"``.
    spreads: Mapping[str, Any] = MappingProxyType({})
    # Corrections that take the place of a step, by input of a loss, for ``"auto"``.
    corrections: Mapping[str, Correction] = MappingProxyType({})
    # ``FeaturePowers.sums`` of the layers whose directions have bounds, on the host.
    features: Array | None = None


class Move(NamedTuple):
    """The result of an update before it is applied."""

    values: dict[str, Array]  # new values by parameter name
    # Change of the loss that the quadratic model predicts; None if it is not needed.
    predicted: float | None
    rate: float | None = None  # learning rate, if the update has solved it
    momentum: float | None = None  # momentum, if the update has solved it
    ratio: float | None = None  # reduction ratio, if the update has compared losses
    damping: float | None = None  # λ of the step, if the update has chosen it
    following: float | None = None  # λ of the next step, if the update has chosen it
    iterations: int = 0  # number of iterations of conjugate gradients
    # Fall of the loss that the model predicted, if the damping of exact steps has grown until they
    # hardly move the parameters; 0 for other steps.
    missed: float = 0.0


class Update(Protocol):
    """A way to compute the update of a step."""

    def new_slots(self, parameters: Vector) -> SlotArrays:
        """Return the state before the first step."""

    def begin(self, step: StepInputs) -> Callable[[], Move]:
        """Start a step, before the curvature is updated; the returned function calls the update."""
        return partial(self, step)

    def __call__(self, step: StepInputs) -> Move:
        """Compute the new parameters of a step, and write the new state."""


@dataclass(frozen=True, slots=True)
class RatedUpdate(Update):
    """Updates at a learning rate η, as TensorFlow's K-FAC library defines ``"adam"``."""

    engine: Engine  # the engine that preconditions
    weight_decay: float  # multiple of the parameters that is added to the direction

    def new_slots(self, parameters: Vector) -> SlotArrays:
        """Return velocities of zero."""
        return {"momentum": Zeros(parameters)}

    def __call__(self, step: StepInputs) -> Move:
        """Compute the new parameters of a step, and write the new velocities."""
        gradients, velocity = step.gradients, step.new_slots["momentum"]
        assert step.momentum is not None, "the quadratic model has its own update"
        for name, gradient in gradients.items():
            combine(velocity[name], step.momentum, step.slots["momentum"][name], 1.0, gradient)
        with step.clock("precondition"):
            natural = natural_gradients(self.engine, velocity)
        # (F + λ) u = v, up to the age of the inverses, so that no product with F is needed.
        solves, predicted = not self.weight_decay, None
        if step.predicts and solves:
            along, against = dot(natural, velocity), dot(natural, gradients)
            predicted = 0.5 * step.rate**2 * along - step.rate * against
        shrunk = 1 - step.rate * self.weight_decay
        for name, array in natural.items():  # their memory receives the new values
            combine(array, -step.rate, array, shrunk, step.parameters[name])
        if step.predicts and not solves:
            predicted = quadratic_change(self.engine, step, natural)
        return Move(natural, predicted)


def natural_gradients(engine: Engine, vectors: Vector) -> dict[str, Array]:
    """Return ``(F + λ)⁻¹`` times vectors, without the copies of tied weights that a file has.

    A layer of which the weight alone has a vector has zeros for its bias.
    """
    products = engine.fisher.multiply_power(vectors, -1)
    if len(products) == len(vectors):
        return products
    return {name: array for name, array in products.items() if name in vectors}


def quadratic_change(engine: Engine, step: StepInputs, values: Vector) -> float:
    """Return ``½ δᵀFδ + gᵀδ`` for the change δ to new values, F the block-diagonal Fisher matrix.

    The damped product is reduced by ``½ λ δᵀδ``, because the damping is not part of the loss, and
    increased by ``½ l2 δᵀδ``.
    """
    change = {name: value - step.parameters[name] for name, value in values.items()}
    damped = 0.5 * dot(change, engine.precondition(change, exp=1))
    surplus = 0.5 * (engine.damping - step.l2) * dot(change, change)
    return damped - surplus + dot(step.gradients, change)
