"""Solves for a batch's natural gradient with the whole Fisher matrix, in prediction space.

Source: Goldshlager, Abrahamsen & Lin 2024, "A Kaczmarz-inspired approach to accelerate the
optimization of neural network wavefunctions", arXiv:2401.10190 (SPRING); Levenberg 1944 and
Marquardt 1963 for the damping.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from sys import float_info
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from kfac_engine._types import Array
from kfac_engine.arguments import check_at_least_zero, check_number, check_positive
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.memory import MemoryReport
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rollback import Undo
from kfac_engine.engine.sample_space import MOST_ROWS, Rows, SampleSpace
from kfac_engine.errors import InputError, MemoryLimitError, NonFiniteError, UnsupportedError
from kfac_engine.training.checkpoint import Number, Numbers
from kfac_engine.training.damping_adaptation import DampingAdaptation
from kfac_engine.training.kfac_updates import Move, StepInputs, Update
from kfac_engine.training.optimizer import (
    NonFinitePolicy,
    Optimizer,
    Proposal,
    Rate,
    SlotArrays,
    StepReport,
    evaluated,
)
from kfac_engine.training.vectors import Vector, Zeros, dot

# How the damping follows the reduction ratio; the number of dampings that a step tries, and the
# quotient of a damping and the next one.
FOLLOWS = DampingAdaptation(interval=1, decay=1 / 3, min_damping=1e-12)
_ATTEMPTS, _STRONGER = 8, 1 / 3
MOMENTUM = 0.5
# Least diagonal entry of the Fisher matrix in the damping, relative to the mean entry.
_LEAST = 1e-3
# Rounding of a loss that is computed in float64, relative to its size.
_RESOLUTION = 16 * float(np.finfo(np.float64).eps)
# Largest number of iterations with random rows; an iteration that adds less than this part of
# the model's decrease is the last.
_ITERATIONS, _LITTLE = 10, 0.02
# Bounds for exact steps of "auto": the most rows of an example, each of which takes a backward
# pass, and the most numbers of all rows that are read.
_MOST_OF_EXAMPLE, _MOST_NUMBERS = 8, 1 << 25


@dataclass(frozen=True, slots=True)
class GaussNewtonUpdate(Update):
    """``φ = argmin ½‖R φ − ρ‖² + ½ λ‖φ − μ φ′‖²_D``, ``θ ← θ − η φ``, for the last update φ′.

    R and ρ are those of ``SampleSpace``. D is diagonal (``_damping_scale``). For ``D = I`` and
    ``c = μ φ′``, the minimum is ``c + Rᵀ (R Rᵀ + λI)⁻¹ (ρ − R c)``. With ``l2``, λ contains it,
    ``λ D`` is at least ``l2``, and ``c = (1 − l2/λ D⁻¹) μ φ′ + l2/λ D⁻¹ θ``.

    At most 256 rows are solved by one decomposition. For more rows, conjugate gradients minimize
    over φ. The matrix of 256 random rows, which differ between steps, preconditions them. They end
    with an iteration that adds less than a fiftieth to the decrease, or with the tenth; in a step
    with ten iterations, λ does not fall.

    A step that would raise the loss is tried again with more damping and without momentum. The
    parameters do not move if every try would raise the loss.
    """

    engine: Engine
    # How the damping changes; None for a constant damping and one try.
    adaptation: DampingAdaptation | None

    def new_slots(self, parameters: Vector) -> SlotArrays:
        """Return updates of zero."""
        return {"momentum": Zeros(parameters)}

    def __call__(self, step: StepInputs) -> Move:
        """Compute the new parameters of a step, and write the new update."""
        with step.clock("gradients"):
            space = self.engine.passes.sample_space(step.batch)
        equations = _Equations(space, step, scales=self.engine.example_axes.in_sets)
        move = self._tried(equations, step)
        for name, array in equations.update.items():
            step.new_slots["momentum"][name][...] = array
        assert move.following is not None, "this update sets the damping"
        grows = move.following > step.damping
        return move._replace(missed=equations.missed(move.following) if grows else 0.0)

    def suits(self, batch: Sequence[Batch]) -> bool:
        """Return whether the rows of a batch lie within the bounds of exact steps and memory."""
        try:
            space = self.engine.passes.sample_space(batch)
            parameters = sum(value.size for value in self.engine.passes.model.parameters.values())
            read = min(space.rows, MOST_ROWS)
            if (
                space.most_of_example > _MOST_OF_EXAMPLE
                or not read <= parameters <= _MOST_NUMBERS // read
            ):
                return False
            space.check(space.sampled(0))
        except (MemoryLimitError, UnsupportedError):
            return False
        return True

    def _tried(self, equations: "_Equations", step: StepInputs) -> Move:
        damping, adaptation, momentum = step.damping, self.adaptation, step.momentum or 0.0
        before = equations.loss + 0.5 * step.l2 * dot(step.parameters, step.parameters)
        ratio = None
        for _ in range(1 if adaptation is None else _ATTEMPTS):
            with step.clock("precondition"):
                trial = equations.solved(damping, momentum)
            following = damping / _STRONGER
            if trial is not None:
                move = Move(trial.values, trial.predicted, step.rate, momentum, ratio, damping)
                move = move._replace(following=damping, iterations=trial.iterations)
                if adaptation is None:
                    return move
                with step.clock("damping"):
                    change = self._loss(step, trial.values) - before
                if abs(trial.predicted) <= _RESOLUTION * abs(before):
                    return move  # the change is only rounding
                adapted, ratio = adaptation.adapted(damping, change, trial.predicted, step.l2)
                if change <= 0:
                    # Weaker damping has just failed, or needs more iterations.
                    if damping > step.damping or trial.iterations == _ITERATIONS:
                        adapted = max(adapted, damping)
                    return move._replace(ratio=ratio, following=adapted)
            damping, momentum = following, 0.0
        for array in equations.update.values():
            array[...] = 0
        values = {name: value.copy() for name, value in step.parameters.items()}
        return Move(values, 0.0, step.rate, momentum, ratio, step.damping, damping)

    def _loss(self, step: StepInputs, values: Vector) -> float:
        """Return the loss at other parameters with its penalty; infinity if it is not finite."""
        engine = self.engine
        try:
            # An error of one process becomes an error of all processes.
            with engine.passes.agreement.operation("loss of a trial"):
                engine.set_parameters(values, copy=False)
                loss, _ = engine.passes.sample_space(step.batch).residuals()
        except NonFiniteError:
            return inf
        finally:
            engine.set_parameters(step.parameters, copy=False)
        return loss + 0.5 * step.l2 * dot(values, values)


class _Trial(NamedTuple):
    """The new parameters for a damping, and the change of the loss that the model predicts.

    ``iterations`` is the number of iterations of conjugate gradients, 0 for a direct solution.
    """

    values: dict[str, Array]
    predicted: float
    iterations: int


class _Solution(NamedTuple):
    """``φ = argmin ½‖R φ − ρ‖² + ½ λ‖φ‖²`` and ``R φ``."""

    vector: NDArray[np.float64]
    image: NDArray[np.float64]
    iterations: int


class _Equations:
    """The linear equations of a step, for any damping.

    They are solved for ``ψ = √D φ`` with the rows ``R / √D``, so that the damping is λI. Vectors
    over the parameters have the scale of ψ, except those in ``_Trial`` and in ``update``.

    Attributes:
        loss: Loss of the batch, in float64.
        update: The update φ of the latest solution.
        promised: Fall of the loss that the model predicted for the first solution.
    """

    def __init__(self, space: SampleSpace, step: StepInputs, *, scales: bool) -> None:
        self._space, self._step = space, step
        self.loss, self._rho = space.residuals()
        with step.clock("statistics"):
            self._rows = space.sampled(step.step)
            if not any(bool(array.any()) for array in step.slots["momentum"].values()):
                space.check(self._rows)
            matrix, places = self._rows.matrix, self._rows.places
            # No damping of the step is below l2: λ does not fall between tries.
            scale = _damping_scale(self._rows, scales=scales)
            self._roots = np.sqrt(np.maximum(scale, min(step.l2 / step.damping, 1.0)))
            np.divide(matrix, self._roots[places], out=matrix)
            self._products = self._rows.gram()
        self._whole = len(self._rows.matrix) == space.rows
        self.update: dict[str, Array] = {}
        self.promised = 0.0

    def missed(self, damping: float) -> float:
        """Return ``promised`` if a damping exceeds the mean eigenvalue of R D⁻¹ Rᵀ, else 0."""
        return self.promised if damping > np.diagonal(self._products).mean() else 0.0

    def solved(self, damping: float, momentum: float) -> _Trial | None:
        """Return the solution; None if rounding makes the matrix indefinite."""
        step, rho, space = self._step, self._rho, self._space
        damped = self._products.copy(order="F")
        damped[np.diag_indices(len(damped))] += damping
        root, failed = lapack.dpotrf(damped, lower=1, overwrite_a=1, clean=0)
        if failed:
            return None
        centre = self._centre(damping, momentum)
        of_centre = 0.0 if centre is None else self._image(centre)
        solve = self._directly if self._whole else self._iteratively
        solution = solve(rho - of_centre, root, damping)
        image = of_centre + solution.image
        psi = solution.vector if centre is None else centre + solution.vector
        named = space.named(psi / self._roots)
        self.update = update = {name: named[name] for name in step.parameters}  # no tied copies
        of_rho, curvature = space.inner(image, rho, image)
        slope = -of_rho
        if step.l2:
            slope -= step.l2 * dot(step.parameters, update)
            curvature += step.l2 * dot(update, update)
        values = {
            name: (value - step.rate * update[name]).astype(value.dtype, copy=False)
            for name, value in step.parameters.items()
        }
        predicted = step.rate * slope + 0.5 * step.rate * step.rate * curvature
        self.promised = self.promised or -predicted
        return _Trial(values, predicted, solution.iterations)

    def _centre(self, damping: float, momentum: float) -> NDArray[np.float64] | None:
        """Return ``√D c``: the damping pulls the update to c. None stands for zero."""
        step, previous, centre = self._step, self._step.slots["momentum"], None
        part = step.l2 / (damping * self._roots**2)
        if momentum > 0 and any(bool(array.any()) for array in previous.values()):
            centre = (1 - part) * momentum * self._space.flat(previous) * self._roots
        if step.l2:
            pull = part * self._space.flat(step.parameters) * self._roots
            centre = pull if centre is None else centre + pull
        return centre

    def _directly(
        self, right: NDArray[np.float64], root: NDArray[np.float64], damping: float
    ) -> _Solution:
        rows = self._rows
        y, _ = lapack.dpotrs(root, rows.gathered(right), lower=1)
        # R Rᵀ y = ρ − λ y, so that R φ needs no product.
        return _Solution(rows.combine(y), right - damping * rows.spread(y), 0)

    def _iteratively(
        self, right: NDArray[np.float64], root: NDArray[np.float64], damping: float
    ) -> _Solution:
        """Return the result of conjugate gradients, preconditioned by the random rows.

        Source: Björck 1996, "Numerical Methods for Least Squares Problems", algorithm 7.4.1
        (PCGLS).
        """
        residual, vector, total = right, np.zeros(self._rows.size), 0.0
        direction, last, iteration = np.zeros_like(vector), inf, 0
        while iteration < _ITERATIONS:
            gradient = self._combine(residual) - damping * vector
            solved, _ = lapack.dpotrs(root, self._rows.image(gradient), lower=1)
            preconditioned = (gradient - self._rows.combine(solved)) / damping
            slope = float(gradient @ preconditioned)
            direction = preconditioned + (slope / last) * direction
            image = self._image(direction)
            (curvature,) = self._space.inner(image, image)
            curvature += damping * float(direction @ direction)
            if not (slope > 0 and curvature > 0):  # the rest is only rounding
                break
            length, last = slope / curvature, slope
            vector = vector + length * direction
            residual = residual - length * image
            iteration, total = iteration + 1, total + length * slope
            if length * slope < _LITTLE * total:
                break
        return _Solution(vector, right - residual, iteration)

    def _image(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``R v / √D``."""
        rows, space = self._rows, self._space
        if self._whole:
            return rows.spread(rows.image(flat))
        flat = flat / self._roots
        if space.factored is not None:
            return space.factored.image(flat)
        return space.image(space.named(flat))

    def _combine(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``Rᵀ u / √D``."""
        space = self._space
        if space.factored is not None:
            return space.factored.combine(u) / self._roots
        return space.flat(space.combine(u, tuple(self._step.parameters))) / self._roots


def _damping_scale(rows: Rows, *, scales: bool) -> NDArray[np.float64]:
    """Return the diagonal of D, ``(P,)``: 1, or the root of the relative diagonal of ``RᵀR``."""
    if not scales:
        return np.ones(rows.size)
    squares = rows.squares()
    relative = squares / max(float(squares.mean()), float_info.min)
    scale: NDArray[np.float64] = np.sqrt(np.maximum(relative, _LEAST))
    return scale


class GaussNewton(Optimizer):
    """Natural gradient with the whole Fisher matrix of the batch, without blocks.

    R has one row for each number that the losses predict. The Fisher matrix is ``F = RᵀR``, and
    the gradient is ``g = Rᵀρ`` with the residuals ρ::

        φ ← argmin ½‖R φ − ρ‖² + ½ λ‖φ − μ φ′‖²_D,    θ ← θ − η φ

    where φ′ is the previous update. For ``μ = 0`` this is the damped Gauss–Newton step
    ``(F + λD)⁻¹ g``. D is the identity, except where examples are in several sets with inputs of
    their own, such as the points of an equation. There it is ``√(diag F / mean of diag F)`` of the
    rows that the step reads, with a least ratio of 0.001.

    With at most 256 rows, one Cholesky decomposition of ``R D⁻¹ Rᵀ + λI`` solves for it. With more
    rows, conjugate gradients solve to about two percent of the decrease, in three to ten iterations
    for most steps. 256 random sums of rows, whose matrix has nearly the same large eigenvalues,
    precondition them. A step takes 32,000 multiplications per parameter and some passes over the
    batch. It needs memory for 1536 float64 numbers per parameter; ``memory`` returns the bytes, and
    each step checks them.

    λ follows the reduction ratio. If a step would raise the batch's loss, it is tried again with
    more damping, eight times in all. The parameters do not move if every try would raise the loss.

    All losses with a factor of their Fisher matrix, such as squared errors, are supported, with
    several losses, batches in parts, weights and several processes. Models whose normalizations
    use statistics of the batch are not supported.

    Source: Goldshlager, Abrahamsen & Lin 2024, arXiv:2401.10190 (SPRING), equation 18; arXiv:
    2505.12149 for equations.

    Args:
        engine: The engine whose parameters are trained.
        learning_rate: η, a number or a function of the number of steps so far.
        damping: λ of the first step, positive. It includes ``l2``.
        momentum: μ in [0, 1).
        l2: Coefficient of ``½ l2 ‖θ‖²``, which is added to the loss; at least 0.
        adapt_damping: How λ follows the reduction ratio: a ``DampingAdaptation``, or True for
            ``DampingAdaptation(1, 1 / 3, 1e-12)``. If False, λ is constant and every step is taken.
        non_finite: Reaction to a batch that yields NaN or infinity: ``"raise"`` or ``"skip"``.

    Raises:
        InputError: An option lies outside its range.
    """

    def __init__(
        self,
        engine: Engine,
        learning_rate: Rate = 1.0,
        damping: float = 1.0,
        momentum: float = MOMENTUM,
        *,
        l2: float = 0.0,
        adapt_damping: bool | DampingAdaptation = True,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        super().__init__(engine, learning_rate, 0.0, non_finite)
        check_number("momentum", momentum, "[0, 1)")
        check_at_least_zero("l2", l2)
        if not isinstance(adapt_damping, bool | DampingAdaptation):
            raise InputError(
                f"adapt_damping must be True, False or a DampingAdaptation, got {adapt_damping!r}."
            )
        adaptation = FOLLOWS if adapt_damping is True else adapt_damping or None
        self._momentum, self._l2, self._next_damping = float(momentum), float(l2), 0.0
        self._update = GaussNewtonUpdate(engine, adaptation)
        self.damping = damping
        self._slots = self._update.new_slots(self._parameters())
        self._sealed = True

    @property
    def damping(self) -> float:
        """λ of the next step; can be set."""
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        check_positive("damping", value)
        if value < self._l2:
            raise InputError(
                f"damping is {value!r} and contains l2, which is {self._l2!r}; give a damping of "
                f"at least l2."
            )
        self._damping = float(value)

    def memory(self, batch_size: int = 1, accumulate: int = 1) -> MemoryReport:
        """Return a bound of the peak memory of training; rows and products are ``scratch``.

        Args:
            batch_size: Number of examples of a batch, or of each of its parts.
            accumulate: Number of parts of a batch.

        Returns:
            Bytes of each part of a step. Inputs and targets are not included.

        Raises:
            InputError: An argument is not a positive whole number.
        """
        report = super().memory(batch_size, accumulate)
        shards = self.engine.passes.agreement.communicator.size
        rows = self.engine.passes.sample_space_bytes(batch_size * accumulate * shards)
        return replace(report, scratch=report.scratch + rows)

    def _propose(
        self, batch: Sequence[Batch], scale: float, clock: StageClock, undo: Undo
    ) -> Proposal:
        del undo  # after each try, the engine has its old parameters
        rate = scale * evaluated(self._learning_rate, self.steps)
        loss = self._differentiated(batch, clock, losses_alone=True).loss
        parameters, slots = self._parameters(), self._new_slots()
        step = StepInputs(
            gradients={},  # the rows and the residuals take their place
            parameters=parameters,
            slots=self._slots,
            new_slots=slots,
            step=self.steps,
            loss=loss,
            rate=rate,
            scale=scale,
            momentum=self._momentum,
            damping=self._damping,
            l2=self._l2,
            batch=batch,
            examples=sum(map(sum, self.engine.passes.part_sizes)),
            predicts=self._update.adaptation is not None,
            clock=clock,
        )
        move = self._update(step)
        assert move.following is not None, "this update sets the damping"
        self._next_damping = move.following
        penalty = 0.5 * self._l2 * dot(parameters, parameters) if self._l2 else 0.0
        report = StepReport(
            loss + penalty,
            rate,
            move.momentum,
            move.damping,
            move.ratio,
            move.predicted,
            penalty,
            seconds=clock.seconds,
        )
        return Proposal(move.values, slots, report)

    def _adapt(self, proposal: Proposal, batch: Sequence[Batch], clock: StageClock) -> StepReport:
        del batch, clock
        self._damping = self._next_damping
        return proposal.report

    def restrain(self) -> None:
        """Take shorter steps with ten times the damping."""
        super().restrain()
        self._damping *= 10

    @property
    def _table(self) -> Numbers:
        return {**super()._table, "damping": Number("_damping", (float_info.min, float_info.max))}
