"""Defines ``KfacOptimizer``, which combines statistics, damping and the update of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_at_least_zero, check_int, check_number, check_positive
from kfac_engine.backend.namespace import is_recorded, recordable
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.config import RelativeDamping
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.options import check_damping
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rollback import Undo
from kfac_engine.errors import InputError, NonFiniteError
from kfac_engine.layers.feature_powers import FeaturePowers
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.ctc import CTCNegativeLogProbLoss
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.losses.objective import Residuals
from kfac_engine.training.adaptive_lengths import (
    AVERAGE,
    IN_PLACE,
    KEPT,
    AdaptiveLengthUpdate,
    adaptive_lengths,
)
from kfac_engine.training.checkpoint import COUNTER, Number, Numbers, SavedState, saved
from kfac_engine.training.curvature_updates import CurvatureUpdates, PartialBatch
from kfac_engine.training.damping_adaptation import DampingAdaptation
from kfac_engine.training.evidence import (
    MOST_COMPARED,
    Evidence,
    ShrinkageByEvidence,
    shrinkage_by_evidence,
)
from kfac_engine.training.gauss_newton import FOLLOWS, MOMENTUM, GaussNewtonUpdate
from kfac_engine.training.kfac_updates import (
    Correction,
    Move,
    RatedUpdate,
    StepInputs,
    Update,
)
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
from kfac_engine.training.quadratic_update import QuadraticUpdate
from kfac_engine.training.repeated_batch import RepeatedBatch, divided, mark, mark_of_rest
from kfac_engine.training.seen_examples import SeenExamples, fingerprints, gathered
from kfac_engine.training.stacked_update import StackedUpdate, stacked_update
from kfac_engine.training.vectors import Vector, Zeros, add_multiple, dot

# Learning rates that the optimizer chooses itself.
AUTO, QUADRATIC = "auto", "quadratic"
# Group of the planner's state in checkpoints.
_REFRESHES = "refreshes"
# Group of the examples that were seen, and of the batch that comes again.
EXAMPLES, REPEATED = "examples", "repeated"
# Group of the evidence, in states of networks that read a table.
EVIDENCE = "evidence"
_EXACT = "exact"  # the entry with the index of the rule of the last step
# Factors of the damping and of the learning rate after the loss has exploded.
_MORE_DAMPING, _SHORTER = 10, 0.3

# Damping at a learning rate, and relative damping of "auto": see docs/default_rule.md.
_DAMPING, _RELATIVE_DAMPING = 0.01, 0.1
# Dampings of the first exact step, in the sample space and by the quadratic model, and how that of
# the quadratic model changes.
_EXACT_DAMPINGS, _FOLLOWS_QUICKLY = (1.0, 1e-4), DampingAdaptation(interval=2, decay=0.9)
# Rounding of a loss relative to its size.
_RESOLUTION = float(np.finfo(np.float64).eps)
# A step of a higher rate may overflow although its natural gradient does not.
_LARGE_RATE = 1e6
# Weight decay of "auto".
_WEIGHT_DECAY = 0.05
# Momentum of learning rates other than "auto".
_MOMENTUM = 0.9
# Part of the default decay that new examples get: they cannot be fitted twice.
_OF_NEW = 0.25
# Steps of an epoch, above which the default decay of a step shrinks: that of an epoch is constant.
_EPOCH = 200.0
# Number of repeated examples for which the weight decay doubles, and the decay's largest factor.
_FEW, _MOST_DECAY = 6000.0, 20.0
# Squared residuals of a table, relative to their expected size, below which few rows shrink the
# weights less.
_LITTLE_ERROR = 0.015
# Losses of which an example may have many targets, all of which must be predicted.
_CLASSES = CategoricalLogitsNegativeLogProbLoss, CTCNegativeLogProbLoss
# Residuals relative to their expected size, below which the updates of "auto" become shorter.
_SMALL_RESIDUALS = 0.1
# Number of independent batches that an average of gradients holds, about (1 + μ) / (1 − μ), and the
# largest factor of the lengths where epochs are shorter.
_AVERAGED, _LONGEST = 12.0, 2.0
_OF_TWO_BATCHES = 0.5  # a batch with a smaller share of the examples is one of several
# Bytes up to which a state has two copies.
_SMALL_STATE = 1 << 23


class Rule(NamedTuple):
    """How a step moves, with the numbers that belong to its update."""

    update: Update  # computes the new parameters
    momentum: Rate | None  # momentum; None if the update chooses it
    # Factor of the update, without a schedule; None for the learning rate of the optimizer.
    rate: float | None
    damping: float  # λ of the first step, or ε of a ``RelativeDamping`` if ``relative``
    relative: bool  # whether the damping is relative
    adaptation: DampingAdaptation | None  # how the damping changes; None if it is constant
    whole: bool = False  # whether statistics have all examples of a batch
    # Whether the update reads gradients, statistics and inverses, and not the rows of a batch.
    measures: bool = True


class Basis(NamedTuple):
    """What a step is computed from, beside the parameters."""

    batch: Sequence[Batch]  # the parts of the batch that the step fits
    loss: float  # their loss
    seen: SeenExamples  # the examples of all steps
    repeated: RepeatedBatch  # what the steps so far tell about the next step
    following: float | None = None  # damping of the next step, if the update has chosen it
    evidence: Evidence = Evidence()  # what the steps tell about the precisions of weights


class BatchFacts(NamedTuple):
    """What is known of the batch of a step."""

    loss: float  # its loss
    examples: int  # number of its examples, of all processes
    scarcity: float  # how few different examples the steps have had; see ``SeenExamples``
    share: float  # part of the examples of all steps that came again
    different: float  # number of different examples of all steps
    features: Array | None  # ``FeaturePowers.sums`` of the layers whose directions have bounds


class KfacOptimizer(Optimizer):
    """K-FAC with momentum; ``learning_rate="auto"`` needs no learning rate.

    With a learning rate η: ``v ← μ v + g``, ``u = (F + λ)⁻¹ v``, ``θ ← θ − η (u + w θ)``.

    With ``"auto"``, the natural gradient of an averaged gradient receives equal singular values for
    each matrix, and the Frobenius norm ``k · update_length · √outputs``. The multiple k grows while
    gradients agree with the last update, and returns to 1 in noise (``AdaptiveLengthUpdate``). Adam
    updates vectors, embeddings and parameters without a layer, with ``adam_rate``. Weights of runs
    that repeat few examples shrink more, and those of tables by their noise. If all losses are
    squared errors and every step has the same examples and targets, as for a function or an
    equation, steps are exact from the eleventh on: those of ``GaussNewton``, or of ``"quadratic"``
    if rows of the Fisher matrix are too many. The first exact steps leave examples out. If these
    examples show that the steps fit noise, the parameters before them return. A caller who passes
    ``damping``, ``momentum``, a positive ``weight_decay`` or ``adapt_damping`` excludes exact
    steps. docs/default_rule.md has all formulas and constants.

    With ``"quadratic"``, ``p = (F + λ)⁻¹ g``, ``v ← μ v − α p`` and ``θ ← θ − (v + w θ)``, where α
    and μ minimize the quadratic model of the loss with the whole Fisher matrix (``momentum=
    "quadratic"``), or α alone for a given μ. The model multiplies by the Fisher matrix of
    ``statistics_part`` of the batch. The learning rate of a report is −α. Setting
    ``learning_rate`` to a number multiplies the update by it.

    The optimizer sets ``engine.damping`` and updates statistics and inverses itself;
    ``engine.schedule`` and ``engine.counter`` have no effect on it.

    Args:
        engine: The engine whose parameters are trained; its ``exps`` must contain −1.
        learning_rate: η, a number or a function of the number of steps so far; ``"auto"`` or
            ``"quadratic"``.
        damping: λ, 0.01 if None; it contains ``l2``. With ``"auto"``, ε of the
            ``RelativeDamping``; None is 0.1, and more where a table is noisy. With a number
            or a function as the learning rate, it may be a ``RelativeDamping`` as well.
        momentum: μ in [0, 1), or a function of the number of steps so far; ``"quadratic"`` needs
            ``learning_rate="quadratic"``. None is 0.9; with ``"auto"``, None is 0.85, and up to
            0.95 for matrices whose gradients cancel (``AverageSpan``).
        weight_decay: w, at least 0; None is 0. With ``"auto"``, None is 0.05, and parameters shrink
            by w times ``update_length`` or ``adam_rate``, more with few examples, or by the
            evidence of a table's rows.
        l2: Coefficient of ``½ l2 ‖θ‖²``, which is added to the loss; at least 0. It is part of λ.
        adapt_damping: Whether λ follows the reduction ratio (Levenberg–Marquardt), or a
            ``DampingAdaptation`` with other constants. It needs an absolute damping, as
            ``"quadratic"`` does; ``"auto"`` then uses one.
        update_length: Frobenius norm of a matrix's update, divided by ``k √outputs``, for
            ``"auto"``.
        adam_rate: Learning rate of Adam, for ``"auto"``; less for a wide table that is an embedding
            and computes logits, and for a wide layer of more than 8,192 classes.
        statistics_every: Largest number of steps between two updates of the statistics. Periods
            grow: after t steps, an update is due as soon as the last one is ``t // 2`` steps old.
        statistics_part: Part of the batch whose statistics are computed, in (0, 1]; another part
            in each step. A model that runs with one batch size only takes the whole batch.
        refresh_every: Largest number of steps between two refreshes of the inverses.
        non_finite: Reaction to a batch that yields NaN or infinity: ``"raise"`` or ``"skip"``.

    Attributes:
        feature_inputs: The inputs of the layers whose features bound updates.
        counts_examples: Whether updates depend on how often examples come again.
        shrinks_inputs: Whether averages of the model's inputs shrink: with ``"auto"`` and its own
            damping.

    Raises:
        InputError: An option lies outside its range, or does not fit the others.
    """

    def __init__(  # noqa: PLR0913 (the options of the algorithm)
        self,
        engine: Engine,
        learning_rate: Rate | Literal["auto", "quadratic"] = "auto",
        damping: float | None = None,
        momentum: Rate | Literal["quadratic"] | None = None,
        weight_decay: float | None = None,
        *,
        l2: float = 0.0,
        adapt_damping: bool | DampingAdaptation = False,
        update_length: float = 0.03,
        adam_rate: Rate = 0.004,
        statistics_every: int = 10,
        statistics_part: float = 0.25,
        refresh_every: int = 25,
        non_finite: NonFinitePolicy = "raise",
    ) -> None:
        rule = _rule_of(learning_rate)
        plain, decays = damping is momentum is None, weight_decay
        own_rates: dict[object, float] = {AUTO: update_length, QUADRATIC: 1.0}
        rate = own_rates.get(rule, learning_rate)
        if weight_decay is None:
            weight_decay = _WEIGHT_DECAY if rule == AUTO else 0.0
        decay = cast("float | None", momentum)  # of "auto"
        if momentum is None:
            momentum = AVERAGE if rule == AUTO else _MOMENTUM
        super().__init__(engine, rate, weight_decay, non_finite)  # type: ignore[arg-type] # no text
        check_at_least_zero("l2", l2)
        check_positive("update_length", update_length)
        check_rate("adam_rate", adam_rate)
        check_number("statistics_part", statistics_part, "(0, 1]")
        check_int("statistics_every", statistics_every, least=1)
        _check_rule(rule, momentum)
        adaptation = _adaptation(adapt_damping)
        relative = _is_relative(rule, damping, adaptation)
        updates: dict[object, Callable[[], Update]] = {
            AUTO: lambda: adaptive_lengths(
                engine, self._parameters(), decay, adam_rate, weight_decay
            ),
            QUADRATIC: lambda: QuadraticUpdate(
                engine, PartialBatch(engine, statistics_part), weight_decay
            ),
            None: lambda: RatedUpdate(engine, weight_decay),
        }
        self._given = self._rule = Rule(
            updates[rule](),
            None if isinstance(momentum, str) else momentum,
            None,
            damping if damping is not None else _RELATIVE_DAMPING if relative else _DAMPING,
            relative,
            adaptation,
        )
        self._auto = u if isinstance(u := self._given.update, AdaptiveLengthUpdate) else None
        may_be_exact = rule == AUTO and plain and adaptation is None and not decays
        self._exact = _exact_rules(engine, l2) if may_be_exact else ()
        self._decay_follows = decays is None  # the examples that come again
        self._shrinkage = _shrinkage(
            engine,
            None if decays is not None or adaptation else self._auto,
            damps=rule == AUTO and damping is None and adaptation is None,
        )
        self._curvature = CurvatureUpdates(
            engine,
            Schedule(statistics_every, refresh_every),
            statistics_part,
            # Adam updates the parameters without a layer, unless a change is predicted.
            by_example=rule != AUTO or adaptation is not None,
        )
        self._measures, self._l2 = float(statistics_part), float(l2)
        self.feature_inputs = self._auto.features.inputs if self._auto else ()
        self.counts_examples = self._auto is not None and weight_decay > 0
        self.shrinks_inputs = self._shrinkage.damps
        self._basis = self._next_basis = Basis(
            (), 0.0, SeenExamples(), RepeatedBatch(), evidence=self._shrinkage.start()
        )
        self.damping = self._given.damping
        self._slots = self._given.update.new_slots(self._parameters())
        self._in_place = self._may_be_in_place()
        self._sealed = True

    @property
    def _states(self) -> int:
        """Number of states in memory: see ``IN_PLACE``; another process or a device may fail."""
        return 1 if self._in_place and self._rule is self._given else 2

    def _may_be_in_place(self) -> bool:
        """Return whether steps of the given rule write new averages to the memory of the old ones.

        A small state has two copies, which take less time than the checks before such a step.
        """
        rule, parameters = self._given, self._parameters().values()
        on_host = all(isinstance(array, np.ndarray) for array in parameters)
        cannot_fail = on_host and self.engine.passes.agreement.alone and rule.adaptation is None
        return self._auto is not None and cannot_fail and self._state_bytes > _SMALL_STATE

    @property
    def _copied_bytes(self) -> int:
        return self._lengths.portion_bytes(self._slots) if self._states == 1 else 0

    def _new_slots(self) -> SlotArrays:
        slots = {slot: self._slots[slot] for slot in IN_PLACE} if self._states == 1 else {}
        if not self._spare_slots:
            # Each step has new arrays for the directions.
            others = self._slots.keys() - slots.keys() - {"natural_gradient"}
            self._spare_slots = {slot: Zeros(self._slots[slot]) for slot in others}
        return self._spare_slots | slots

    @property
    def _rules(self) -> tuple[Rule, ...]:
        return (self._given, *self._exact)

    @property
    def damping(self) -> float:
        """λ of the next step, or a ``RelativeDamping``; it can be set, but its kind is fixed."""
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        self._of_engine = self.engine.damping = self._engine_damping(value)
        self._damping = RelativeDamping(value) if self._rule.relative else float(value)

    def _engine_damping(self, value: float) -> float:
        """Return the engine's damping for a value; a wrong value raises InputError."""
        check_positive("damping", value)
        relative = self._rule.relative
        if not relative and value < self._l2:
            raise InputError(
                f"damping is {value!r} and contains l2, which is {self._l2!r}; give a damping of "
                f"at least l2."
            )
        if isinstance(value, RelativeDamping) and not relative:
            raise InputError(
                f"this optimizer has an absolute damping; pass a number instead of {value!r}."
            )
        check_damping(float(value), self.engine.options.exps)
        return RelativeDamping(value) if relative else float(value)

    def _propose(
        self, batch: Sequence[Batch], scale: float, clock: StageClock, undo: Undo
    ) -> Proposal:
        features = FeaturePowers(self.feature_inputs, self.engine.collection.backend)
        before = self._basis
        reads = self._shrinkage.reads_rows(before.evidence, self.steps, before.seen)
        reads = reads and not before.repeated.awaits_trial
        residuals = (
            Residuals(errors=[] if reads else None, is_first=self.steps == 0 and bool(scale))
            if self._auto
            else None
        )
        # A step with rows reads no gradients, unless its batch has other examples.
        of_rows = not self._rule.measures
        loss, gradients, of_all, bound = self._differentiated(
            batch, clock, residuals, features, losses_alone=of_rows
        )
        residuals = residuals and of_all
        basis = self._basis_with(batch, loss, residuals, clock, undo)
        if of_rows and self._rule.measures:
            _, gradients, _, bound = self._differentiated(batch, clock)
        if self._exact and basis.repeated.tries:
            (basis, gradients), bound = self._tried(basis, gradients, clock), None
        values, slots = self._parameters(), (self._slots, self._new_slots() | self._kept())
        if self._add_penalties(gradients, values, basis):
            bound = None
        if self.engine.fisher.damping is not self._of_engine:  # another optimizer has set it
            self.damping = self._damping
        powers, backend = features.sums, self.engine.collection.backend
        facts = BatchFacts(
            basis.loss,
            sum(map(sum, self.engine.passes.part_sizes)),
            basis.seen.scarcity,
            basis.seen.share,
            basis.seen.different,
            powers if powers is None else backend.to_numpy(powers),
        )
        step = self._inputs(gradients, values, slots, self.steps, scale, residuals, facts)
        paused = self._exact and basis.repeated.paused
        decay = 0.0 if paused else self._shrinkage.kept_decay(basis.seen, basis.evidence)
        step = step._replace(decay=decay * step.decay, batch=basis.batch, clock=clock)
        with backend.shared_reads():
            complete = self._rule.update.begin(step)
            if self._rule.measures:
                self._update_curvature(step, basis, undo, bound)
        move = complete()
        if self._rule is not self._given:
            move, basis = self._judged(move, basis)
        self._next_basis = basis
        penalty = self._penalty() if self._l2 else 0.0
        report = StepReport(
            loss + penalty,
            float(step.rate) if move.rate is None else move.rate,
            step.momentum if move.momentum is None else move.momentum,
            float(step.damping if move.damping is None else move.damping),
            move.ratio,
            predicted_change=move.predicted,
            penalty=penalty,
            seconds=clock.seconds,
        )
        return Proposal(move.values, step.new_slots, report)

    def _damp(self, evidence: Evidence, examples: float, undo: Undo) -> None:
        """Set the damping of blocks by their noise, and by the few examples of statistics."""
        damping = self._shrinkage.damping(self._damping, evidence, examples)
        before = self._of_engine

        def restore() -> None:
            self._of_engine = self.engine.damping = before

        if vars(before) != vars(damping):
            undo.add(restore)
            self._of_engine = self.engine.damping = damping

    def _add_penalties(self, gradients: dict[str, Array], values: Vector, basis: Basis) -> bool:
        """Add the gradients of the penalties to those of the loss; return whether there are any."""
        shrinks = (
            self._rule is self._given
            and bool(self._shrinkage.blocks)
            and self._shrinkage.add_to(gradients, basis.evidence, values)
        )
        for name, gradient in gradients.items() if self._l2 else ():
            add_multiple(gradient, self._l2, values[name])
        return bool(shrinks or self._l2)

    def _inputs(
        self,
        gradients: Vector,
        parameters: Vector,
        slots: tuple[SlotArrays, SlotArrays],
        steps: int,
        scale: Any,
        residuals: Residuals | None,
        facts: "BatchFacts",
    ) -> StepInputs:
        """Return the inputs of an update; the arguments are as for ``moved``, and may be recorded.

        A caller replaces the fields ``batch`` and ``clock``.
        """
        rule, signal, momentum = self._rule, 1.0, self._rule.momentum
        if momentum is not None:
            momentum = evaluated(momentum, steps, "momentum", "[0, 1)")
        if residuals is not None:
            size = residuals.size()
            # A text is predicted when all of its characters are.
            if all(isinstance(term, _CLASSES) for term in self.engine.objective.terms):
                size = size * residuals.targets_of_example(facts.examples)
            signal = np.minimum(size / _SMALL_RESIDUALS, 1.0)
        if rule is self._given:
            scale = scale * signal
        longer = scale * self._longer(facts.examples, facts.scarcity, signal)
        if rule.rate is None:
            rate = longer * evaluated(self._learning_rate, steps)
        else:  # a schedule suppresses noise, which exact steps do not have
            rate = self._restraint * rule.rate if longer else 0.0
        return StepInputs(
            gradients=gradients,
            parameters=parameters,
            slots=slots[0],
            new_slots=slots[1],
            step=steps,
            loss=facts.loss,
            rate=rate,
            scale=scale,
            momentum=momentum,
            damping=self._damping,
            l2=self._l2,
            batch=(),
            examples=facts.examples,
            clock=StageClock(),
            predicts=rule.adaptation is not None and rule.adaptation.is_due(steps),
            decay=self._decay(facts, signal, residuals),
            spreads={} if residuals is None else residuals.spreads(),
            corrections={} if residuals is None else _corrections(residuals, steps, scale),
            features=facts.features,
        )

    def _update_curvature(
        self, step: StepInputs, basis: Basis, undo: Undo, bound: float | None
    ) -> None:
        """Update statistics and inverses where they are due.

        ``bound`` is an upper bound of the norm of the gradients, if it is known.
        """
        rule, due = self._rule, self._curvature.due(self.steps, step.examples)
        if not (due.statistics or due.refreshes):
            return
        undo.protect(step.gradients, -1.0, inf if step.rate > _LARGE_RATE else bound)
        whole = rule.whole or (rule is self._given and bool(self.measures_whole(self._slots)))
        if self.shrinks_inputs and rule is self._given:
            share = 1.0 if whole else self._curvature.part.share
            self._damp(basis.evidence, max(step.examples * share, 1.0), undo)
        self._curvature.update(due, step.batch, step.clock, whole=whole, by_example=rule.whole)

    def _basis_with(
        self,
        batch: Sequence[Batch],
        loss: float,
        residuals: Residuals | None,
        clock: StageClock,
        undo: Undo,
    ) -> Basis:
        """Return what a step is computed from, and follow the rule that suits its batch."""
        basis = self._basis
        seen, repeated, evidence = basis.seen, basis.repeated, basis.evidence
        if self.counts_examples or self._exact:
            drawn = self._fingerprints(batch)
        if self.counts_examples:
            seen = seen.after(drawn)
        if self._exact:
            repeated = self._repeated_with(batch, drawn, loss, clock)
            self._follow(self._rules[1 + int(repeated.rule) if repeated.exact else 0], undo)
        if self._shrinkage.blocks and residuals is not None and self._rule is self._given:
            evidence = self._evidence_with(batch, residuals, seen, tells=not repeated.refused)
        return Basis(batch, loss, seen, repeated, evidence=evidence)

    def recorded(self, repeats: Callable[[FisherBlock], float]) -> StackedUpdate:
        """Return the update of a training file; ``repeats`` counts an example's rows."""
        update = self._lengths
        rows = {name: repeats(block) for name, block in update.blocks.items()}
        return stacked_update(update, self._parameters(), rows)

    @recordable
    def moved(
        self,
        gradients: Vector,
        parameters: Vector,
        slots: tuple[SlotArrays, SlotArrays],
        steps: int,
        scale: float,
        residuals: Residuals,
        recorded: Any,
    ) -> dict[str, Array]:
        """Return the new parameters of a step with ``"auto"``, and write the new state.

        Args:
            gradients: Gradients by parameter; may be overwritten.
            parameters: Values by parameter.
            slots: The old state, and the arrays that receive the new one: see ``recorded``.
            steps: Number of steps so far.
            scale: Value of the schedule.
            residuals: The residuals of the batch.
            recorded: Takes the place of the engine: has ``precondition``, the ``loss``, the number
                of ``examples`` of the batch, the other ``BatchFacts``, ``repeats`` of a block, and
                ``moment`` of its inputs.
        """
        step = self._inputs(gradients, parameters, slots, steps, scale, residuals, recorded)
        return self.recorded(recorded.repeats).moved(step, recorded.precondition, recorded.moment)

    def _decay(self, facts: "BatchFacts", signal: Any, residuals: Residuals | None) -> Any:
        """Return the factor of the weight decay, a number or a recorded one.

        The network of a table shrinks by its few rows where squared errors may be noise. Few of the
        examples may have most of the weight.
        """
        few = _FEW * facts.scarcity * (1.0 if residuals is None else residuals.unevenness())
        few = np.minimum(few, _MOST_DECAY - 1) * signal
        if self._shrinkage.blocks and self._shrinkage.squared and residuals is not None:
            few = few * np.minimum(residuals.size() ** 2 / _LITTLE_ERROR, 1.0)
        if not self._decay_follows:
            return 1.0 + few
        of_new = _OF_NEW + (1 - _OF_NEW) * np.minimum(2 * facts.share, 1.0)
        return of_new * np.minimum(_EPOCH * facts.examples / facts.different, 1.0) + few

    def _longer(self, examples: Any, scarcity: Any, signal: Any) -> Any:
        """Return the factor of the lengths of updates of a table's network.

        The batches of an epoch have all examples, so that their noise cancels. An average over
        several epochs has less noise than one over as many independent batches. A batch of all
        examples has no noise, so that the agreement of its gradients finds the length. Small
        squared errors come from the lengths of the updates, and do not cancel.
        """
        if not self._shrinkage.blocks:
            return 1.0
        of_all = examples * scarcity  # at least ½ for a batch of all examples
        squares = np.minimum(1 + _AVERAGED * of_all, _LONGEST**2)
        factor = np.where(of_all < _OF_TWO_BATCHES, squares, 1.0) ** 0.5
        return 1 + (factor - 1) * signal if self._shrinkage.squared else factor

    @recordable
    def measures_whole(self, slots: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return whether statistics have whole batches, because most features of a table are rare.

        Args:
            slots: The state of the optimizer before a step.

        Returns:
            A truth value, or a recorded one.
        """
        return self._auto.features.most_are_rare(slots) if self._auto else False

    def _fingerprints(self, batch: Sequence[Batch]) -> Array:
        """Return the fingerprints of the examples of a batch, of all processes."""
        engine, passes = self.engine, self.engine.passes
        axes, reader, ranks = engine.example_axes, engine.collection.backend, passes.agreement
        with ranks.exchanging():
            return fingerprints(batch, axes, reader, ranks.communicator, passes.part_sizes)

    def _repeated_with(
        self, batch: Sequence[Batch], drawn: Array, loss: float, clock: StageClock
    ) -> RepeatedBatch:
        """Return what the steps so far and a batch tell, with the first exact rule that suits it.

        The caller has checked that steps may be exact. ``drawn`` are the fingerprints of the batch.
        """
        engine = self.engine
        of_shard = mark_of_rest(batch, engine.example_axes, engine.collection.backend)
        (of_rest,) = engine.passes.agreement.sum(of_shard)
        repeated = self._basis.repeated.after(mark(drawn) + of_rest, loss)
        if not repeated.exact or repeated.rule >= 0:
            return repeated
        update = self._exact[0].update
        assert isinstance(update, GaussNewtonUpdate), "the first of the exact rules"
        with clock("statistics"):
            return repeated.following(0 if update.suits(batch) else 1)

    def _evidence_with(
        self, batch: Sequence[Batch], residuals: Residuals, seen: SeenExamples, *, tells: bool
    ) -> Evidence:
        """Return the evidence of all steps and of a batch, for weights that shrink by evidence.

        ``tells`` is whether residuals measure the noise; exact steps may have fitted it.
        """
        evidence, rule = self._basis.evidence, self._shrinkage
        if tells:
            size, noise = float(residuals.size()), float(residuals.noise())
            evidence = rule.after(evidence, self.steps, size, noise)
        rows = self._rows_of(batch, residuals.errors or ())
        evidence = evidence if rows is None else evidence.with_rows(rows)
        if not rule.is_due(evidence, self.steps, self._basis.seen, seen):
            return evidence
        evidence = rule.compared(evidence, self.steps)
        if not rule.knows(seen):
            return evidence
        self.engine.fisher.division.complete()
        averaged = _AVERAGED * sum(map(sum, self.engine.passes.part_sizes))
        return rule.measured(evidence, seen, self._parameters(), averaged)

    def _rows_of(self, batch: Sequence[Batch], errors: Sequence[Array]) -> Array | None:
        """Return inputs and errors of rows of the batch of all processes, ``(rows, columns)``.

        The result is None without errors, and where inputs have no axis of independent examples.
        The rows are the same for any division of a batch.
        """
        objective, ranks = self.engine.objective, self.engine.passes.agreement
        backend, examples = self.engine.collection.backend, self.engine.example_axes
        axes = {} if examples.joint or examples.in_sets else examples.inputs
        rows = _strided(self.engine.passes.part_sizes, ranks.rank, MOST_COMPARED)
        if not errors or not axes or rows is None:
            return None
        of_errors, parts = objective.axes.get(objective.inputs[0], 0), []
        for (inputs, *_), error, (count, chosen) in zip(batch, errors, rows.of_rank, strict=True):
            arrays = [(inputs[name], axes[name]) for name in sorted(axes.keys() & inputs)]
            of_part: list[Array] = []
            for value, axis in (*arrays, (error, of_errors)):
                array = value if isinstance(value, np.ndarray) else backend.asarray(value)
                by_example = np.moveaxis(array, axis, 0) if axis else array
                # An output may have several rows for each example.
                of_part.append(backend.to_numpy(by_example.reshape(count, -1)[chosen]))
            parts.append(np.concatenate(of_part, axis=1, dtype=np.float64))
        with ranks.exchanging():
            return gathered(np.concatenate(parts), ranks.communicator, rows.counts)

    def _follow(self, rule: Rule, undo: Undo) -> None:
        """Follow a rule from this step on; a change of the rule resets the optimizer's state."""
        if rule is self._rule:
            return
        restore_plans = self._curvature.restart(self.steps)
        before = self._rule, self._slots, self._damping

        def restore() -> None:
            restore_plans()
            self._rule, self._slots, self.damping = before
            self._spare_slots = {}

        undo.add(restore)
        start = self._kept()
        self._rule, self.damping = rule, rule.damping
        self._slots, self._spare_slots = self._given.update.new_slots(self._parameters()), {}
        if rule is not self._given:
            self._slots |= start
            if not start:
                self._lengths.keep(self._slots, self._parameters())

    def _kept(self) -> SlotArrays:
        """Return the slots that keep the parameters from before the first exact step."""
        return {} if self._rule is self._given else {name: self._slots[name] for name in KEPT}

    @property
    def _lengths(self) -> AdaptiveLengthUpdate:
        """The update of ``"auto"``."""
        assert self._auto is not None, "the caller checks the options"
        return self._auto

    def _tried(
        self, basis: Basis, gradients: dict[str, Array], clock: StageClock
    ) -> tuple[Basis, dict[str, Array]]:
        """Return basis and gradients of a step that leaves examples out.

        A batch that cannot be divided is fitted whole.
        """
        engine, ranks = self.engine, self.engine.passes.agreement
        division = divided(basis.batch, engine.example_axes, engine.collection.backend)
        if ranks.any(division is None) or division is None:
            return basis, gradients
        passes, alone = engine.passes, not self._rule.measures
        with clock("gradients"):
            left_out = engine.loss(division.left_out)
            fitted = passes.step_gradients(passes.traced(division.fitted), losses_alone=alone)
        repeated = basis.repeated.judged(fitted.loss, left_out)
        basis = basis._replace(batch=division.fitted, loss=fitted.loss, repeated=repeated)
        in_file = passes.model.to_file_layout(fitted.shard.gradients)
        return basis, {name: in_file[name] for name in self._names if name in in_file}

    def _judged(self, move: Move, basis: Basis) -> tuple[Move, Basis]:
        """Return the change of an exact step, undone if its trial fails, and the next basis."""
        repeated = basis.repeated
        if repeated.refused:  # a failed trial: back to the start of the exact steps
            move = move._replace(values=self._lengths.kept(self._slots, self._parameters()))
        repeated = repeated.solved(move.iterations, move.missed, basis.loss)
        return move, basis._replace(following=move.following, repeated=repeated)

    def _penalty(self) -> float:
        """Return ``½ l2 ‖θ‖²`` for the present parameters."""
        values = self._parameters()
        return 0.5 * self._l2 * dot(values, values)

    def _adapt(self, proposal: Proposal, batch: Sequence[Batch], clock: StageClock) -> StepReport:
        self._basis = self._next_basis
        self._spare_slots.pop("natural_gradient", None)
        report = proposal.report
        if self._rule.adaptation is not None:
            report = self._with_ratio(report, self._rule.adaptation, clock)
        if self._basis.following is not None:
            self.damping = self._basis.following
        if not self._rule.measures:
            return report
        refreshed = self._curvature.advance()
        return replace(report, refreshed=refreshed) if refreshed else report

    def _with_ratio(
        self, report: StepReport, adaptation: DampingAdaptation, clock: StageClock
    ) -> StepReport:
        """Adapt the damping where that is due; return the report with the reduction ratio."""
        predicted, basis = report.predicted_change, self._basis
        # The step of the report has been counted: ``steps`` is its number from 1.
        if predicted is None or not adaptation.is_due(self.steps - 1):
            return report
        before = basis.loss + report.penalty
        if abs(predicted) <= _RESOLUTION * abs(before):  # the change is only rounding
            return report
        with clock("damping"):
            try:
                loss = self.engine.loss(basis.batch)
                change = (loss + self._penalty() if self._l2 else loss) - before
            except NonFiniteError:
                change = inf
            self.damping, ratio = adaptation.adapted(self._damping, change, predicted, self._l2)
        return replace(report, reduction_ratio=ratio)

    def restrain(self) -> None:
        """Take shorter steps with ten times the damping, and estimate the curvature anew.

        The averages contain batches of the steps in which the loss exploded.
        """
        self.damping *= _MORE_DAMPING
        self._restraint *= _SHORTER
        self._curvature.planner.restart(self.steps)

    def state(self) -> SavedState:
        """Return the state of the optimizer without the engine; its arrays are not copied."""
        more = {_REFRESHES: self._curvature.saved()}
        more |= {group: getattr(self._basis, name).saved() for group, name in self._records}
        if self._exact:
            more[REPEATED][_EXACT] = np.array(float(self._rules.index(self._rule)))
        return saved(self, self._table, {**self._slots, **more})

    def restore(self, part: SavedState) -> None:
        """Restore a ``state`` of this optimizer; the arrays are copied."""
        arrays, to_numpy = dict(part.arrays), self.engine.collection.backend.to_numpy
        self._curvature.restore(arrays.pop(_REFRESHES))
        for group, name in self._records:
            values = {entry: to_numpy(array) for entry, array in arrays.pop(group).items()}
            if group == REPEATED:
                self._rule = self._rules[int(values.pop(_EXACT))]
            restored = type(getattr(self._basis, name)).restored(values)
            self._basis = self._basis._replace(**{name: restored})
        if isinstance(self._given.update, AdaptiveLengthUpdate):
            self._given.update.measured.clear()  # the directions change in place
        super().restore(replace(part, arrays=arrays))

    @property
    def _records(self) -> list[tuple[str, str]]:
        """Groups of arrays, each with the field of the basis that they store."""
        has_group = {
            (EXAMPLES, "seen"): self._auto is not None,
            (EVIDENCE, "evidence"): bool(self._shrinkage.blocks),
            (REPEATED, "repeated"): bool(self._exact),
        }
        return [pair for pair, has in has_group.items() if has]

    @property
    def _table(self) -> Numbers:
        # The updates of "auto" have relative damping unless it is adapted; states of both differ.
        relative = {"relative": Number("_given.relative", is_constant=True)}
        since = (-1, COUNTER[1])
        return {
            **super()._table,
            **(relative if self._given.relative and self._auto is None else {}),
            "statistics": Number("_curvature.planner.observed", since),
            "start": Number("_curvature.planner.start", since),
            "damping": Number("damping", check=KfacOptimizer._engine_damping),
        }


def _exact_rules(engine: Engine, l2: float) -> tuple[Rule, ...]:
    """Return the rules of exact steps, the preferred one first; none unless errors are squared.

    Their dampings contain ``l2``.
    """
    if not all(isinstance(t, NormalMeanNegativeLogProbLoss) for t in engine.objective.terms):
        return ()
    newton = GaussNewtonUpdate(engine, FOLLOWS)
    of_newton, of_quadratic = (max(damping, l2) for damping in _EXACT_DAMPINGS)
    quadratic = QuadraticUpdate(engine, PartialBatch(engine, 1.0), 0.0)
    return (
        Rule(newton, MOMENTUM, 1.0, of_newton, False, None, measures=False),
        Rule(quadratic, None, 1.0, of_quadratic, False, _FOLLOWS_QUICKLY, whole=True),
    )


class _Strided(NamedTuple):
    """Rows that are drawn from a batch at equal distances."""

    # Of each part of the shard of a process, the number of rows and those that are chosen.
    of_rank: list[tuple[int, slice]]
    counts: list[list[int]]  # number of chosen rows of each process, for each part


@lru_cache
def _strided(sizes: tuple[tuple[int, ...], ...], rank: int, most: int) -> _Strided | None:
    """Return at most about ``most`` rows of a batch; None if a process has none in a part.

    ``sizes`` is the number of rows of each process, for each part.
    """
    if not all(map(all, sizes)):
        return None
    of_part, start, stride = list[tuple[int, slice]](), 0, -(-sum(map(sum, sizes)) // most)
    counts: list[list[int]] = []
    for of_ranks in sizes:
        counts.append([])
        for number, size in enumerate(of_ranks):
            chosen = slice(-start % stride, None, stride)
            counts[-1].append(len(range(size)[chosen]))
            if number == rank:
                of_part.append((size, chosen))
            start += size
    return _Strided(of_part, counts)


def _shrinkage(
    engine: Engine, update: AdaptiveLengthUpdate | None, *, damps: bool
) -> ShrinkageByEvidence:
    """Return how the weights of an update shrink; without blocks for None."""
    if update is None:
        return ShrinkageByEvidence(damps=damps)
    weights, blocks = update.units.weights, update.blocks
    return shrinkage_by_evidence(engine, weights, blocks, update.widths, damps=damps)


def _corrections(residuals: Residuals, step: Any, scale: Any) -> dict[str, Correction]:
    """Return the corrections of predictions that are far off their targets.

    ``step`` is the number of steps so far, and ``scale`` the updates' factor; they may be recorded.
    """
    recorded = is_recorded(step)
    if not recorded and (step or not scale):
        return {}
    first, corrections = np.logical_and(step == 0, scale > 0), {}
    for name, (spread, is_wide, is_far, means, centre) in residuals.misfits().items():
        large, due = (np.logical_and(first, reason) for reason in (is_wide, is_far))
        factor = np.where(large, 1 / np.maximum(spread, 1.0), 1.0)
        if recorded:
            shift = np.where(due, -means, 0.0)
            corrections[name] = Correction(factor, large, shift, centre, due)
        elif large or due:
            shift = -means if due else np.zeros_like(means)
            corrections[name] = Correction(float(factor), bool(large), shift, centre, bool(due))
    return corrections


def _adaptation(value: bool | DampingAdaptation) -> DampingAdaptation | None:
    if isinstance(value, DampingAdaptation):
        return value
    if not isinstance(value, bool):
        raise InputError(
            f"adapt_damping must be True, False or a DampingAdaptation, got {value!r}."
        )
    return DampingAdaptation() if value else None


def _is_relative(rule: object, damping: object, adaptation: DampingAdaptation | None) -> bool:
    """Return whether the damping is relative; an InputError where it must not be."""
    absolute = rule == QUADRATIC or adaptation is not None
    if absolute and isinstance(damping, RelativeDamping):
        raise InputError(
            f"adapt_damping and learning_rate='quadratic' need an absolute damping, a number; got "
            f"{damping!r}."
        )
    return not absolute and (rule == AUTO or isinstance(damping, RelativeDamping))


def _check_rule(rule: object, momentum: object) -> None:
    """Refuse a momentum that does not fit the rule of the learning rate: a name, or None."""
    if isinstance(momentum, str) and momentum == QUADRATIC:
        if rule != QUADRATIC:
            raise InputError("momentum='quadratic' needs learning_rate='quadratic'.")
    elif rule == AUTO or not callable(momentum):
        check_number("momentum", momentum, "[0, 1)")


def _rule_of(learning_rate: object) -> str | None:
    """Return the name of a rule in place of a learning rate; None for a number or a function."""
    if not isinstance(learning_rate, str):
        return None
    if learning_rate not in (AUTO, QUADRATIC):
        raise InputError(
            f"learning_rate must be a number, a function, '{AUTO}' or '{QUADRATIC}', got "
            f"{learning_rate!r:.80}."
        )
    return learning_rate
