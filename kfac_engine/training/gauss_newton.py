"""The natural gradient of a batch with its whole Fisher matrix, solved among the predictions.

Source: Goldshlager, Abrahamsen & Lin 2024, "A Kaczmarz-inspired approach to accelerate the
optimization of neural network wavefunctions", arXiv:2401.10190 (SPRING); Levenberg 1944 and
Marquardt 1963 for the damping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from kfac_engine._types import Array
from kfac_engine.arguments import at_least_zero, positive
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rollback import Undo
from kfac_engine.engine.sample_space import SampleSpace
from kfac_engine.errors import InputError, NonFiniteError, UnsupportedError
from kfac_engine.training.damping_adaptation import DampingAdaptation
from kfac_engine.training.optimizer import (
    NonFinitePolicy,
    Optimizer,
    Proposal,
    Rate,
    SlotArrays,
    StepReport,
    evaluated_rate,
    fraction,
)
from kfac_engine.training.vectors import Vector, Zeros, dot

# How the damping follows the reduction ratio, and the number of dampings that a step tries.
FOLLOWS = DampingAdaptation(interval=1, decay=1 / 3, min_damping=1e-12)
_ATTEMPTS = 8
MOMENTUM = 0.5
# Rounding of a loss that is computed in float64, relative to its size.
_RESOLUTION = 16 * float(np.finfo(np.float64).eps)
# Inner products are computed in float64 where the damping is below this part of their mean square:
# in float32 they have errors of this order.
_SMALL = 1e-5
# Largest difference of products that two ways compute, in float32 and in float64.
_ROUNDING: Mapping[str, float] = {"f": 1e-3, "d": 1e-7}


class Solution(NamedTuple):
    """The result of a step.

    Attributes:
        values: The new parameters.
        update: φ, the direction that was subtracted, by parameter.
        loss: Loss of the batch before the step, without the penalty.
        predicted: Change of the loss that the quadratic model predicts.
        ratio: Reduction ratio; None where the damping is not adapted.
        damping: λ of the step.
        following: λ of the next step.
    """

    values: dict[str, Array]
    update: dict[str, Array]
    loss: float
    predicted: float
    ratio: float | None
    damping: float
    following: float


@dataclass(frozen=True, slots=True)
class GaussNewtonStep:
    """``φ = argmin ½‖R φ − ρ‖² + ½ λ‖φ − μ φ′‖²``, ``θ ← θ − η φ``, for the previous update φ′.

    R and ρ are those of ``SampleSpace``. With ``c = μ φ′`` the minimum is
    ``c + Rᵀ (R Rᵀ + λI)⁻¹ (ρ − R c)``. With ``l2``, λ contains it, and ``c = (1 − l2/λ) μ φ′ +
    l2/λ θ``.

    Where a step would raise the loss, it is tried again with more damping and without momentum. No
    step is taken if none of the tries lowers the loss.

    Attributes:
        engine: The engine.
        adaptation: How the damping changes; None for a constant damping and one try.
    """

    engine: Engine
    adaptation: DampingAdaptation | None

    def __call__(  # noqa: PLR0913 (the numbers of a step)
        self,
        batch: Sequence[Batch],
        parameters: Vector,
        previous: Vector,
        *,
        rate: float,
        momentum: float,
        damping: float,
        l2: float,
        clock: StageClock,
        checked: bool = False,
    ) -> Solution:
        """Return the new parameters of a step; the parameters of the engine do not change.

        Args:
            batch: The parts of the batch.
            parameters: Values by name.
            previous: φ′.
            rate: η.
            momentum: μ.
            damping: λ, which contains ``l2``.
            l2: Coefficient of ``½ l2 ‖θ‖²`` in the loss.
            clock: Measures the stages.
            checked: Whether the rows of such a batch have been compared with products before.
        """
        names = tuple(parameters)
        with clock("gradients"):
            space = self.engine.sample_space(batch)
            loss, rho = space.residuals()
        with clock("statistics"):
            K = _Inner(space)
            K.prepare(damping)
        centre = _centre(parameters, previous, momentum, damping, l2)
        with clock("precondition"):
            offset = space.image(centre) if centre else np.zeros(space.rows)
        before = loss + 0.5 * l2 * dot(parameters, parameters)
        following, ratio = damping, None
        tries = 1 if self.adaptation is None else _ATTEMPTS
        for number in range(tries):
            damping = following
            with clock("inverses"):
                y = K.solve(rho - offset, damping)
            if y is None:  # the damping is below the rounding of the inner products
                following = damping / FOLLOWS.decay
                continue
            with clock("precondition"):
                update = space.combine(y, names)
                if not checked and not number:
                    _check_rows(space, K, y, update)
                for name, array in centre.items():
                    update[name] += array
            # K y = ρ − R c − λ y, so that R φ follows without a product.
            image = rho - damping * y
            predicted = _predicted(rate, rho, image, update, parameters, l2)
            values = {
                name: (value - rate * update[name]).astype(value.dtype)
                for name, value in parameters.items()
            }
            if self.adaptation is None:
                return Solution(values, update, loss, predicted, None, damping, damping)
            with clock("damping"):
                change = self._penalized(batch, values, parameters, l2) - before
            if abs(predicted) <= _RESOLUTION * abs(before):  # no change is left but rounding
                return Solution(values, update, loss, predicted, None, damping, damping)
            following, ratio = self.adaptation.adapted(damping, change, predicted, l2)
            if change <= 0:
                return Solution(values, update, loss, predicted, ratio, damping, following)
            following = max(following, damping / FOLLOWS.decay)
            centre = _centre(parameters, {}, 0.0, following, l2)
            with clock("precondition"):
                offset = space.image(centre) if centre else np.zeros(space.rows)
        still = {name: value.copy() for name, value in parameters.items()}
        none = {name: np.zeros_like(value) for name, value in parameters.items()}
        return Solution(still, none, loss, 0.0, ratio, damping, following)

    def _penalized(
        self, batch: Sequence[Batch], values: Vector, parameters: Vector, l2: float
    ) -> float:
        """Return the loss at other parameters, infinity if it is not finite."""
        engine = self.engine
        try:
            engine.set_parameters(values, copy=False)
            return engine.sample_space(batch).residuals()[0] + 0.5 * l2 * dot(values, values)
        except NonFiniteError:
            return inf
        finally:
            engine.set_parameters(parameters, copy=False)


class _Inner:
    """Inner products of rows, in float32 as long as the damping allows it."""

    def __init__(self, space: SampleSpace) -> None:
        self._space, self._precise = space, False
        self._products = np.zeros((0, 0))

    def prepare(self, damping: float) -> None:
        """Compute the inner products for a damping."""
        if not self._products.size:
            self._products = self._space.gram(precise=False)
        mean = float(np.mean(np.diag(self._products)))
        if not self._precise and damping < _SMALL * mean:
            self._products, self._precise = self._space.gram(precise=True), True

    def times(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``R Rᵀ y``."""
        K = self._products
        lower = np.tril(K, -1)
        product: NDArray[np.float64] = lower @ y + lower.T @ y + np.diag(K) * y
        return product

    def solve(self, right: NDArray[np.float64], damping: float) -> NDArray[np.float64] | None:
        """Return ``(R Rᵀ + λI)⁻¹ right``; None if the matrix is not positive in float64."""
        damped = self._products.copy(order="F")
        damped[np.diag_indices(len(damped))] += damping
        root, failed = lapack.dpotrf(damped, lower=1, overwrite_a=1, clean=0)
        if failed:
            return None
        solution, _ = lapack.dpotrs(root, right, lower=1)
        return np.asarray(solution)


def _centre(
    parameters: Vector, previous: Vector, momentum: float, damping: float, l2: float
) -> dict[str, Array]:
    """Return c, to which the damping pulls the update; nothing for zero."""
    moves = momentum > 0 and any(bool(array.any()) for array in previous.values())
    if not (moves or l2):
        return {}
    part = l2 / damping
    centre = {}
    for name, value in parameters.items():
        array = part * value
        if moves:
            array += (1 - part) * momentum * previous[name]
        centre[name] = array.astype(value.dtype)
    return centre


def _predicted(
    rate: float,
    rho: NDArray[np.float64],
    image: NDArray[np.float64],
    update: Vector,
    parameters: Vector,
    l2: float,
) -> float:
    """Return ``−η gᵀφ + ½ η² φᵀ(F + l2)φ`` with ``gᵀφ = ρᵀRφ + l2 θᵀφ``."""
    slope, curvature = float(rho @ image), float(image @ image)
    if l2:
        slope += l2 * dot(parameters, update)
        curvature += l2 * dot(update, update)
    return -rate * slope + 0.5 * rate**2 * curvature


def _check_rows(
    space: SampleSpace, K: _Inner, y: NDArray[np.float64], combined: Mapping[str, Array]
) -> None:
    """Refuse a model whose rows, read layer by layer, are not those of its products.

    Rows assume that an example depends on its own inputs only.
    """
    expected, found = space.image(combined), K.times(y)
    kinds = {array.dtype.char for array in combined.values()}
    bound = max(_ROUNDING.get(kind, 1e-3) for kind in kinds)
    if np.linalg.norm(found - expected) > bound * np.linalg.norm(expected):
        raise UnsupportedError(
            "the derivatives of single examples do not add up to the derivatives of the batch: "
            "examples of this model depend on each other; use KfacOptimizer."
        )


class GaussNewton(Optimizer):
    """Natural gradient with the whole Fisher matrix of the batch, for fewer rows than parameters.

    With R the rows of the Fisher matrix ``F = RᵀR``, one for each number that the losses predict,
    and ρ the residuals, ``g = Rᵀρ``::

        φ ← argmin ½‖R φ − ρ‖² + ½ λ‖φ − μ φ‖²,    θ ← θ − η φ

    where φ on the right is the previous update. For ``μ = 0`` this is the damped Gauss–Newton step
    ``(F + λ)⁻¹ g``. One Cholesky decomposition of ``R Rᵀ + λI``, ``(rows, rows)``, solves it. A step
    takes the time of ``rows² · parameters`` multiplications, and the memory of ``memory``: it suits
    some thousand rows, such as the points of an equation.

    λ follows the reduction ratio. A step that would raise the loss of the batch is tried again
    with more damping, up to eight times, before the parameters move.

    Squared errors and all other losses with a factor of their Fisher matrix, several losses, parts
    of a batch and weights are supported; several processes and normalizations by the batch are not.

    Source: Goldshlager, Abrahamsen & Lin 2024, arXiv:2401.10190 (SPRING), equation 18; arXiv:
    2505.12149 for equations.

    Args:
        engine: The engine whose parameters are trained.
        learning_rate: η, a number or a function of the number of steps so far.
        damping: λ of the first step, positive; it contains ``l2``.
        momentum: μ in [0, 1).
        l2: Coefficient of ``½ l2 ‖θ‖²``, which is added to the loss; at least 0.
        adapt_damping: Whether λ follows the reduction ratio, or a ``DampingAdaptation`` with other
            constants than ``DampingAdaptation(1, 1 / 3, 1e-12)``. If False, λ is constant and each
            step is taken.
        non_finite: Reaction to a batch that yields NaN or infinity: ``"raise"`` or ``"skip"``.

    Raises:
        InputError: An option lies outside its range, or the engine has several processes.
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
        fraction("momentum", momentum)
        at_least_zero("l2", l2)
        if not engine.agreement.alone:
            raise InputError(
                "GaussNewton runs in one process, because it needs all rows of a batch together; "
                "use KfacOptimizer with several processes."
            )
        if not isinstance(adapt_damping, bool | DampingAdaptation):
            raise InputError(
                f"adapt_damping must be True, False or a DampingAdaptation, got {adapt_damping!r}."
            )
        adaptation = FOLLOWS if adapt_damping is True else adapt_damping or None
        self._momentum, self._l2 = float(momentum), float(l2)
        self._solve = GaussNewtonStep(engine, adaptation)
        self._checked, self._next_damping = False, 0.0
        self.damping = damping
        self._slots = {"momentum": Zeros(self._parameters())}
        self._sealed = True

    @property
    def damping(self) -> float:
        """λ of the next step; can be set."""
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        positive("damping", value)
        if value < self._l2:
            raise InputError(
                f"damping is {value!r} and contains l2, which is {self._l2!r}; give a damping of "
                f"at least l2."
            )
        self._damping = float(value)

    def _propose(
        self, batch: Sequence[Batch], scale: float, clock: StageClock, undo: Undo
    ) -> Proposal:
        del undo  # the engine has its old parameters after each try
        rate = scale * evaluated_rate(self._learning_rate, self.steps)
        parameters = self._parameters()
        solution = self._solve(
            batch,
            parameters,
            self._slots["momentum"],
            rate=rate,
            momentum=self._momentum,
            damping=self._damping,
            l2=self._l2,
            clock=clock,
            checked=self._checked,
        )
        slots = self._new_slots()
        for name, array in solution.update.items():
            slots["momentum"][name][...] = array
        penalty = 0.5 * self._l2 * dot(parameters, parameters) if self._l2 else 0.0
        self._next_damping = solution.following
        report = StepReport(
            solution.loss + penalty,
            rate,
            self._momentum,
            solution.damping,
            solution.ratio,
            solution.predicted,
            penalty,
            seconds=clock.seconds,
        )
        return Proposal(solution.values, slots, report)

    def _adapt(self, proposal: Proposal, batch: Sequence[Batch], clock: StageClock) -> StepReport:
        del batch, clock
        self._damping, self._checked = self._next_damping, True
        return proposal.report

    def restrain(self) -> None:
        """Take shorter steps with ten times the damping."""
        super().restrain()
        self._damping *= 10

    def _numbers(self) -> dict[str, float]:
        return {**super()._numbers(), "damping": self._damping}

    def _check_numbers(self, numbers: Mapping[str, float]) -> None:
        positive("damping", numbers["damping"])

    def _set_numbers(self, numbers: Mapping[str, float]) -> None:
        super()._set_numbers(numbers)
        self._damping = float(numbers["damping"])
