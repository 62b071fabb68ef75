"""Computes the K-FAC optimizer's updates whose lengths need no learning rate.

A matrix moves along its natural gradient with equal singular values. The length of the update
follows from the agreement of the next gradient with the last update: an update that still descends
was short.
"""

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from math import inf, log, prod, sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module, is_recorded, on_device
from kfac_engine.backend.protocol import Backend, ManyArrays
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.engine.engine import Engine
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.losses.outliers import OutlierLoss
from kfac_engine.training.average_span import AverageSpan
from kfac_engine.training.feature_bounds import (
    POWERS,
    FeatureBounds,
    Shortened,
    feature_bounds,
)
from kfac_engine.training.gradient_weight import GradientWeight
from kfac_engine.training.kfac_updates import (
    Correction,
    Move,
    StepInputs,
    Update,
    natural_gradients,
    quadratic_change,
)
from kfac_engine.training.optimizer import Rate, SlotArrays, evaluated
from kfac_engine.training.predictions import Prediction, predictions_of
from kfac_engine.training.rules import (
    POLYNOMIAL,
    AdaptiveMoments,
    MatMul,
    largest_singular_values,
    orthogonalize,
)
from kfac_engine.training.units import Units
from kfac_engine.training.vectors import (
    Products,
    Vector,
    Zeros,
    block_of,
    by_name,
    combine,
    combine_all,
    groups,
    inner_products,
    joined,
    parts,
    views_of,
)
from kfac_engine.training.weight_roles import (
    BY_ADAM,
    adapters,
    few_numbers,
    joined_by_blocks,
    rates_of_logits,
    wide_heads,
    widths_of,
)

_BETA2, _EPSILON = 0.999, 1e-8

# Momentum of the averages, unless it is given.
AVERAGE = 0.85
# Slots that have an array for each unit, and that exact steps do not need.
KEPT = ("natural_gradient", "second_moment")
# Slots whose new arrays may be the old ones: see ``AdaptiveLengthUpdate._is_bounded``.
IN_PLACE = ("momentum", "second_moment")
# A step in place cannot overflow if gradients, averages and updates are shorter than this.
_LARGEST_ENTRY = 1e18
# Number of entries of the weights whose averages one step ahead are in memory together.
_PORTION = 1 << 21

# log k decays by this part in a step and grows by the agreement times the gain. An agreement of 1
# doubles k in two steps; a constant agreement c leads to k = exp(4 c).
_DECAY, _GAIN = 0.1, 0.4
_LEAST, _LARGEST = 0.1, 20.0
# A step goes back, and log k falls by ``_CUT``, where all updates together were far too long: the
# loss rises along them by more than ``_FAR`` times the fall at their start, and by more than the
# loss.
_CUT, _FAR = 1.0, 3.0

# Few numbers move up to ``1 + _OF_NUMBERS`` times as far as Adam moves them, if they are at least
# ``_LARGE``. Smaller ones, such as a variance near zero, would change their sign.
_OF_NUMBERS, _LARGE = 4.0, 0.2

# Spread of targets below which the lengths of their predictions are ten times as long.
_SMALL = 0.1

# The lengths of adapters are multiplied by this number: the model around them is already trained.
_OF_ADAPTERS = 0.8

# Largest number of Newton–Schulz iterations of a matrix.
_ITERATIONS = 5
# A matrix with a smaller side keeps its natural gradient, unless it belongs to an adapter.
_SMALLEST_SIDE = 16
# Few rows suffice for statistics of few features, unless the rows are positions of few examples: a
# side below ``_SMALL_SIDE`` needs ``_ROWS_OF_SMALL`` rows of the batch for each iteration.
_SMALL_SIDE, _ROWS_OF_SMALL = 64, 512
# Each example of a batch adds at most this number of singular values to the length of an update,
# and each row of the layer with the fewest at most this part of the loss to the predicted fall.
_OF_EXAMPLE, _OF_LOSS = 2.0, 0.1
# Products with factors whose sides have a smaller sum take less time than the rest of a step.
_NARROW = 512


def input_moment(block: FisherBlock) -> float:
    """Return the mean square of the inputs of a layer, from the average of a block."""
    packing, factor = block.packing, block.factors[0]
    if packing is None or block.symbols[:1] != ("A",):  # the block has no average of the inputs
        return 1.0
    return (factor.trace() - packing.has_bias) / (factor.side - packing.has_bias)


@dataclass(frozen=True, slots=True)
class Together:
    """Names whose arrays an update computes in one call, as one array; see ``groups``."""

    means: Sequence[tuple[str, ...]]  # parameters whose gradients are averaged together
    by_adam: Sequence[tuple[str, ...]]  # units that Adam updates together
    lengths: Sequence[tuple[str, ...]]  # weights whose step sizes are computed together


class Turn(NamedTuple):
    """What the gradient of a step tells about the last updates."""

    last: Products  # inner products of the gradient with the last directions
    part: Any  # part of the last updates that the step takes back
    far: Any  # whether the step goes back; False, True or recorded
    back: Any  # whether the step goes back, or corrects predictions
    onward: Any  # the negation of ``back``
    weight: Any  # factor of the gradient; 0 if ``back``
    squares: Products  # squared norms of the gradient times ``weight``
    corrections: Mapping[str, Correction]  # by the weight or bias that they change


class Measured(NamedTuple):
    """A direction that several steps may take, and what a step has measured of it."""

    direction: Array
    examples: int  # number of examples of the batch
    square: Any  # ``|p|²`` of each matrix
    least: Any  # see ``_least_squares``; None for no bound


class Descent(NamedTuple):
    """The directions of a step, for which a search finds lengths."""

    gradients: dict[str, Array]  # by unit, times ``Turn.weight``
    # Gradients of the parameters that are averaged together, on one axis.
    joint: Mapping[tuple[str, ...], Array]
    natural: Vector  # the direction of each weight
    active: Vector  # see ``Shortened``
    due: Mapping[str, Any]  # whether the direction of a weight is new
    momentum: Any  # decay of the averages for matrices


@dataclass(frozen=True, slots=True)
class AdaptiveLengthUpdate(Update):
    """Orthogonalized natural gradients of the averaged gradient, each scaled to its own length.

    docs/default_rule.md has the reasons. For a matrix, the average is Nesterov's momentum, one step
    ahead: ``μ v' + (1 − μ) g = μ² v + (1 − μ²) g`` with ``v' = μ v + (1 − μ) g``, which Adam reads.
    ``AverageSpan`` chooses the μ of matrices; in other averages, and without a span, it is
    ``momentum``. Vectors, embeddings, parameters without a layer and layers of very many classes
    (``wide_heads``) are updated by Adam; see ``rates_of_logits`` for the rate of weights that
    compute logits. Adam's direction d of few numbers θ, such as a temperature, is multiplied by
    ``1 + 4 min(d², 1, 5 |θ|)``: an entry of d is near ±1 while its gradients agree, and near 0
    where they are noise.

    The direction p of a matrix is its natural gradient, with singular values that Newton–Schulz
    iterations bring close to one (``_iterations``). It remains the natural gradient for few rows,
    for a side below 16 unless the matrix belongs to an adapter, and where p would be no descent
    direction for the averaged gradient. The natural gradient is one, because biases do not enter
    it. In a batch with fewer rows than ``widths``, if these are above 512, a matrix has a new
    direction in every second step only, unless ``c < −1``: one half of these matrices in even
    steps, the other half in odd ones.

    The Frobenius norm of an update, with the length L, the smaller side and N examples, is ::

        k L √outputs min(1, √(2 N / side) |p| / σ)

    where σ is the largest singular value of p; the minimum is for the matrices ``equal``. The
    multiple k follows from the agreement ``c = ⟨g, p⟩ / ⟨g', p⟩`` of the gradient g with the last
    direction p, where g' is the gradient of the step that computed p, and from the step's scale s::

        log k ← 0.9 log k + 0.4 s min(max(c, −1), 1)        0.1 ≤ k ≤ 20

    In a product ``s A B`` of low rank, as in an adapter, ``√outputs`` is ``0.8 √(√(inputs outputs)
    / |s|)``. All updates are multiplied by ``min(1, M |loss| / (10 F))``, where the loss falls by
    ``F = Σ α ⟨g', p⟩`` at their start, with the step sizes α and the rows M of the batch in the
    layer with the fewest. F contains the penalties, the loss does not.

    Where the loss has risen along the last updates by ``R = −Σ α ⟨g, p⟩ > max(|loss|, 3 F)``, the
    step takes the part ``R / (F + R)`` of them back, log k of each matrix falls by 1, and the
    gradient counts as zero in the averages. An unusually long gradient has less weight: see
    ``GradientWeight``.

    If predictions in the unit of their targets are a sum over layers with factors c
    (``Prediction``), the length of a layer's matrix is multiplied by ``u / max(1, v)`` and the rate
    of its bias by u, with the root mean square v of the layer's inputs, the spread t of the targets
    (``Residuals``) divided by c, and ``u = max(t, min(10 t, 1))``; u is at most 1 if the sum has
    other values. A first step may correct these layers in place of an update (``Correction``).

    A matrix is the matrix of a layer, whatever its layout in the file: see ``Piece.matrices``. Each
    group of a convolution, each expert of a stack and each part of the outputs that the graph reads
    apart has a matrix of its own.
    """

    engine: Engine
    # Returns natural gradients of vectors by parameter.
    precondition: Callable[[Vector], dict[str, Array]]
    units: Units  # the division of the parameters; its weights are the matrices
    together: "Together"  # the parameters and units that are updated in one call
    # √outputs of the matrices of each weight, or 0.8 √(√(inputs outputs) / |s|): see ``adapters``.
    roots: Mapping[str, float]
    sides: Mapping[str, int]  # smaller side of the matrices of each weight
    equal: Collection[str]  # the weights whose singular values may become equal
    widths: Mapping[str, float]  # sum of the sides of the factors of each weight
    # The steps with new directions of wide weights, which have one in every second step: 0 for even
    # ones, 1 for odd ones. An array for a stack.
    turns: Mapping[str, Any]
    blocks: Mapping[str, FisherBlock]  # the block of the layer of each weight
    # Number of the group of each weight and of each parameter with weights. Parameters that blocks
    # join are one group.
    groups: Mapping[str, int]
    moved: Sequence[str]  # the units of the parameters that have weights
    matmul: MatMul  # the product of two matrices
    momentum: float  # decay of the average of gradients, in [0, 1)
    adam: AdaptiveMoments  # the rule of the units that are not weights
    adam_rate: Rate  # learning rate of Adam
    # Parameters shrink by this number times the rate of their update and the factor ``decay`` of
    # the step.
    weight_decay: float
    # Rows of each example in the factors of a weight, until they are measured.
    repeats: Mapping[str, float] = field(default_factory=dict)
    # The predictions that a layer computes, by its weight or bias.
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    # Names of the parameters that a first step may divide: the matrices, heads that Adam updates,
    # and biases of logits that do not have an entry for each feature, as those of convolutions.
    divisible: Collection[str] = ()
    # Biases of predicted means, which do not decay: the mean of the targets may be far from zero.
    intercepts: Collection[str] = ()
    # Factors of Adam's rate for weights that compute logits, by unit.
    factors: Mapping[str, float] = field(default_factory=dict)
    # Parameters of few entries: see ``few_numbers``.
    numbers: Collection[str] = ()
    # Returns the mean square of the inputs of a block.
    moment: Callable[[FisherBlock], Any] = input_moment
    # Bounds of the directions along single features.
    features: FeatureBounds = field(default_factory=FeatureBounds)
    # Chooses the decay of the averages for matrices; None for ``momentum``.
    span: AverageSpan | None = None
    weight: GradientWeight = field(default_factory=GradientWeight)
    # Weights with the matrices of several layers: each matrix has a new direction in its own steps.
    independent: Collection[str] = ()
    # What the last step has measured of the directions of wide weights on the host. Clear it before
    # directions change in place.
    measured: dict[str, Measured] = field(default_factory=dict)

    def new_slots(self, parameters: Vector) -> SlotArrays:
        """Return the state before the first step.

        Returns:
            Averaged gradients by parameter. By unit: squared gradients where Adam updates; for each
            weight the last direction p, and of each of its matrices ``⟨g', p⟩``, ``log k`` and the
            step size: the update is its product with p. The powers of the features of each input.
            The state of the span of the averages, and of the weight of gradients.
        """
        units, weights = self.units.split(parameters), self.units.weights
        means, by_adam = self.together.means, self.together.by_adam
        counts = {name: len(weight.matrices(units[name])) for name, weight in weights.items()}
        numbers = {name: np.empty(n if n > 1 else ()) for name, n in counts.items()}
        return {
            "momentum": Zeros({name: parameters[name] for names in means for name in names}),
            "second_moment": Zeros({name: units[name] for names in by_adam for name in names}),
            "natural_gradient": Zeros({name: units[name] for name in weights}),
            **{slot: Zeros(numbers) for slot in ("slope", "log_length", "step_size")},
            POWERS: Zeros(self.features.new_slots(units)),
            **self.weight.new_slots(numbers),
            **(self.span.new_slots(numbers) if self.span else {}),
        }

    def keep(self, slots: SlotArrays, parameters: Vector) -> None:
        """Write parameters into the slots ``KEPT`` of a new state."""
        units = self.units.split(parameters)
        for slot in KEPT:
            for name, array in slots[slot].items():
                array[...] = units[name]

    def kept(self, slots: SlotArrays, parameters: Vector) -> dict[str, Array]:
        """Return the parameters that ``keep`` wrote; others are those of ``parameters``."""
        units = dict(ChainMap(*(slots[slot] for slot in KEPT)))
        return {n: array.copy() for n, array in self.units.join(units, parameters).items()}

    def __call__(self, step: StepInputs) -> Move:
        """Compute the new parameters of a step, and write the new state."""
        return self.begin(step)()

    def begin(self, step: StepInputs) -> Callable[[], Move]:
        """Start to compute the inner products that decide on a step; see ``Update.begin``."""
        directions, gradients = step.slots["natural_gradient"], self.units.split(step.gradients)
        products = self._products(step, (gradients, directions), (gradients, gradients))
        return partial(self._finish, step, products)

    def _finish(self, step: StepInputs, products: Callable[[], list[Products]]) -> Move:
        """Complete a step with the inner products of its gradient."""
        turn = self._turn(step, *products())
        weight, recorded = turn.weight, is_recorded(turn.weight)
        if recorded or step.predicts:
            number = weight.astype(np.float32) if recorded else weight
            step = step._replace(gradients={n: g * number for n, g in step.gradients.items()})
        elif weight != 1:
            for gradient in step.gradients.values():
                gradient *= weight
        with self.engine.collection.backend.shared_reads():
            descent = self._descend(step, turn)
            measured = self._measured(step, descent)
            self._write_step_sizes(step, measured, turn, descent.due)
        # By how much each weight moves along its direction.
        sizes: Vector = step.new_slots["step_size"]
        if turn.back is not False:
            last = step.slots["step_size"]
            sizes = {name: size - turn.part * last[name] for name, size in sizes.items()}
        values = self._moved(step, turn, descent, sizes)
        predicts = step.predicts and not turn.back
        return Move(
            values,
            quadratic_change(self.engine, step, values) if predicts else None,
            momentum=descent.momentum,
        )

    def _turn(self, step: StepInputs, last: Products, squares: Products) -> Turn:
        """Return how the gradient agrees with the last updates, and whether the step goes back.

        ``last`` are its inner products with the last directions, and ``squares`` with itself.
        """
        part = self._part_back(step, last)
        recorded = is_recorded(part)
        back: Any = part > 0 if recorded else bool(part)
        far, corrections = back, dict[str, Correction]()
        for name, prediction in self.predictions.items() if step.corrections else ():
            correction = step.corrections.get(prediction.loss)
            if correction is None:
                continue
            whole = prediction.is_whole(self.divisible)
            if name in self.divisible and whole:
                due = correction.divides
            elif prediction.bias and np.shape(correction.shift) == step.parameters[name].shape:
                due = np.logical_or(correction.due, correction.divides) if whole else correction.due
            else:  # the bias of means of a convolution, or of a view with other features
                continue
            corrections[name] = correction
            back = np.logical_or(back, due) if recorded else back or due
        onward = np.logical_not(back) if recorded else not back
        weight = self.weight.of_step(step.slots, step.new_slots, squares, step.step, back)
        if recorded or weight != 1:
            last = {names: weight * numbers for names, numbers in last.items()}
            squares = {names: weight**2 * numbers for names, numbers in squares.items()}
        return Turn(last, part, far, back, onward, weight, squares, corrections)

    def _descend(self, step: StepInputs, turn: Turn) -> Descent:
        """Average the gradients, and return the directions of the weights."""
        gradients = self.units.split(step.gradients)
        due = self._due(step, turn)
        joint = {names: joined(step.gradients, names) for names in self.together.means}
        momentum = self.momentum if self.span is None else self.span.momentum_of(step.slots)
        with step.clock("precondition"):
            natural, active = self._natural_gradients(joint, momentum**2, step, due)
        return Descent(gradients, joint, natural, active, due, momentum)

    def _moved(
        self, step: StepInputs, turn: Turn, descent: Descent, sizes: Vector
    ) -> dict[str, Array]:
        """Write the averages; return the new parameters, in the arrays of the gradients."""
        if _is_in_place(step) and not self._is_bounded(step, turn, descent, sizes):
            step.new_slots.update({slot: Zeros(step.slots[slot]) for slot in IN_PLACE})
        grouped = self._average(step, descent.joint, descent.momentum)
        averages = self.units.split(step.new_slots["momentum"])
        if self.span is not None:
            squares, due = [turn.squares], self.span.is_due(step.step, turn.onward)
            if due is not False:
                squares += self._products(step, (averages, averages))()
            self.span.write(step.slots, step.new_slots, squares, due)
        step.new_slots["natural_gradient"] = Zeros({})
        step.new_slots["natural_gradient"].update(descent.natural)
        gradients, parameters = descent.gradients, self.units.split(step.parameters)
        if step.predicts:  # the change is compared with the gradient
            gradients = {name: gradient.copy() for name, gradient in gradients.items()}
        self._move(gradients, descent.natural, parameters, sizes, step, turn.corrections)
        for names in self.together.by_adam:
            value, mean = grouped.get(names) or (joined(gradients, names), joined(averages, names))
            self._by_adam(names, value, mean, joined(parameters, names), step)
            gradients |= by_name(value, names, gradients)
        values = self.units.join(gradients, step.parameters)
        return self._shifted(values, turn.corrections) if turn.corrections else values

    def _is_bounded(self, step: StepInputs, turn: Turn, descent: Descent, sizes: Vector) -> bool:
        """Return whether the new averages and parameters are finite for sure.

        The natural gradients are finite, because ``precondition`` refuses others.
        """
        if turn.back or step.corrections:
            return False
        adam = step.scale * evaluated(self.adam_rate, step.step)
        if self.numbers:
            adam *= 1 + _OF_NUMBERS
        least = min([1.0, *(prediction.scale for prediction in self.predictions.values())])
        unit = max([1.0, *step.spreads.values()]) / (_SMALL * least)
        if max(adam, step.rate) * step.decay * self.weight_decay > 1 or adam * unit > 1e6:
            return False
        squares, old = 0.0, step.slots["momentum"]
        for names, gradient in descent.joint.items():
            if not self.roots.keys() >= {*names}:  # Adam squares gradients and divides averages
                for array in (gradient, block_of(old, names)):
                    squares += float(np.vdot(array, array))
        for name, direction in descent.natural.items():
            size = float(np.abs(sizes[name]).max())
            known = self.measured.get(name)
            square = np.vdot(direction, direction) if known is None else known.square.sum()
            squares += (size * size) * float(square)
        return squares < _LARGEST_ENTRY**2

    def _shifted(
        self, values: dict[str, Array], corrections: Mapping[str, Correction]
    ) -> dict[str, Array]:
        """Return new parameters with the corrected biases and heads of predictions."""
        for name, correction in corrections.items():
            prediction = self.predictions[name]
            if prediction.bias:
                whole = prediction.is_whole(self.divisible)
                values[name] = prediction.bias.corrected(values[name], correction, whole=whole)
            elif name not in self.units.weights:  # a head that Adam updates, or another bias
                value = values[name]
                values[name] = value * array_module(value).asarray(correction.weights, value.dtype)
        return values

    def _average(
        self, step: StepInputs, joint: Mapping[tuple[str, ...], Array], of_weights: Any
    ) -> dict[tuple[str, ...], tuple[Array, Array]]:
        """Write averages of the gradients of groups; ``of_weights`` is the decay for weights.

        Returns:
            For each group of several parameters, the gradients and the averages.
        """
        old, new, grouped = step.slots["momentum"], step.new_slots["momentum"], {}
        averages: list[tuple[Array, Any, Array, Any, Array]] = []
        for names, gradient in joint.items():
            mean = block_of(new, names)
            decay = of_weights if names[0] in self.groups else self.momentum
            averages.append((mean, decay, block_of(old, names), 1 - decay, gradient))
            if names[1:]:
                grouped[names] = gradient, mean
        combine_all(averages, self._many(joint.values()))
        return grouped

    def _many(self, arrays: Collection[Array]) -> ManyArrays | None:
        """Return the device's operations on many arrays; None unless all arrays are on it."""
        many = self.engine.collection.backend.many
        return many if many is not None and all(map(on_device, arrays)) else None

    def _measured(self, step: StepInputs, descent: Descent) -> list[Products]:
        """Return ``⟨g, p⟩`` and ``|p|²`` of directions: see ``Shortened``.

        The squares of matrices with too large singular values are larger: see ``_least_squares``.
        """
        gradients, natural = descent.gradients, descent.natural
        known = dict[str, Measured]()
        for name, measured in self.measured.items():
            same = measured.direction is natural[name] is descent.active[name]
            if same and measured.examples == step.examples:
                known[name] = measured
        pairs = (gradients, natural), (natural, descent.active)
        products = self._products(step, *pairs, known=known)
        least = self._least_squares(natural, step, known)  # a device is read with the products
        slopes, squares = products()
        if self.turns:
            self._remember(step, descent, squares, least)
        bounded = dict(squares)
        for names in squares if least else ():
            if not least.keys().isdisjoint(names):
                of = step.slots["slope"]
                bounds = [least.get(name, np.zeros_like(of[name])) for name in names]
                several = block_of(of, names).size > len(names)
                bounded[names] = np.maximum(squares[names], _on_one_axis(bounds, several=several))
        return [slopes, bounded]

    def _remember(
        self, step: StepInputs, descent: Descent, squares: Products, least: Mapping[str, Any]
    ) -> None:
        """Write ``measured``."""
        self.measured.clear()
        for names, numbers in squares.items():
            for name, square in by_name(numbers, names, step.slots["slope"]).items():
                direction = descent.natural[name]
                wide = direction is descent.active[name] and name in self.turns
                if wide and type(direction) is np.ndarray:
                    measured = Measured(direction, step.examples, square, least.get(name))
                    self.measured[name] = measured

    def _least_squares(
        self, natural: Vector, step: StepInputs, known: Mapping[str, Measured]
    ) -> dict[str, Any]:
        """Return the least ``|p|²`` for the step size of each weight, which bounds its update.

        It is ``σ² side / (2 N)`` for a matrix with the largest singular value σ. Weights whose
        smaller side is at most 2 N, or which keep their natural gradients, have no entry. The
        numbers are on the host; those of ``known`` weights are not computed again.
        """
        least, matrices = dict[str, Any](), dict[str, Array]()
        kinds, excess = dict[str, Any](), dict[int, Any]()
        for name, direction in natural.items():
            side = self.sides[name]
            if name not in self.equal or name in known:
                continue
            excess[side] = side / (_OF_EXAMPLE * step.examples)
            if is_recorded(excess[side]) or excess[side] > 1:
                stack = matrices[name] = self.units.weights[name].matrices(direction, copy=False)
                kinds[name] = (*stack.shape[1:], side)
        for names in groups(matrices, kinds):
            stack = joined(matrices, names).reshape(-1, *matrices[names[0]].shape[1:])
            of_side = excess[self.sides[names[0]]]
            squares = of_side * largest_singular_values(stack, self.matmul) ** 2
            least |= views_of(squares, names, step.slots["slope"])
        if least and on_device(next(iter(least.values()))):
            on_host = self.engine.collection.backend.download([*least.values()])
            least = dict(zip(least, on_host, strict=True))
        for name, measured in known.items():
            if measured.least is not None:
                least[name] = measured.least
        return least

    def _products(
        self,
        step: StepInputs,
        *pairs: tuple[Vector, Vector],
        known: Mapping[str, Measured] = MappingProxyType({}),
    ) -> Callable[[], list[Products]]:
        """Start to compute the inner products of the matrices of all weights.

        Args:
            step: The step.
            pairs: Pairs of vectors by unit.
            known: Weights of which the last pair has known products, and the others need none.

        Returns:
            A function that returns the inner products for each pair, on the host. The next read of
            a device in a block of ``shared_reads`` has them.
        """
        slopes, backend = step.slots["slope"], self.engine.collection.backend
        many = self._many(pairs[0][1].values())
        by_weight: dict[str, list[Any]] = {}  # a product for each pair
        for name, weight in self.units.weights.items():
            if name in known:
                by_weight[name] = [known[name].square] * len(pairs)
                continue
            arrays = [(left[name], right[name]) for left, right in pairs]
            if slopes[name].ndim:  # several matrices
                stacks = [(weight.matrices(x), weight.matrices(y)) for x, y in arrays]
                by_weight[name] = [(x * y).sum(axis=(1, 2)) for x, y in stacks]
            else:
                by_weight[name] = inner_products(arrays) if many is None else arrays
        if many is not None:
            _read_later(by_weight, many, backend)

        def on_host() -> list[Products]:
            if many is not None:
                backend.download(())  # what still waits
            products: list[dict[tuple[str, ...], Array]] = [{} for _ in pairs]
            for names in self.together.lengths:
                several = block_of(slopes, names).size > len(names)
                each = zip(*map(by_weight.__getitem__, names), strict=True)
                for of_pair, numbers in zip(products, each, strict=True):
                    of_pair[names] = _on_one_axis(numbers, several=several)
            return [*products]

        return on_host

    def _due(self, step: StepInputs, turn: Turn) -> dict[str, Any]:
        """Return whether each weight has a new direction; the truth values may be recorded."""
        number: Any = step.step
        sums = dict[str, Any]()
        number = number.astype(np.int64) if is_recorded(number) else number
        for names, products in turn.last.items() if self.turns else ():
            if not self.turns.keys().isdisjoint(names):
                along = products + block_of(step.slots["slope"], names)
                sums |= by_name(along, names, step.slots["slope"])
        due = dict.fromkeys(self.widths, turn.onward)
        for name, of_weight in self.turns.items():
            always: Any = step.examples * self._rows(name) >= self.widths[name]
            if not is_recorded(always) and always:
                continue
            in_turn = np.logical_or(number == 0, (number + of_weight) % 2 == 0)
            of_name = sums[name] if name in self.independent else sums[name].min()
            turns = np.logical_or(always, np.logical_or(in_turn, of_name < 0))  # c < -1
            due[name] = turns if turn.onward is True else np.logical_and(turns, turn.onward)
        return due

    def _rows(self, name: str) -> Any:
        """Return the number of rows of an example in the factors of a weight."""
        factor = self.blocks[name].factors[:2][-1]  # the rows of the outputs have no weights
        return factor.repeats or self.repeats.get(name, 1.0)

    def _natural_gradients(
        self,
        joint: Mapping[tuple[str, ...], Array],
        decay: Any,
        step: StepInputs,
        due: Mapping[str, Any],
    ) -> Shortened:
        """Return the orthogonalized natural gradients of the weights, or their last directions.

        The directions are shortened along rare features. ``decay`` is that of the averages one step
        ahead.
        """
        last, new = step.slots["natural_gradient"], dict[str, Array]()
        wanted = [n for n, is_due in due.items() if is_due is True or is_recorded(is_due) or is_due]
        portions, small = [wanted], dict[str, Array]()
        if _is_in_place(step):
            portions = self._portions(wanted, step)
            several = [names for names in joint if names[1:] and portions[1:]]
            shared = {name for names in several for name in names if name in self.groups}
            small = self._ahead(step, joint, shared, decay)
        for portion in portions:
            new |= self._of_portion(portion, joint, small, decay, step)
        for name, direction in new.items():
            if due[name] is not True and is_recorded(due[name]):
                chosen: Any = due[name]
                axes = [-1, *[1] * (direction.ndim - 1)] if chosen.ndim else ()
                new[name] = np.where(chosen.reshape(axes), direction, last[name])
        return self.features.shortened({**last, **new}, step, self.engine.collection.backend)

    def _of_portion(
        self,
        portion: Sequence[str],
        joint: Mapping[tuple[str, ...], Array],
        small: Vector,
        decay: Any,
        step: StepInputs,
    ) -> dict[str, Array]:
        """Return new directions of some weights; ``small`` are averages that are known already."""
        groups = set(map(self.groups.__getitem__, portion))
        names = [name for name in step.gradients if self.groups.get(name) in groups]
        averages = {**small, **self._ahead(step, joint, {*names} - small.keys(), decay)}
        vectors = dict(zip(names, map(averages.__getitem__, names), strict=True))
        ahead = self.units.split(vectors)
        if self.units.divided:
            # Without biases: with their gradients, the directions of weights could point uphill.
            alone = {n: a if n in self.roots else np.zeros_like(a) for n, a in ahead.items()}
            vectors = self.units.join(alone, {name: step.gradients[name] for name in names})
        natural = self.units.split(self.precondition(vectors))
        return self._directions(portion, natural, ahead, step.examples)

    def portion_bytes(self, slots: SlotArrays) -> int:
        """Return about the bytes of the averages one step ahead of a portion of the weights."""
        sizes = [slots["momentum"][n].nbytes for n in self.groups if n in slots["momentum"]]
        return max([*sizes, min(sum(sizes), _PORTION * 4)], default=0)

    def _portions(self, wanted: Sequence[str], step: StepInputs) -> list[list[str]]:
        """Divide weights into portions whose averages one step ahead are in memory together."""
        portions, of_group, entries = dict[int, list[str]](), dict[int, int](), 0
        for name in wanted:
            portion = of_group.setdefault(self.groups[name], entries // _PORTION)
            portions.setdefault(portion, []).append(name)
            entries += step.slots["natural_gradient"][name].size
        return [*portions.values()]

    def _ahead(
        self,
        step: StepInputs,
        joint: Mapping[tuple[str, ...], Array],
        wanted: Set[str],
        decay: Any,
    ) -> dict[str, Array]:
        """Return averages one step ahead of the groups with wanted parameters, by parameter.

        They are in the memory of the new averages, unless this is that of the old ones.
        """
        old, new = step.slots["momentum"], step.new_slots["momentum"]
        in_place, ahead = _is_in_place(step), dict[str, Array]()
        averages: list[tuple[Array, Any, Array, Any, Array]] = []
        for names, gradient in joint.items():
            if wanted.isdisjoint(names):
                continue
            before = block_of(old, names)
            mean = np.empty_like(before) if in_place else block_of(new, names)
            averages.append((mean, decay, before, 1 - decay, gradient))
            if in_place:
                ahead |= by_name(mean, names, old)
            else:
                ahead.update(zip(names, map(new.__getitem__, names), strict=True))
        combine_all(averages, self._many(joint.values()))
        return ahead

    def _directions(
        self, names: Sequence[str], natural: Vector, ahead: Vector, examples: int
    ) -> dict[str, Array]:
        """Return the directions of weights; the norms of their matrices are arbitrary.

        Args:
            names: The weights.
            natural: The natural gradients of the averages.
            ahead: The averages, one step ahead.
            examples: Number of examples of the batch.
        """
        weights = self.units.weights
        directions = dict(zip(names, map(natural.__getitem__, names), strict=True))
        iterations: dict[str, Any] = {}
        for name in names:
            count = self._iterations(name, examples) if name in self.equal else 0
            if not isinstance(count, int) or count:
                iterations[name] = count
        if not iterations:
            return directions
        if many := self._many(natural.values()):
            directions |= self._at_once(many, natural, ahead, iterations)
        matrices, kinds = dict[str, Array](), dict[str, Any]()
        for name, number in iterations.items():
            stack = matrices[name] = weights[name].matrices(natural[name])
            # Recorded: equal numbers of rows give equal numbers of iterations.
            of_rows = (self.sides[name], self._rows(name)) if is_recorded(number) else (number,)
            kinds[name] = (*stack.shape[1:], *of_rows)
        for names in groups(matrices, kinds):
            shape, count = matrices[names[0]].shape[1:], iterations[names[0]]
            stack = joined(matrices, names).reshape(-1, *shape)
            operand = stack[0] if len(stack) == 1 else stack  # as for Muon
            equal = orthogonalize(operand, self.matmul, count, bound=True).reshape(stack.shape)
            averaged = {name: weights[name].matrices(ahead[name]) for name in names}
            products = joined(averaged, names).reshape(stack.shape) * equal
            descends = products.sum(axis=(1, 2), keepdims=True) > 0
            chosen = array_module(stack).where(descends, equal, stack)
            parts = by_name(chosen.reshape(-1) if names[1:] else chosen, names, matrices)
            directions |= {n: weights[n].array(part, natural[n]) for n, part in parts.items()}
        return directions

    def _at_once(
        self, many: ManyArrays, natural: Vector, ahead: Vector, iterations: dict[str, Any]
    ) -> dict[str, Array]:
        """Return the directions of small matrices of a device, and remove them from ``iterations``.

        Their rows are in the order of memory, which does not matter.
        """
        plain = {n: self.units.weights[n].plain_matrix(natural[n]) for n in iterations}
        chosen = {n: m for n, m in plain.items() if m is not None and many.fits(m)}
        numbers = [iterations.pop(name) for name in chosen]
        along = [ahead[name].reshape(m.shape) for name, m in chosen.items()]
        equal = many.orthogonalize([*chosen.values()], POLYNOMIAL, numbers, along) if chosen else ()
        return {n: m.reshape(natural[n].shape) for n, m in zip(chosen, equal, strict=True)}

    def _iterations(self, name: str, examples: Any) -> Any:
        """Return the number of Newton–Schulz iterations of a weight, or a recorded number."""
        side = self.sides[name]
        of_one = 2 * side if side >= _SMALL_SIDE else _ROWS_OF_SMALL
        iterations = examples * self._rows(name) / of_one
        return int(min(iterations, _ITERATIONS)) if isinstance(iterations, float) else iterations

    def _by_adam(
        self, names: tuple[str, ...], value: Array, mean: Array, parameter: Array, step: StepInputs
    ) -> None:
        """Write the new values of units in place of their gradients."""
        rate = step.scale * evaluated(self.adam_rate, step.step)
        rate = rate * self.factors.get(names[0], 1.0)  # that of all names
        old = block_of(step.slots["second_moment"], names)
        new = block_of(step.new_slots["second_moment"], names)
        decay = 0.0 if names[0] in self.intercepts else step.decay
        shrunk = 1 - rate * decay * self.weight_decay
        units = [self._unit(name, step) for name in names] if step.spreads else []
        operands = [value, mean, old, new, parameter]
        if len(names) == 1:
            rate = rate * (units[0] if units else 1.0)
        elif units and any(unit != 1 for unit in units):
            counts = [step.slots["second_moment"][name].size for name in names]
            operands.append(array_module(value).asarray(np.repeat(units, counts), value.dtype))
        for out, v, before, after, present, *scales in parts(*operands):
            direction = self.adam.direction(out, v, before, after, step.step + 1)
            if names[0] in self.numbers:
                part = np.minimum(np.abs(present) / _LARGE, direction * direction)
                direction *= 1 + _OF_NUMBERS * np.minimum(part, 1.0)
            for scale in scales:
                direction *= scale
            combine(out, -rate, direction, shrunk, present)

    def _unit(self, name: str, step: StepInputs) -> Any:
        """Return the unit of the outputs of the layer that has a weight or bias."""
        prediction = self.predictions.get(name)
        if prediction is None or prediction.loss not in step.spreads:
            return 1.0
        spread = step.spreads[prediction.loss] / prediction.scale
        unit = np.maximum(spread, np.minimum(spread / _SMALL, 1.0))
        return unit if prediction.weights is not None else np.minimum(unit, 1.0)

    def _write_step_sizes(
        self, step: StepInputs, products: Sequence[Products], turn: Turn, due: Mapping[str, Any]
    ) -> None:
        """Write the new slopes, lengths and step sizes; ``products`` are those of ``_measured``."""
        last, (slopes, squares) = turn.last, products
        old, new = step.slots, step.new_slots
        for names in self.together.lengths:
            slope, log_length = block_of(old["slope"], names), block_of(old["log_length"], names)
            logs = block_of(new["log_length"], names)
            logs[...] = _next_logs(log_length, slope, last[names], step.scale, turn.far)
            norms = squares[names] ** 0.5
            scaled = self._rates(names, step) * np.exp(logs) / (norms + (norms == 0))
            block_of(new["step_size"], names)[...] = np.where(turn.back, 0.0, scaled)
            block_of(new["slope"], names)[...] = slopes[names]
            for name in names:
                if due[name] is not True:
                    # A direction of several steps has the slope of its first step.
                    of_first = new["slope"][name]
                    of_first[...] = np.where(due[name], of_first, old["slope"][name])
        self._shorten(step, turn.weight)

    def _shorten(self, step: StepInputs, weight: Any) -> None:
        """Shorten updates that predict too large a fall of the loss for the number of rows.

        ``weight`` is that of the gradient in the slopes.
        """
        sizes, fall = step.new_slots["step_size"], self._fall(step.new_slots)
        fewest = min(map(self._rows, self.roots), default=1.0)
        most = _OF_LOSS * fewest * step.examples * weight * np.abs(step.loss)
        far = fall > most
        if is_recorded(far) or far:
            share = np.where(far, most / np.where(far, fall, 1.0), 1.0)
            for names in self.together.lengths:
                block_of(sizes, names)[...] = share * block_of(sizes, names)

    def _fall(self, slots: SlotArrays) -> Any:
        """Return by how much the loss falls along updates, from its slopes at their start."""
        fall: Any = 0.0
        for names in self.together.lengths:
            size, slope = block_of(slots["step_size"], names), block_of(slots["slope"], names)
            fall = fall + (size * slope).sum()
        return fall

    def _part_back(self, step: StepInputs, last: Products) -> Any:
        """Return the part of the last updates that a step takes back; 0 for a step onward.

        If the last updates together went far beyond the minimum along them, the step goes back to
        the minimum of the parabola with their slopes.
        """
        rise, fall = 0.0, self._fall(step.slots)
        for names, products in last.items():
            rise = rise - (block_of(step.slots["step_size"], names) * products).sum()
        far = rise > np.maximum(np.abs(step.loss), _FAR * fall)
        if not is_recorded(far) and not far:
            return 0.0
        part = 1 / (1 + np.maximum(fall, 0.0) / np.where(far, rise, 1.0))
        return np.where(far, part, 0.0)

    def _rates(self, names: Sequence[str], step: StepInputs) -> Any:
        """Return the lengths of the updates of the matrices of weights with k = 1."""
        rates, counts = list[Any](), list[int]()
        for name in names:
            rate = step.rate * self.roots[name]
            prediction = self.predictions.get(name)
            if prediction is not None and prediction.loss in step.spreads:
                moment = np.maximum(self.moment(self.blocks[name]), 1.0)
                rate = rate * self._unit(name, step) / np.sqrt(moment)
            rates.append(rate)
            counts.append(step.slots["slope"][name].size)
        if len(names) == 1:
            return rates[0]
        return np.array(rates) if max(counts) == 1 else np.repeat(rates, counts)

    def _move(
        self,
        values: Vector,
        natural: Vector,
        parameters: Vector,
        sizes: Vector,
        step: StepInputs,
        corrections: Mapping[str, Correction],
    ) -> None:
        """Write the new values of the weights in place of their gradients ``values``."""
        shrunk = 1 - step.rate * step.decay * self.weight_decay
        moves: list[tuple[Array, Any, Array, Any, Array]] = []
        for name, weight in self.units.weights.items():
            size, direction = sizes[name], natural[name]
            multiple = shrunk * corrections[name].weights if name in corrections else shrunk
            if size.ndim == 0:  # one matrix
                factor = -size.item()
            else:
                scales = array_module(direction).asarray(size, direction.dtype)[:, None, None]
                direction = weight.array(scales * weight.matrices(direction), direction)
                factor = -1.0
            moves.append((values[name], factor, direction, multiple, parameters[name]))
        combine_all(moves, self._many(natural.values()))


def _is_in_place(step: StepInputs) -> bool:
    """Return whether new averages are written to the memory of the old ones."""
    return step.new_slots["momentum"] is step.slots["momentum"]


def _read_later(by_weight: Mapping[str, list[Any]], many: ManyArrays, backend: Backend) -> None:
    """Replace products on a device, or pairs of arrays that have one, by products on the host."""
    waiting: list[tuple[list[Any], int]] = []
    for numbers in by_weight.values():
        for place, number in enumerate(numbers):
            if isinstance(number, tuple):
                waiting.append((numbers, place))
            else:
                backend.read_later(number, partial(numbers.__setitem__, place))

    def fill(addends: Array) -> None:
        for (numbers, place), total in zip(waiting, addends.sum(axis=1), strict=True):
            numbers[place] = total

    if waiting:
        addends = many.inner_products([numbers[place] for numbers, place in waiting])
        backend.read_later(addends, fill)


def _on_one_axis(numbers: Sequence[Any], *, several: bool) -> Any:
    """Return the numbers of weights on one axis; those of a single weight unchanged.

    ``several`` is whether a weight has several matrices, with a number each.
    """
    if len(numbers) == 1:
        return numbers[0]
    return np.concatenate([each.reshape(-1) for each in numbers]) if several else np.array(numbers)


def _next_logs(
    logs: Array, slopes: Array, next_slopes: Array, scale: float, goes_back: Any
) -> Array:
    """Return the new ``log k`` of matrices; the agreement is 0 unless the slope is positive."""
    ratios = next_slopes / np.where(slopes > 0, slopes, inf)
    agreements = np.minimum(np.maximum(ratios, -1.0), 1.0)
    grown = (1 - _DECAY) * logs + _GAIN * np.minimum(scale, 1.0) * agreements
    new = np.where(goes_back, logs - _CUT, grown)
    result: Array = np.minimum(np.maximum(new, log(_LEAST)), log(_LARGEST))
    return result


def adaptive_lengths(
    engine: Engine,
    parameters: Vector,
    momentum: float | None,
    adam_rate: Rate,
    weight_decay: float,
) -> AdaptiveLengthUpdate:
    """Return the update of an engine.

    Args:
        engine: The engine.
        parameters: The parameters that are trained.
        momentum: As in ``AdaptiveLengthUpdate``; None for ``AVERAGE``, with a span that grows.
        adam_rate: As in ``AdaptiveLengthUpdate``.
        weight_decay: As in ``AdaptiveLengthUpdate``.
    """
    predictions = predictions_of(engine)
    heads = wide_heads(engine, predictions)
    units = Units(
        engine,
        tuple(parameters),
        lambda piece: piece.kind not in BY_ADAM and piece.weight not in heads,
    )
    values = units.split(parameters)
    shapes = {n: w.matrices(values[n], copy=False).shape for n, w in units.weights.items()}
    roots = {name: sqrt(shape[-1]) for name, shape in shapes.items()}
    sides = {name: min(shape[1:]) for name, shape in shapes.items()}
    factors = adapters(engine, units, values)
    for name, factor in factors.items():
        roots[name] = _OF_ADAPTERS * sqrt(sqrt(prod(shapes[name])) / factor)
        if name in predictions:  # the length of an adapter contains its scale
            predictions[name] = predictions[name]._replace(scale=1.0)
    equal = {name for name, side in sides.items() if side >= _SMALLEST_SIDE} | factors.keys()
    of_layers = {uses(p)[0]: block for p, block in engine.collection.fisher_blocks.items()}
    blocks = {name: of_layers[weight.weight] for name, weight in units.weights.items()}
    widths = widths_of(engine, blocks)
    by_adam = {name: value for name, value in values.items() if name not in units.weights}
    of_logits, few = rates_of_logits(engine, heads), few_numbers(engine, by_adam)
    terms = engine.objective.terms
    means = {t.mean for t in terms if isinstance(t, (NormalMeanNegativeLogProbLoss, OutlierLoss))}
    intercepts = {name for name, p in predictions.items() if p.bias and p.loss in means}
    divided = {*units.weights, *(heads.keys() & predictions.keys())}
    for name, p in predictions.items():
        if name in parameters and not p.bias and p.loss not in means:
            divided |= {name} - (p.weights or {name})
    numbers = joined_by_blocks(engine, units)
    span = AverageSpan(AVERAGE) if momentum is None and roots else None
    momentum = AVERAGE if momentum is None else momentum
    turns, work = dict[int, int](), [0.0, 0.0]
    for name, shape in shapes.items():  # each half has about the same number of multiplications
        half = turns.setdefault(numbers[name], int(work[0] > work[1]))
        work[half] += prod(shape) * widths[name]
    kinds = {n: (of_logits.get(n, 1.0), n in intercepts, n in few) for n in by_adam}
    together = Together(
        [*groups(parameters, {name: name in numbers for name in parameters})],
        [*groups(by_adam, kinds)],
        [*groups({n: np.empty(0) for n in roots}, dict.fromkeys(roots, "length"))],
    )
    return AdaptiveLengthUpdate(
        engine,
        partial(natural_gradients, engine),
        units,
        together,
        roots,
        sides,
        equal,
        widths,
        {name: turns[numbers[name]] for name in shapes if widths[name] > _NARROW},
        blocks,
        numbers,
        [*units.split({name: parameters[name] for name in numbers if name in parameters})],
        engine.collection.backend.matmul,
        momentum,
        AdaptiveMoments(momentum, _BETA2, _EPSILON),
        adam_rate,
        weight_decay,
        predictions=predictions,
        divisible=divided,
        intercepts=intercepts,
        factors=of_logits,
        numbers=few,
        features=feature_bounds(engine, units.weights, blocks, values),
        span=span,
    )
