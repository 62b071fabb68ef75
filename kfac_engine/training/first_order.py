"""Defines SGD, Adam, AdamW and Muon, which apply an update rule to each parameter's gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_bool, check_list, check_number, check_positive
from kfac_engine.backend.namespace import is_recorded, recordable
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rollback import Undo
from kfac_engine.errors import InputError
from kfac_engine.layers.parameter_slices import Piece
from kfac_engine.training.optimizer import (
    NonFinitePolicy,
    Optimizer,
    Proposal,
    Rate,
    SlotArrays,
    StepReport,
    check_rate,
    evaluated,
)
from kfac_engine.training.rules import AdaptiveMoments, HeavyBall, Orthogonalized, Rule
from kfac_engine.training.units import Units
from kfac_engine.training.vectors import (
    Vector,
    Zeros,
    add_multiple,
    block_of,
    by_name,
    combine,
    dot,
    groups,
    joined,
    parts,
)

# A step whose entries and terms stay below these numbers cannot overflow: the square of the largest
# entry and the largest term are finite in float32.
_LARGEST_ENTRY, _LARGEST_TERM = 1e18, 1e37

# Rate of Adam for the parameters that an optimizer of matrices does not update itself.
ADAM_RATE = 0.004


@dataclass(frozen=True, slots=True)
class _Setting:
    """How the parameters are updated."""

    units: Units  # the division of the parameters
    rules: Mapping[str, Rule]  # update rules by unit
    # Whether weight decay shrinks the parameters directly, in place of a term of the gradient.
    decoupled: bool
    momentum: float  # the momentum in reports
    # The units; units of small arrays with one rule are updated together.
    groups: Sequence[tuple[str, ...]] = ()


class _FirstOrder(Optimizer):
    """An optimizer with one update rule for each parameter."""

    _setting: _Setting

    def _units(self, is_matrix: Callable[[Piece], bool] = lambda _: False) -> Units:
        return Units(self.engine, self._names, is_matrix)

    def _set_up(self, setting: _Setting) -> None:
        parameters = setting.units.split(self._parameters())
        kinds = {name: rule if rule.elementwise else None for name, rule in setting.rules.items()}
        together = [*groups(parameters, kinds)]
        self._setting = replace(setting, groups=together)
        # Arrays of a group are adjacent.
        order = {name: setting.rules[name] for names in together for name in names}
        for slot in dict.fromkeys(slot for rule in order.values() for slot in rule.slots):
            self._slots[slot] = Zeros(
                {n: parameters[n] for n, r in order.items() if slot in r.slots}
            )
        self._sealed = True

    def _rates(self, rate: float, steps: int) -> dict[str, float]:
        """Return the learning rates of a step, by unit."""
        del steps
        return dict.fromkeys(self._setting.rules, rate)

    def _propose(
        self, batch: Sequence[Batch], scale: float, clock: StageClock, undo: Undo
    ) -> Proposal:
        del undo
        rate = evaluated(self._learning_rate, self.steps)
        loss, gradients, *_ = self._differentiated(batch, clock)
        parameters = self._parameters()
        rates = {n: scale * r for n, r in self._rates(rate, self.steps).items()}
        in_place = self._cannot_fail(gradients, parameters, rates)
        slots = self._slots if in_place else self._new_slots()
        values = self.moved(gradients, parameters, (self._slots, slots), self.steps, scale)
        momentum = self._setting.momentum
        report = StepReport(loss, scale * rate, momentum, seconds=clock.seconds)
        return Proposal(values, slots, report)

    @property
    def _states(self) -> int:
        """Number of states in memory: 1 if a step fails only by its numbers, else 2.

        With several processes, a step can fail in another process; on a GPU, for lack of memory.
        """
        on_host = all(isinstance(array, np.ndarray) for array in self._parameters().values())
        return 1 if on_host and self.engine.passes.agreement.alone else 2

    def _cannot_fail(
        self, gradients: Vector, parameters: Vector, rates: Mapping[str, float]
    ) -> bool:
        """Return whether a step is finite for sure, so that its state needs no copy."""
        if self._states > 1:
            return False
        vectors = (gradients, parameters, self._slots["momentum"].blocks)
        norm = sqrt(sum(dot(vector, vector) for vector in vectors))  # NaN for a gradient of NaN
        norm *= 1 + self._weight_decay
        longest = max(rule.gain * max(1.0, rates[n]) for n, rule in self._setting.rules.items())
        return norm < _LARGEST_ENTRY and max(norm, 1.0) * longest < _LARGEST_TERM

    @recordable
    def moved(
        self,
        gradients: Vector,
        parameters: Vector,
        slots: tuple[SlotArrays, SlotArrays],
        steps: int,
        scale: float,
    ) -> dict[str, Array]:
        """Return the new parameters after ``steps`` steps, and write the new state.

        Gradients may be overwritten. ``slots`` are the old state, and the arrays that receive the
        new one. ``scale`` is the value of the schedule.
        """
        rates = self._rates(evaluated(self._learning_rate, steps), steps)
        decay, decoupled, units = self._weight_decay, self._setting.decoupled, self._setting.units
        values, gradients = units.split(parameters), units.split(gradients)
        recorded = any(map(is_recorded, gradients.values()))
        for names in [(name,) for name in gradients] if recorded else self._setting.groups:
            rule, step = self._setting.rules[names[0]], scale * rates[names[0]]
            gradient, old_value = joined(gradients, names), joined(values, names)
            if decay and not decoupled:
                add_multiple(gradient, decay, old_value)
            state = (block_of(arrays[slot], names) for arrays in slots for slot in rule.slots)
            operands = (gradient, old_value, *state)
            shrunk = 1 - step * decay if decoupled else 1.0
            for g, value, *both in parts(*operands) if rule.elementwise else (operands,):
                count = len(rule.slots)
                old, new = (
                    dict(zip(rule.slots, s, strict=True)) for s in (both[:count], both[count:])
                )
                direction = rule(g, old, new, steps + 1)
                # The gradient is not needed any more: its memory receives the new value.
                combine(g, -step, direction, shrunk, value)
            gradients |= by_name(gradient, names, values)
        return units.join(gradients, parameters)


class SGD(_FirstOrder):
    """Gradient descent with momentum: ``v ← μ v + g + w θ``, ``θ ← θ − η v``.

    Args:
        engine: The engine whose parameters are trained.
        learning_rate: η, a number or a function of the number of steps so far.
        momentum: μ in [0, 1).
        nesterov: Whether the parameters move by ``η (g + w θ + μ v)`` (Nesterov's momentum).
        weight_decay: w, at least 0.
        non_finite: ``"raise"`` or ``"skip"``: see ``step``.
    """

    def __init__(
        self,
        engine: Engine,
        learning_rate: Rate = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        super().__init__(engine, learning_rate, weight_decay, non_finite)
        check_number("momentum", momentum, "[0, 1)")
        check_bool("nesterov", nesterov)
        rules = dict.fromkeys(self._names, HeavyBall(momentum, nesterov))
        self._set_up(_Setting(self._units(), rules, False, momentum))


class Adam(_FirstOrder):
    """Adam (Kingma & Ba 2015), with weight decay as a term of the gradient.

    Args:
        engine: The engine whose parameters are trained.
        learning_rate: A number or a function of the number of steps so far.
        betas: Decays of the mean of gradients and of squared gradients, each in [0, 1).
        epsilon: Added to the root of the mean square, positive.
        weight_decay: Multiple of the parameters that is added to the gradients, at least 0.
        non_finite: ``"raise"`` or ``"skip"``: see ``step``.
    """

    _decoupled = False

    def __init__(
        self,
        engine: Engine,
        learning_rate: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        super().__init__(engine, learning_rate, weight_decay, non_finite)
        rule = adaptive_moments(betas, epsilon)
        rules = dict.fromkeys(self._names, rule)
        self._set_up(_Setting(self._units(), rules, self._decoupled, rule.beta1))


class AdamW(Adam):
    """Adam with decoupled weight decay: ``θ ← θ − η (m̂ / (√v̂ + ε) + w θ)``.

    Source: Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2.

    Args:
        engine: The engine whose parameters are trained.
        learning_rate: A number or a function of the number of steps so far.
        betas: Decays of the mean of gradients and of squared gradients, each in [0, 1).
        epsilon: Added to the root of the mean square, positive.
        weight_decay: w, at least 0.
        non_finite: ``"raise"`` or ``"skip"``: see ``step``.
    """

    _decoupled = True

    def __init__(
        self,
        engine: Engine,
        learning_rate: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        super().__init__(engine, learning_rate, betas, epsilon, weight_decay, non_finite=non_finite)


class Muon(_FirstOrder):
    """Muon: orthogonalized momentum for matrices, Adam for vectors.

    Muon updates a layer's weights as matrices from inputs to outputs, whatever their layout in the
    file. Each group of a convolution, each expert, and each part of the outputs that the graph
    reads separately is a matrix. Adam updates biases, scales and parameters without a layer, with
    the betas 0.9 and 0.999. Weight decay is decoupled.

    Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Args:
        engine: The engine whose parameters are trained.
        learning_rate: Rate of the matrices, a number or a function of the number of steps so far.
        momentum: μ of the matrices, in [0, 1).
        nesterov: Whether Nesterov's momentum is orthogonalized.
        weight_decay: Multiple of the parameters that is added to the direction, at least 0.
        adam_rate: Rate of the vectors, a number or a function of the number of steps so far.
        non_finite: ``"raise"`` or ``"skip"``: see ``step``.
    """

    def __init__(
        self,
        engine: Engine,
        learning_rate: Rate = 0.03,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        adam_rate: Rate = ADAM_RATE,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        super().__init__(engine, learning_rate, weight_decay, non_finite)
        check_number("momentum", momentum, "[0, 1)")
        check_bool("nesterov", nesterov)
        check_rate("adam_rate", adam_rate)
        units = self._units(lambda _: True)
        rules: dict[str, Rule] = dict.fromkeys(units.split(self._parameters()), adaptive_moments())
        for unit, weight in units.weights.items():
            matmul = engine.collection.backend.matmul
            rules[unit] = Orthogonalized(weight, momentum, nesterov, matmul)
        self._adam_rate = adam_rate
        self._set_up(_Setting(units, rules, True, momentum))

    def _rates(self, rate: float, steps: int) -> dict[str, float]:
        adam_rate = evaluated(self._adam_rate, steps)
        rules = self._setting.rules
        return {n: rate if isinstance(rules[n], Orthogonalized) else adam_rate for n in rules}


def adaptive_moments(
    betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8
) -> AdaptiveMoments:
    """Return Adam's rule; an InputError where a number lies outside its range."""
    if len(check_list("betas", betas, "(0.9, 0.999)")) != 2:
        raise InputError(f"betas must be two numbers, such as (0.9, 0.999), got {betas!r:.80}.")
    for beta in betas:
        check_number("each of betas", beta, "[0, 1)")
    check_positive("epsilon", epsilon)
    beta1, beta2 = betas
    return AdaptiveMoments(beta1, beta2, epsilon)
