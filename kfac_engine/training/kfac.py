"""The K-FAC optimizer: statistics, damping and the update of a step."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from typing import Literal, TypeAlias

from kfac_engine._types import Array
from kfac_engine.arguments import one_of, positive
from kfac_engine.curvature.config import RelativeDamping
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.rollback import undone_on_overflow
from kfac_engine.errors import InputError, NonFiniteError
from kfac_engine.losses.objective import Targets
from kfac_engine.training.adaptive_lengths import AdaptiveLengthUpdate, root_outputs
from kfac_engine.training.curvature_updates import CurvatureUpdates, LastUpdates, Periods
from kfac_engine.training.damping_adaptation import DampingAdaptation
from kfac_engine.training.kfac_updates import (
    RatedUpdate,
    StepInputs,
    Update,
)
from kfac_engine.training.optimizer import (
    NonFinitePolicy,
    Optimizer,
    Proposal,
    Rate,
    check_rate,
    evaluated_rate,
    fraction,
)
from kfac_engine.training.report import StageClock, StepReport

MomentumType: TypeAlias = Literal["adam", "regular"]

AUTO = "auto"
MOMENTUM_TYPES = ("adam", "regular")

# Damping at a learning rate, and relative damping of "auto": see docs/training.md.
_DAMPING, _RELATIVE_DAMPING = 0.01, 0.1


class KfacOptimizer(Optimizer):
    """K-FAC with momentum; ``learning_rate="auto"`` needs no learning rate.

    With a learning rate η and ``momentum_type="adam"``: ``v ← μ v + g``, ``u = (F + λ)⁻¹ v``,
    ``θ ← θ − η (u + w θ)``. The type ``"regular"`` averages natural gradients:
    ``v ← μ v + (F + λ)⁻¹ g``, ``u = v``.

    With ``"auto"``, gradients are averaged with weight ``1 − μ``, and the natural gradient of each
    matrix is scaled to the Frobenius norm ``k · update_length · √outputs``. The multiple k of a
    matrix grows while its gradients agree with its last update, and returns to 1 in noise
    (``AdaptiveLengthUpdate``). Vectors, embeddings and parameters without a layer are updated by
    Adam with ``adam_rate``. The damping is relative (``RelativeDamping``).

    The optimizer sets ``engine.damping`` and updates statistics and inverses itself;
    ``engine.schedule`` and ``engine.counter`` have no effect on it.

    Args:
        engine: The engine whose parameters are trained; its ``exps`` must contain −1.
        learning_rate: η, a number or a function of the number of steps so far; or ``"auto"``.
        damping: λ, 0.01 if None. With ``"auto"``, ε of the ``RelativeDamping``, 0.1 if None.
        momentum: μ in [0, 1).
        weight_decay: w, at least 0. With ``"auto"``, parameters shrink by w times
            ``update_length`` or ``adam_rate``.
        momentum_type: ``"adam"`` (the natural gradient of the averaged gradient) or ``"regular"``.
            ``"auto"`` needs ``"adam"``.
        norm_constraint: Bound of ``η² uᵀ(F + λ)u``, to which natural gradients are shortened; None
            for no bound. ``"auto"`` has no such bound.
        adapt_damping: Whether λ follows the reduction ratio (Levenberg–Marquardt), or a
            ``DampingAdaptation`` with other constants. It needs an absolute damping, which
            ``"auto"`` then uses as well.
        update_length: Length of the update of one output in the noise of the batches, for
            ``"auto"``.
        adam_rate: Learning rate of Adam, for ``"auto"``.
        statistics_every: Largest number of steps between two updates of the statistics. Periods
            grow: after t steps, an update is due as soon as the last one is ``t // 2`` steps old.
        statistics_part: Part of the batch whose statistics are computed, in (0, 1]; another part
            in each step. A model that runs with one batch size only takes the whole batch.
        refresh_every: Largest number of steps between two refreshes of the inverses.
        non_finite: ``"raise"`` or ``"skip"``: what a batch does that yields NaN or infinity.

    Raises:
        InputError: An option lies outside its range, or does not fit the others.
    """

    def __init__(  # noqa: PLR0913 (the options of the algorithm)
        self,
        engine: Engine,
        learning_rate: Rate | Literal["auto"] = "auto",
        damping: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        momentum_type: MomentumType = "adam",
        norm_constraint: float | None = None,
        adapt_damping: bool | DampingAdaptation = False,
        update_length: float = 0.025,
        adam_rate: Rate = 0.004,
        statistics_every: int = 5,
        statistics_part: float = 0.25,
        refresh_every: int = 25,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        auto = isinstance(learning_rate, str) and learning_rate == AUTO
        rate = update_length if auto else learning_rate
        super().__init__(engine, rate, weight_decay, non_finite)  # type: ignore[arg-type] # no text
        one_of("momentum_type", momentum_type, MOMENTUM_TYPES)
        fraction("momentum", momentum)
        positive("update_length", update_length)
        check_rate("adam_rate", adam_rate)
        regular = momentum_type == "regular"
        if norm_constraint is not None:
            positive("norm_constraint", norm_constraint)
        if auto and (regular or norm_constraint is not None):
            option = "momentum_type 'regular'" if regular else "norm_constraint"
            raise InputError(f"{option} needs a learning rate; learning_rate is 'auto'.")
        self._adaptation = _adaptation(adapt_damping)
        self._momentum = momentum
        self._update: Update = (
            AdaptiveLengthUpdate(engine, root_outputs(engine), momentum, adam_rate, weight_decay)
            if auto
            else RatedUpdate(engine, momentum, regular, norm_constraint, weight_decay)
        )
        periods = Periods(statistics_every, statistics_part, refresh_every)
        self._curvature = CurvatureUpdates(engine, periods)
        self._last = LastUpdates()
        self._relative = auto and self._adaptation is None
        default = _RELATIVE_DAMPING if self._relative else _DAMPING
        self.damping = default if damping is None else damping
        self._slots = self._update.new_slots(self._parameters())
        self._sealed = True

    @property
    def damping(self) -> float:
        """λ of the next step, or ε with ``"auto"``; can be set."""
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        positive("damping", value)
        self.engine.damping = RelativeDamping(value) if self._relative else value
        self._damping = float(value)

    def _propose(
        self, inputs: Mapping[str, Array], targets: Targets, scale: float, clock: StageClock
    ) -> Proposal:
        engine = self.engine
        rate = scale * evaluated_rate(self._learning_rate, self.steps)
        loss, gradients = self._gradients(inputs, targets, clock)
        self.damping = damping = self._damping  # engine.damping may have another value
        adapts = self._adaptation is not None and self._adaptation.is_due(self.steps)
        slots = self._new_slots()
        # Only steps that update the curvature have a state of the estimator to restore.
        guard = undone_on_overflow(engine.estimator, gradients, {}, -1.0)
        with guard if self._curvature.is_due(self.steps, self._last) else nullcontext():
            last = self._curvature.update(self.steps, self._last, (inputs, targets), clock)
            move = self._update(
                StepInputs(
                    gradients=gradients,
                    parameters=self._parameters(),
                    slots=self._slots,
                    new_slots=slots,
                    step=self.steps,
                    rate=rate,
                    scale=scale,
                    predicts=adapts,
                    clock=clock,
                )
            )
        refreshed = last.inverses != self._last.inverses
        self._last = last
        report = StepReport(loss, rate, self._momentum, damping, refreshed=refreshed)
        return Proposal(move.values, slots, report, move.predicted)

    def _adapt(
        self,
        proposal: Proposal,
        inputs: Mapping[str, Array],
        targets: Targets,
        clock: StageClock,
    ) -> StepReport:
        report, predicted = proposal.report, proposal.predicted
        if self._adaptation is None or predicted is None:
            return report
        with clock("damping"):
            try:
                change = self.engine.loss(inputs, targets) - report.loss
            except NonFiniteError:
                change = inf
            self.damping, ratio = self._adaptation.adapted(self._damping, change, predicted)
        return replace(report, reduction_ratio=ratio)

    def _numbers(self) -> dict[str, float]:
        return {
            **super()._numbers(),
            "statistics": self._last.statistics,
            "inverses": self._last.inverses,
            "damping": self._damping,
            "engine_damping": self.engine.damping,
        }

    def _set_numbers(self, numbers: Mapping[str, float]) -> None:
        super()._set_numbers(numbers)
        self._last = LastUpdates(int(numbers["statistics"]), int(numbers["inverses"]))
        self._damping = numbers["damping"]


def _adaptation(value: bool | DampingAdaptation) -> DampingAdaptation | None:
    if isinstance(value, DampingAdaptation):
        return value
    if value not in (True, False):
        raise InputError(
            f"adapt_damping must be True, False or a DampingAdaptation, got {value!r}."
        )
    return DampingAdaptation() if value else None
