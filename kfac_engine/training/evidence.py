"""Sets the decay and the damping of a table's weights by the noise of the examples.

A network that sees the same examples again and again fits their noise. The prior precision of a
weight with the largest evidence is MacKay's fixed point. The curvature of K-FAC yields it at the
price of some eigenvalues. The same fixed point, for the few rows of an averaged gradient, is the
damping with which the natural gradient follows no directions that are only noise.

Source: D. J. C. MacKay 1992, "Bayesian interpolation", Neural Computation 4(3), equation 4.9.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, prod, sqrt
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.config import RelativeDamping
from kfac_engine.engine.engine import Engine
from kfac_engine.layers.parameter_slices import Piece
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.training.feature_bounds import model_of
from kfac_engine.training.seen_examples import SeenExamples
from kfac_engine.training.vectors import Vector, add_multiple

_DENSE, _ROWS = "fully_connected", 2  # kind of a layer, and number of axes of its inputs
_SQUARED = NormalMeanNegativeLogProbLoss
_CLASSES = CategoricalLogitsNegativeLogProbLoss, MultiBernoulliNegativeLogProbLoss
# Largest sum of the sides of two factors whose eigenvalues are computed.
_WIDEST = 1024
# Steps until the precisions are computed again, relative to the steps of the run.
_GROWTH = 1.2
# Largest damping by noise, in mean eigenvalues: natural gradients are then nearly gradients.
_MOST_DAMPING = 100.0
# Decay of the averages over steps.
_DECAY = 0.95
# Part of the weight decay that the precisions take the place of.
_REPLACED = 0.8
# Passes of the fixed point: the logarithm of a precision halves its distance in each.
_PASSES = 12
_LEAST = 1e-30  # least divisor
# Number of the latest rows whose nearest rows are sought, and of these for each row.
MOST_COMPARED, _NEAREST = 512, 3
# Squared distance of equal rows, relative to their squares: rounding.
_EQUAL = 1e-12
# Part of the errors that neighbours leave, below which the errors are no noise: a quarter of the
# part that they leave of noise.
_LEFT = 1 / 3
# Number of different rows of classes, below which their noise is not measured, and part of the
# deviations of classes that neighbours leave, below which classes are apart.
_FEWEST, _APART = 200, 0.02
# Fields of ``Evidence`` with numbers of the weights.
_OF_WEIGHTS = "precisions", "dampings", "units"


class Evidence(NamedTuple):
    """The statistics of the steps so far that determine precisions and dampings of weights."""

    residual: float = 1.0  # average of the residuals of the steps, at most 1
    # Average of ``Residuals.noise``: for squared errors, their mean relative to the variance of the
    # loss; 1 for classes; times the factor of unequal weights.
    noise: float = 1.0
    due: int = 1  # number of the step that computes precisions and dampings next
    # Prior precision of each weight per example, in the unit of the loss.
    precisions: tuple[float, ...] = ()
    # Damping of the block of each weight by noise, relative to its mean eigenvalue.
    dampings: tuple[float, ...] = ()
    # Second moments of the inputs of each weight where columns have units of their own, else 1.
    units: tuple[float, ...] = ()
    # Whether errors are no noise: neighbours have predicted them, or do not show that few rows of
    # classes have noise.
    unlearned: bool = False
    # Inputs and errors of the latest rows of several steps, ``(rows, columns)`` in sum up to 512
    # rows.
    rows: tuple[Array, ...] = ()

    def saved(self) -> dict[str, Array]:
        """Return the arrays of a checkpoint."""
        latest = np.concatenate(self.rows)
        numbers = [self.residual, self.noise, self.due, self.unlearned, len(latest)]
        rows = np.concatenate([latest, np.zeros((MOST_COMPARED - len(latest), latest.shape[1]))])
        of_weights = {n: np.array(getattr(self, n)) for n in _OF_WEIGHTS}
        return {"numbers": np.array(numbers, np.float64), "rows": rows, **of_weights}

    @classmethod
    def restored(cls, saved: Mapping[str, Array]) -> "Evidence":
        """Return the evidence of ``saved``."""
        residual, noise, due, unlearned, count = map(float, saved["numbers"])
        precisions, dampings, units = (tuple(map(float, saved[name])) for name in _OF_WEIGHTS)
        rows = saved["rows"][: int(count)].copy()
        return cls(residual, noise, int(due), precisions, dampings, units, bool(unlearned), (rows,))

    def with_rows(self, rows: Array) -> "Evidence":
        """Return the evidence with the rows of one more step, without those before the last 512."""
        latest, space = [rows[-MOST_COMPARED:]], MOST_COMPARED - len(rows)
        for before in reversed(self.rows):
            if space > 0 and len(before):
                latest.insert(0, before[-space:])
                space -= len(before)
        return self._replace(rows=tuple(latest))


@dataclass(frozen=True, slots=True)
class ShrinkageByEvidence:
    """Shrinks the weights of a table's network by the evidence, where its examples come again.

    Let N be the number of different examples, q the part of the examples of all steps that came
    again, and ``h`` the eigenvalues of a weight's block of the Fisher matrix, the products of those
    of its factors. The gradient of the weight W becomes ``g + r α W`` with the solution α of ::

        α = (q / N) T γ / ‖W‖²        γ = Σ h / (h + α)

    γ is the number of parameters that the examples determine. T is the noise: for squared errors
    their mean, at most that of the mean target, relative to the variance of the loss. It is 0 while
    most of the errors of the latest rows are predicted by those of neighbouring rows
    (``left_by_neighbours``), which are then not learned yet. In a network that has fitted noise,
    the product of a weight and its gradient on new examples is larger than on the examples of the
    training, by about T γ / N. The term adds as much. r is the residual (``Residuals.size``), an
    average over about twenty steps. It weakens the term where little noise is left, because a run
    ends long before the minimum, which the evidence assumes.

    Unequal weights of targets multiply T by ``Residuals.unevenness``: the few rows with much weight
    have most of the noise.

    For classes, the gradient is ``g + √r α W``: where predictions become certain, g and h fall with
    r, and α with √h, so that the term falls as fast as the gradient. Also, W in the formulas then
    has the rows ``√aᵢ wᵢ`` in a layer that reads columns, and h are the eigenvalues for inputs ``xᵢ
    / √aᵢ``, with the second moment aᵢ of column i (``FisherFactor.moments``): columns have units of
    their own. T is 1 if at least 1,024 rows are different. Fewer rows have ``T = 1 − r²`` if their
    classes overlap (``classes_overlap``), else 0: weights that have learned nothing then do not
    shrink.

    With ``damps``, the relative damping ε of the block becomes ``ε + r λ / mean(h)`` with ::

        λ = (1 / n) T γ / ‖W‖²        γ = Σ h / (h + λ)

    n is the number of different rows in an averaged gradient. The noise of the average is ``T h /
    n`` along an eigenvector, and the gradient there is ``h w`` for a distance w from the minimum.
    The best estimate of w is ``h w / (h + λ)``, if w has the mean square ``T / (n λ)`` (Wiener).
    The formula estimates this mean square by that of the weights that the rows determine.
    """

    # The block of each weight; none where the rule does not apply.
    blocks: Mapping[str, FisherBlock] = field(default_factory=dict)
    weights: Mapping[str, Piece] = field(default_factory=dict)  # the weights of the blocks
    inputs: Mapping[str, int] = field(default_factory=dict)  # number of inputs of each weight
    columns: int = 0  # number of columns of the inputs of a row
    features: int = 0  # number of features of its errors
    squared: bool = False  # whether errors are squared, so that their mean is the noise
    classes: bool = False  # whether all targets are classes
    damps: bool = False  # whether noise and few rows of statistics damp the blocks
    # The latest ``Evidence.units``, in the shapes of the weights.
    scales: dict[tuple[float, ...], dict[str, Array]] = field(default_factory=dict)

    def start(self) -> Evidence:
        """Return the evidence before the first step."""
        none = (0.0,) * len(self.blocks)
        rows = np.empty((0, self.columns + self.features))
        units = (1.0,) * sum(self.inputs.values())
        return Evidence(precisions=none, dampings=none, units=units, rows=(rows,))

    def kept_decay(self, seen: SeenExamples, evidence: Evidence) -> float:
        """Return the factor of the weight decay beside the precisions."""
        measured = any(evidence.precisions) if self._has_few_classes(seen) else self.knows(seen)
        return 1 - _REPLACED * seen.share if self.blocks and measured else 1.0

    def after(self, evidence: Evidence, step: int, size: float, noise: float) -> Evidence:
        """Return the evidence after one more batch, from the numbers of its residuals.

        ``step`` is the number of steps so far. The averages begin with the first batch, so that the
        noise has the unit of the targets.
        """
        part = max(1 - _DECAY, 1 / (step + 1))
        return evidence._replace(
            residual=evidence.residual + part * (min(size, 1.0) - evidence.residual),
            noise=evidence.noise + part * (noise - evidence.noise),
        )

    def _has_few_classes(self, seen: SeenExamples) -> bool:
        """Return whether fewer than 1,024 rows have classes."""
        return self.classes and not seen.many

    def knows(self, seen: SeenExamples) -> bool:
        """Return whether the rows are enough for the evidence.

        At least 1,024 of them are different; or most came several times, and their errors are
        squared or at least 200 different ones have classes.
        """
        enough = self.squared or (self.classes and seen.different >= _FEWEST)
        return seen.familiar if enough else seen.many

    def reads_rows(self, evidence: Evidence, step: int, seen: SeenExamples) -> bool:
        """Return whether a step is one of the last before precisions are computed.

        ``step`` is the number of steps so far, and ``seen`` are their examples. The rows of a step
        that computes precisions are read, too.
        """
        if not ((self.squared or self._has_few_classes(seen)) and self.blocks and seen.share > 0):
            return False
        return (evidence.due - step) * seen.count < MOST_COMPARED * step

    def is_due(
        self, evidence: Evidence, step: int, before: SeenExamples, seen: SeenExamples
    ) -> bool:
        """Return whether a step computes the precisions.

        Args:
            evidence: The evidence of the steps so far.
            step: Their number.
            before: Their examples.
            seen: The same examples and those of the step.
        """
        due = step >= evidence.due or self.knows(seen) != self.knows(before)
        return due and seen.share > 0

    def compared(self, evidence: Evidence, step: int) -> Evidence:
        """Return the evidence after a comparison of the latest rows, of which none remains.

        Errors of which neighbours leave less than a third are no noise, and neither are those of
        classes that do not overlap. Without rows, they are what they were before. The precisions
        and dampings are 0.
        """
        latest, unlearned = np.concatenate(evidence.rows), evidence.unlearned
        if len(latest):
            inputs, errors = np.split(latest, [self.columns], axis=1)
            if self.classes:
                unlearned = not classes_overlap(inputs, errors)
            else:
                unlearned = left_by_neighbours(inputs, errors) < _LEFT
        due = int(_GROWTH * step) + 1
        return self.start()._replace(
            residual=evidence.residual, noise=evidence.noise, due=due, unlearned=unlearned
        )

    def measured(
        self, evidence: Evidence, seen: SeenExamples, values: Vector, rows: float
    ) -> Evidence:
        """Return the evidence with precisions from the averages of the blocks and the weights.

        ``rows`` is the number of rows in an averaged gradient, if all are different.
        """
        few = self._has_few_classes(seen)
        noise = evidence.noise * (1 - evidence.residual**2 if few else 1.0)
        if evidence.unlearned and (few or self.squared):
            noise = 0.0
        of_all = seen.scarcity * noise
        of_average = noise / min(rows, seen.different) if self.damps else 0.0
        pairs: list[tuple[float, float]] = []
        if self.classes:
            units = [_units(self.blocks[name], side) for name, side in self.inputs.items()]
            evidence = evidence._replace(units=tuple(map(float, np.concatenate(units))))
        products = self._in_units(evidence, values) if self.classes else values
        for number, (name, block) in enumerate(self.blocks.items()):
            h = _eigenvalues(block, units[number] if self.classes else None)
            square = max(float(np.vdot(values[name], products[name])), _LEAST)
            precision, damping = (_precision(h, s / square) for s in (of_all, of_average))
            relative = damping / max(float(h.mean()), _LEAST)
            pairs.append((precision, min(relative, _MOST_DAMPING)))
        precisions, dampings = zip(*pairs, strict=True)
        return evidence._replace(precisions=precisions, dampings=dampings)

    def damping(self, value: float, evidence: Evidence, examples: float) -> RelativeDamping:
        """Return a relative damping with that of the noise, for statistics of ``examples``."""
        pairs = zip(self.blocks.values(), evidence.dampings, strict=True)
        more = {block.params: evidence.residual * damping for block, damping in pairs}
        return RelativeDamping(value).with_more(more, examples)

    def add_to(self, gradients: Vector, evidence: Evidence, values: Vector) -> bool:
        """Add the terms to the gradients of the weights; return whether there are any."""
        if not any(evidence.precisions):
            return False
        part = sqrt(evidence.residual) if self.classes else evidence.residual
        products = self._in_units(evidence, values) if self.classes else values
        for name, precision in zip(self.blocks, evidence.precisions, strict=True):
            add_multiple(gradients[name], part * precision, products[name])
        return True

    def _in_units(self, evidence: Evidence, values: Vector) -> dict[str, Array]:
        """Return the weights with each row times the unit of its input."""
        if evidence.units not in self.scales:
            self.scales.clear()
            self.scales[evidence.units] = self._scales(evidence.units, values)
        scales = self.scales[evidence.units]
        return {name: scales[name] * values[name] for name in self.inputs}

    def _scales(self, units: tuple[float, ...], values: Vector) -> dict[str, Array]:
        """Return the unit of the input of each entry of the weights."""
        scales, start = dict[str, Array](), 0
        for name, side in self.inputs.items():
            value, piece = values[name], self.weights[name]
            of_inputs = np.array(units[start : start + side], value.dtype)[:, None]
            shape = piece.matrices(value, copy=False).shape
            every = array_module(value).asarray(np.broadcast_to(of_inputs, shape))
            scales[name], start = piece.array(every, value), start + side
        return scales


def left_by_neighbours(inputs: Array, errors: Array) -> float:
    """Return the part of squared errors that the errors of the nearest rows do not predict.

    It is the sum of the squares of the differences between the errors of each row and the mean of
    those of the three rows with the nearest inputs, relative to that of the errors. It is 4/3 for
    noise: a mean of three noises has a third of the square of one. Errors of a function that is not
    learned yet are alike in rows that are close.

    Args:
        inputs: The inputs of each row, ``(rows, columns)``; the columns may have any units.
        errors: The errors of each row, ``(rows, features)``; those of targets that do not count are
            0, and are not compared.

    Returns:
        The part. Of rows with equal inputs, only the last one is compared: a row that comes twice
        would leave no errors, and be two of the three nearest rows. The part is 1 if no others
        remain, or no errors.
    """
    counts = np.flatnonzero(errors.any(axis=1))
    latest = list(dict(zip(map(np.ndarray.tobytes, inputs[counts]), counts, strict=True)).values())
    x, e = inputs[latest].astype(np.float64), errors[latest].astype(np.float64)
    if not len(x):
        return 1.0
    spreads = x.std(axis=0)
    x = (x - x.mean(axis=0)) / (spreads + (spreads == 0))
    squares = (x * x).sum(axis=1)
    sums = squares[:, None] + squares
    distances = sums - 2 * (x @ x.T)
    distances[distances <= _EQUAL * sums] = inf
    nearest = distances.argpartition(min(_NEAREST, len(x)) - 1)[:, :_NEAREST]
    compared = np.isfinite(np.take_along_axis(distances, nearest, axis=1))[..., None]
    others = np.where(compared, e[nearest], 0.0)
    known = np.count_nonzero(others, axis=1)
    differences = e - others.sum(axis=1) / np.maximum(known, 1)
    pairs = (known > 0) & (e != 0)
    total = float((e[pairs] ** 2).sum())
    return float((differences[pairs] ** 2).sum()) / total if total else 1.0


def classes_overlap(inputs: Array, errors: Array) -> bool:
    """Return whether rows with near inputs show that classes have noise.

    The mean of the classes of the three rows with the nearest inputs then leaves from 2 % to 100 %
    of the squared deviations from the mean of all rows. Below, classes are apart. Above, the mean
    of all rows is better, as for an exclusive or of few columns: neighbours do not tell whether
    classes have noise.

    Args:
        inputs: As for ``left_by_neighbours``.
        errors: The gradients of the loss at the logits, negative for the class of a row.
    """
    counts = errors.any(axis=1)
    if not counts.any():
        return False
    members = (errors[counts] < 0).astype(np.float64)
    left = left_by_neighbours(inputs[counts], members - members.mean(axis=0, keepdims=True))
    return _APART < left < 1


def _units(block: FisherBlock, side: int) -> Array:
    """Return the second moments of the columns that a layer reads; ones for other layers."""
    factor = block.factors[0]
    if not factor.damped_by_feature():
        return np.ones(side)
    moments: Array = factor.moments(factor.backend.to_numpy(factor.get_cov()).astype(np.float64))
    return moments[:side]


def _eigenvalues(block: FisherBlock, units: Array | None) -> Array:
    """Return the eigenvalues of a Kronecker product; inputs may have units."""
    of_inputs, of_outputs = block.factors
    if units is None:
        inputs = of_inputs.eigenvalues()
    else:
        average = of_inputs.backend.to_numpy(of_inputs.get_cov()).astype(np.float64)
        roots = np.append(units, np.ones(len(average) - len(units))) ** 0.5  # 1 for the bias
        inputs = np.linalg.eigvalsh(average / np.multiply.outer(roots, roots))
    inputs, outputs = (np.maximum(v, 0.0) for v in (inputs, of_outputs.eigenvalues()))
    products: Array = np.multiply.outer(inputs, outputs)
    return products


def _precision(eigenvalues: Array, scale: float) -> float:
    """Return the solution α of ``α = scale · Σ h / (h + α)``."""
    precision, total = scale * eigenvalues.size, np.add.reduce
    for _ in range(_PASSES if scale else 0):
        shares = eigenvalues / (eigenvalues + precision + _LEAST)
        precision = sqrt(precision * scale * float(total(shares, None)))
    return precision


def shrinkage_by_evidence(
    engine: Engine,
    weights: Mapping[str, Piece],
    blocks: Mapping[str, FisherBlock],
    widths: Mapping[str, float],
    *,
    damps: bool,
) -> ShrinkageByEvidence:
    """Return the rule of an engine; without blocks unless the examples are rows of a table.

    The inputs are floating-point vectors, one for each example, and there is one loss, a mean. All
    weights are matrices of fully connected layers, whole parameters, each used once, with factors
    whose sides have a sum of at most 1,024.

    Args:
        engine: The engine.
        weights: Weights by unit.
        blocks: The blocks of the layers of the weights, by unit.
        widths: Sum of the sides of the factors of each weight.
        damps: As in ``ShrinkageByEvidence``.
    """
    objective = engine.objective
    inputs = [i for i in engine.passes.model.graph.inputs if i.name in engine.example_axes.inputs]
    whole = engine.passes.model.parameters.keys()
    applies = (
        objective.reduction != "sum"
        and [loss.coefficient for loss in objective.losses] == [1]
        and all(i.dtype.kind == "f" and i.shape and len(i.shape) == _ROWS for i in inputs)
        and all(w.kind == _DENSE and name in whole for name, w in weights.items())
        and 0 < max(widths.values(), default=0) <= _WIDEST
    )
    if not applies:
        return ShrinkageByEvidence(damps=damps)
    facts = model_of(engine).facts
    sizes = {i.name: facts[i.name].shape[engine.example_axes.inputs[i.name]] for i in inputs}
    columns = sum(prod(facts[name].shape) // size for name, size in sizes.items())
    # An output may have several rows for each example.
    features = prod(facts[objective.inputs[0]].shape) // max(sizes.values(), default=1)
    squared, classes = (
        all(isinstance(loss, kinds) for loss in objective.terms) for kinds in (_SQUARED, _CLASSES)
    )
    # The errors of smoothed targets do not tell the classes.
    classes = classes and not any(getattr(loss, "label_smoothing", 0) for loss in objective.terms)
    parameters = engine.parameters
    sides = {name: w.matrices(parameters[name]).shape[1] for name, w in weights.items()}
    return ShrinkageByEvidence(blocks, weights, sides, columns, features, squared, classes, damps)
