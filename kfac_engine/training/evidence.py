"""Sets the decay and the damping of a table's weights by the noise of the examples.

A network that sees the same examples again and again fits their noise. The prior precision of a
weight with the largest evidence is MacKay's fixed point. The curvature of K-FAC yields it at the
price of some eigenvalues. The same fixed point, for the few rows of an averaged gradient, is the
damping with which the natural gradient follows no directions that are only noise.

Source: D. J. C. MacKay 1992, "Bayesian interpolation", Neural Computation 4(3), equation 4.9.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.config import RelativeDamping
from kfac_engine.engine.engine import Engine
from kfac_engine.layers.parameter_slices import Piece
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.training.seen_examples import SeenExamples
from kfac_engine.training.vectors import Vector

_DENSE, _ROWS = "fully_connected", 2  # kind of a layer, and number of axes of its inputs
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
# Largest number of rows whose nearest rows are sought.
MOST_COMPARED = 512
# Squared distance of equal rows, relative to their squares: rounding.
_EQUAL = 1e-12
# Part of the errors that neighbours leave, below which the errors are no noise.
_LEFT = 1 / 3


class Evidence(NamedTuple):
    """The statistics of the steps so far that determine precisions and dampings of weights."""

    residual: float = 1.0  # average of the residuals of the steps, at most 1
    # Average of the squares of the gradients at the predictions, relative to those that the loss
    # expects; 1 for classes.
    noise: float = 1.0
    due: int = 1  # number of the step that computes precisions and dampings next
    # Prior precision of each weight per example, in the unit of the loss.
    precisions: tuple[float, ...] = ()
    # Damping of the block of each weight by noise, relative to its mean eigenvalue.
    dampings: tuple[float, ...] = ()

    def saved(self) -> dict[str, Array]:
        """Return the arrays of a checkpoint."""
        numbers = np.array([self.residual, self.noise, self.due])
        fixed_points = "precisions", "dampings"
        return {"numbers": numbers} | {n: np.array(getattr(self, n)) for n in fixed_points}

    @classmethod
    def restored(cls, saved: Mapping[str, Array]) -> "Evidence":
        """Return the evidence of ``saved``."""
        residual, noise, due = map(float, saved["numbers"])
        precisions, dampings = (tuple(map(float, saved[n])) for n in ("precisions", "dampings"))
        return cls(residual, noise, int(due), precisions, dampings)


@dataclass(frozen=True, slots=True)
class ShrinkageByEvidence:
    """Shrinks the weights of a table's network by the evidence, where its examples come again.

    Let N be the number of different examples, q the part of the examples of all steps that came
    again, and ``h`` the eigenvalues of a weight's block of the Fisher matrix, the products of those
    of its factors. The gradient of the weight W becomes ``g + r α W`` with the solution α of ::

        α = (q / N) T γ / ‖W‖²        γ = Σ h / (h + α)

    γ is the number of parameters that the examples determine. T is the noise: for squared errors
    their mean, at most that of the mean target, relative to the variance of the loss, and 1 for
    classes. It is 0 while most of the errors are predicted by those of neighbouring rows
    (``left_by_neighbours``), which are then not learned yet. In a network that has fitted noise,
    the product of a weight and its gradient on new examples is larger than on the examples of the
    training, by about T γ / N. The term adds as much. r is the residual (``Residuals.size``), an
    average over about twenty steps. It weakens the term where little noise is left, because a run
    ends long before the minimum, which the evidence assumes.

    With ``damps``, the relative damping ε of the block becomes ``ε + r λ / mean(h)`` with ::

        λ = (1 / n) T γ / ‖W‖²        γ = Σ h / (h + λ)

    n is the number of different rows in an averaged gradient. The noise of the average is ``T h /
    n`` along an eigenvector, and the gradient there is ``h w`` for a distance w from the minimum.
    The best estimate of w is ``h w / (h + λ)``, if w has the mean square ``T / (n λ)`` (Wiener).
    The formula estimates this mean square by that of the weights that the rows determine.
    """

    # The block of each weight; none where the rule does not apply.
    blocks: Mapping[str, FisherBlock] = field(default_factory=dict)
    # Whether fewer than 1,024 rows count: those of squared errors, whose noise is measured.
    few: bool = False
    damps: bool = False  # whether noise and few rows of statistics damp the blocks

    def start(self) -> Evidence:
        """Return the evidence before the first step."""
        none = (0.0,) * len(self.blocks)
        return Evidence(precisions=none, dampings=none)

    def kept_decay(self, seen: SeenExamples) -> float:
        """Return the factor of the weight decay beside the precisions."""
        return 1 - _REPLACED * seen.share if self.blocks and self._knows(seen) else 1.0

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

    def _knows(self, seen: SeenExamples) -> bool:
        """Return whether the rows are enough for the evidence."""
        return seen.familiar if self.few else seen.many

    def reads_errors(self, evidence: Evidence, step: int) -> bool:
        """Return whether a step may compute precisions from the errors of its rows."""
        return self.few and bool(self.blocks) and step >= evidence.due

    def is_due(self, evidence: Evidence, step: int, seen: SeenExamples) -> bool:
        """Return whether a step computes the precisions; ``step`` is the number of steps so far."""
        return step >= evidence.due and self._knows(seen) and seen.share > 0

    def measured(
        self,
        evidence: Evidence,
        step: int,
        seen: SeenExamples,
        values: Vector,
        rows: float,
        left: float = 1.0,
    ) -> Evidence:
        """Return the evidence with precisions from the averages of the blocks and the weights.

        ``rows`` is the number of rows in an averaged gradient, if all are different. ``left`` is
        ``left_by_neighbours``; errors of which less than a third is left are no noise.
        """
        noise = evidence.noise if left >= _LEFT else 0.0
        of_all = seen.scarcity * noise
        of_average = noise / min(rows, seen.different) if self.damps else 0.0
        pairs: list[tuple[float, float]] = []
        for name, block in self.blocks.items():
            h, square = _eigenvalues(block), max(float(np.vdot(values[name], values[name])), _LEAST)
            precision, damping = (_precision(h, s / square) for s in (of_all, of_average))
            relative = damping / max(float(h.mean()), _LEAST)
            pairs.append((precision, min(relative, _MOST_DAMPING)))
        precisions, dampings = zip(*pairs, strict=True)
        due = int(_GROWTH * step) + 1
        return evidence._replace(due=due, precisions=precisions, dampings=dampings)

    def damping(self, value: float, evidence: Evidence, examples: float) -> RelativeDamping:
        """Return a relative damping with that of the noise, for statistics of ``examples``."""
        pairs = zip(self.blocks.values(), evidence.dampings, strict=True)
        more = {block.params: evidence.residual * damping for block, damping in pairs}
        return RelativeDamping(value).with_more(more, examples)

    def strengths(self, evidence: Evidence) -> dict[str, float]:
        """Return the multiple of each weight that its gradient receives."""
        pairs = zip(self.blocks, evidence.precisions, strict=True)
        return {name: evidence.residual * precision for name, precision in pairs}


def left_by_neighbours(inputs: Array, errors: Array) -> float:
    """Return the part of squared errors that the errors of the nearest rows do not predict.

    It is the sum of the squares of the differences of the errors of each row and of the row with
    the nearest inputs, relative to that of the errors. It is 2 for noise, because the difference of
    two noises has twice the square of one. Errors of a function that is not learned yet are alike
    in rows that are close.

    Args:
        inputs: The inputs of each row, ``(rows, columns)``; the columns may have any units.
        errors: The errors of each row, ``(rows, features)``; those of targets that do not count are
            0, and are not compared.

    Returns:
        The part, of 512 rows if there are more. Rows with equal inputs are not compared: a row that
        a batch has twice would leave no errors. The part is 1 if no others remain, or no errors.
    """
    counts = errors.any(axis=1)
    inputs, errors = inputs[counts], errors[counts]
    every = slice(None, None, -(-len(inputs) // MOST_COMPARED) or 1)
    x, e = inputs[every].astype(np.float64), errors[every].astype(np.float64)
    if not len(x):
        return 1.0
    spreads = x.std(axis=0)
    x = (x - x.mean(axis=0)) / (spreads + (spreads == 0))
    squares = (x * x).sum(axis=1)
    sums = squares[:, None] + squares
    distances = sums - 2 * (x @ x.T)
    distances[distances <= _EQUAL * sums] = inf
    nearest, compared = distances.argmin(axis=1), np.isfinite(distances).any(axis=1)
    pairs = compared[:, None] & (e != 0) & (e[nearest] != 0)
    total = float((e[pairs] ** 2).sum())
    return float(((e - e[nearest])[pairs] ** 2).sum()) / total if total else 1.0


def _eigenvalues(block: FisherBlock) -> Array:
    """Return the eigenvalues of a Kronecker product."""
    inputs, outputs = (np.maximum(factor.eigenvalues(), 0.0) for factor in block.factors)
    products: Array = np.multiply.outer(inputs, outputs)
    return products


def _precision(eigenvalues: Array, scale: float) -> float:
    """Return the solution α of ``α = scale · Σ h / (h + α)``."""
    precision = scale * eigenvalues.size
    for _ in range(_PASSES if scale else 0):
        determined = float((eigenvalues / (eigenvalues + precision + _LEAST)).sum())
        precision = sqrt(precision * scale * determined)
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
    squared = all(isinstance(loss, NormalMeanNegativeLogProbLoss) for loss in objective.terms)
    return ShrinkageByEvidence(blocks if applies else {}, few=squared, damps=damps)
