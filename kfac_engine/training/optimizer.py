"""Defines the interface of all optimizers: ``step``, ``save`` and ``load``.

A step computes new parameters and new state, and replaces the old ones after all checks only.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from math import nan
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.arguments import check_at_least_zero, check_choice, check_number
from kfac_engine.datasets.examples import Batch
from kfac_engine.engine.batch_parts import Inputs
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.memory import MemoryReport
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rollback import Undo
from kfac_engine.errors import InputError, NonFiniteError, UnsupportedError
from kfac_engine.layers.feature_powers import FeaturePowers
from kfac_engine.losses.objective import Residuals
from kfac_engine.losses.observed import Targets
from kfac_engine.sealed import Sealed
from kfac_engine.summary import Summarized, Summary
from kfac_engine.system.signals import HeldInterrupts
from kfac_engine.training.checkpoint import (
    COUNTER,
    LEARNING_RATE,
    OPTIMIZER,
    Check,
    Number,
    Numbers,
    Parts,
    SavedState,
    TrainingState,
    check_numbers,
    read_training,
    saved,
    set_numbers,
    write_training,
)
from kfac_engine.training.vectors import Zeros


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of ``step`` of an optimizer.

    Attributes:
        loss: Loss of the batch before the update, with ``penalty``; NaN if the batch was skipped.
        learning_rate: Learning rate of the step, times ``scale``.
        momentum: Momentum of the step; None for an optimizer without momentum.
        damping: Damping λ of the step; None for optimizers without curvature.
        reduction_ratio: Change of the loss divided by the change that the quadratic model
            predicts; None in steps without an adaptation of the damping.
        predicted_change: Change of the loss that the quadratic model predicts; None in steps
            without a quadratic model.
        penalty: The part ``½ l2 ‖θ‖²`` of the loss.
        refreshed: Names of the factors whose inverses the step recomputed, such as
            ``"fc0.weight: A"``; ``seconds["inverses"]`` is the time of the refresh.
        skipped: Whether the batch had no effect, because it yields NaN or infinity.
        rolled_back: Whether ``fit`` restored earlier parameters after the step.
        seconds: Wall times by stage of the step: ``"gradients"``, ``"statistics"``, ``"inverses"``,
            ``"precondition"``, ``"curvature"`` (products of the quadratic model), ``"damping"`` (a
            second loss), and ``"update"`` for the arithmetic of the optimizer.
        losses: The part of the loss of each output, with its weight and without ``penalty``; empty
            unless several outputs have a loss.
    """

    loss: float
    learning_rate: float
    momentum: float | None = None
    damping: float | None = None
    reduction_ratio: float | None = None
    predicted_change: float | None = None
    penalty: float = 0.0
    refreshed: tuple[str, ...] = ()
    skipped: bool = False
    rolled_back: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)


# A learning rate: a number, or a function of the number of steps so far.
Rate: TypeAlias = float | Callable[[int], float]
NonFinitePolicy: TypeAlias = Literal["raise", "skip"]
# Slot to parameter name to state array.
SlotArrays: TypeAlias = dict[str, Zeros]

POLICIES = ("raise", "skip")
# Slots that divide updates. Infinity in another slot makes the new parameters infinite or NaN.
_DIVISORS = {"second_moment"}
# Factor of the learning rate after the loss has exploded.
_RESTRAINT = 0.1


class Proposal(NamedTuple):
    """The result of a step before it is applied."""

    parameters: Mapping[str, Array]  # new values by parameter name
    slots: SlotArrays  # new state arrays
    report: StepReport  # the report of the step


class Differentiated(NamedTuple):
    """Loss and gradients of a batch over all processes."""

    loss: float
    gradients: dict[str, Array]  # new arrays by parameter name
    residuals: Residuals  # residuals of all processes
    bound: float | None  # an upper bound of the norm of the gradients, if it is known


class Optimizer(Summarized, Sealed, ABC):
    """Base of the optimizers: changes ``engine.parameters`` by one batch at a time.

    Args:
        engine: The engine that computes gradients and stores the parameters.
        learning_rate: A positive number, or a function of the number of steps so far.
        weight_decay: Coefficient of the decay of parameters, at least 0.
        non_finite: Reaction to a batch that yields NaN or infinity: ``"raise"`` a
            ``NonFiniteError``, or ``"skip"`` the batch and count it in ``skipped``. The
            parameters and the state stay unchanged in both cases.

    Attributes:
        engine: The engine.
        steps: Number of steps that changed the parameters.
        skipped: Number of batches that were skipped.
    """

    # Part of the examples whose statistics of curvature a step updates.
    _measures = 0.0
    _options: dict[str, object]

    def __new__(cls, *arguments: object, **options: object) -> "Optimizer":
        """Return a new optimizer that stores the arguments of its constructor."""
        self = super().__new__(cls)
        bound = signature(cls.__init__).bind(self, *arguments, **options)
        bound.apply_defaults()
        self._options = dict(tuple(bound.arguments.items())[2:])  # without self and the engine
        return self

    def __init__(
        self, engine: Engine, learning_rate: Rate, weight_decay: float, non_finite: NonFinitePolicy
    ) -> None:
        if not isinstance(engine, Engine):
            raise InputError(
                f"an optimizer needs a kfac_engine.Engine, got {type(engine).__name__}; make one "
                f"with Engine.from_onnx."
            )
        check_rate("learning_rate", learning_rate)
        check_at_least_zero("weight_decay", weight_decay)
        check_choice("non_finite", non_finite, POLICIES)
        _check_types(engine)
        self.engine = engine
        self._names = trained_names(engine)
        self.steps = 0
        self.skipped = 0
        self._learning_rate = learning_rate if callable(learning_rate) else float(learning_rate)
        self._weight_decay = weight_decay
        self._non_finite = non_finite
        self._restraint = 1.0  # factor of the learning rate
        self._losses: Mapping[str, float] = {}  # the part of each output in the latest loss
        self._slots: SlotArrays = {}
        self._spare_slots: SlotArrays = {}

    @property
    def options(self) -> dict[str, object]:
        """The arguments of the constructor by name, without the engine."""
        return dict(self._options)

    @property
    def learning_rate(self) -> Rate:
        """The learning rate: a number, or a function of the number of steps so far; can be set."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        check_rate("learning_rate", value)
        self._learning_rate = value if callable(value) else float(value)

    @property
    def weight_decay(self) -> float:
        """The coefficient of the decay of the parameters."""
        return self._weight_decay

    def step(self, inputs: Inputs, targets: Targets = None, scale: float = 1.0) -> StepReport:
        """Change the parameters of the engine by one batch.

        Of several processes, each passes its shard of the batch; all of them take the same step.
        Ctrl-C takes effect at the end of the step, and a second Ctrl-C at once.

        A batch that does not fit into the memory is given as a list of parts, which are computed
        one after the other: see ``Engine.gradients``. The step is the same as for the whole batch.

        Args:
            inputs: Arrays by input name, or the array of the only input; or a list of the parts of
                the batch, each a pair of inputs and targets.
            targets: Targets of the loss; for several losses, by output. None for a list of parts.
            scale: Factor of the learning rate, at least 0: the value of a schedule.

        Returns:
            Loss of the batch before the update, and the numbers of the step.

        Raises:
            InputError: An argument is wrong.
            NonFiniteError: The batch yields NaN or infinity; parameters and state are unchanged.
        """
        with HeldInterrupts(), self.engine.passes.agreement.operation("Optimizer.step"):
            check_at_least_zero("scale", scale)
            return self._step(self.engine.passes.parts(inputs, targets), scale * self._restraint)

    def _step(self, batch: Sequence[Batch], scale: float) -> StepReport:
        clock = StageClock()
        try:
            with self.engine.transaction("update") as undo, clock("update"):
                measures, more = self._measures, self._new_bytes
                self.engine.require_memory(batch, statistics=measures, more=more)
                proposal = self._propose(batch, scale, clock, undo)
                with self.engine.collection.backend.shared_reads():
                    with self.engine.passes.agreement.operation("proposal", ends=True):
                        if proposal.slots is not self._slots:
                            self._check_slots(proposal.slots)
                    self.engine.set_parameters(proposal.parameters, copy=False)
        except NonFiniteError:
            if self._non_finite == "raise":
                raise
            self.skipped += 1
            rate = scale * evaluated(self._learning_rate, self.steps)
            return StepReport(nan, rate, skipped=True, seconds=clock.seconds)
        in_place = proposal.slots is self._slots
        self._slots, self._spare_slots = proposal.slots, {} if in_place else self._slots
        self.steps += 1
        report = self._adapt(proposal, batch, clock)
        return replace(report, losses=self._losses) if self._losses else report

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy`` and ``pickle``, as the engine does."""
        raise UnsupportedError(
            "an optimizer cannot be copied or pickled; save its state with optimizer.save(path), "
            "make another one with the same options, and load it there."
        )

    def memory(self, batch_size: int = 1, accumulate: int = 1) -> MemoryReport:
        """Return a bound of the peak memory of training, without running the model.

        Args:
            batch_size: Number of examples, of a part if a batch has several.
            accumulate: Number of parts of a batch.

        Returns:
            Bytes of each part of a step; ``optimizer`` is the state of the optimizer, with copies
            of it in a step. Inputs and targets are not included.

        Raises:
            InputError: An argument is not a positive whole number.
        """
        report = self.engine.memory(batch_size, accumulate, statistics=self._measures)
        parameters = self._parameters().values()
        stored = self._states * self._state_bytes + self._copied_bytes
        on_host = all(isinstance(array, np.ndarray) for array in parameters)
        device = report.device + (0 if on_host else stored)
        return replace(report, optimizer=stored, device=device)

    def save(self, path: str | Path) -> None:
        """Write the state of the engine and of the optimizer, to resume with equal bits.

        The file is replaced whole or not at all. A learning rate that is a number is part of the
        state; ``load`` does not replace a function.
        """
        write_training(path, self.engine, self._saved({}, {}))

    def load(self, path: str | Path) -> None:
        """Restore the state of the engine and of the optimizer from a file of ``save``.

        Args:
            path: The file.

        Raises:
            InputError: The file is missing, damaged, or of another model or optimizer; every
                difference is listed, and nothing has changed.
        """
        self.load_run(path, {}, lambda _: None)

    def save_run(self, path: Path, parts: Parts, run: Mapping[str, object]) -> None:
        """Write the file of ``save`` with further parts and the position of a run, for ``fit``."""
        write_training(path, self.engine, self._saved(parts, run))

    def load_run(self, path: str | Path, parts: Parts, check: Check) -> TrainingState:
        """Load a file of ``save_run``.

        Args:
            path: The file.
            parts: The present state of the further parts.
            check: Called with the position before anything changes; may raise.

        Returns:
            The state of the further parts, and the position.
        """
        with HeldInterrupts():
            expected, check_own = self._saved(parts, {}), partial(check_numbers, self, self._table)
            state = read_training(path, self.engine, expected, check, check_own)
            self.restore(state.parts[OPTIMIZER])
        return state

    def state(self) -> SavedState:
        """Return the state of the optimizer without the engine; its arrays are not copied."""
        return saved(self, self._table, self._slots)

    def restore(self, part: SavedState) -> None:
        """Restore a ``state`` of this optimizer; the arrays are copied."""
        to_numpy = self.engine.collection.backend.to_numpy
        for slot, arrays in part.arrays.items():
            for name, array in arrays.items():
                target = self._slots[slot][name]
                # Numbers of a parameter are arrays of the host on every device.
                target[...] = to_numpy(array) if isinstance(target, np.ndarray) else array
        set_numbers(self, self._table, part.numbers)

    def restrain(self) -> None:
        """Prepare for a second attempt from an earlier state, after the loss has exploded."""
        self._restraint *= _RESTRAINT

    def _summary(self) -> Summary:
        defaults = signature(type(self).__init__).parameters
        options = {
            name: value
            for name, value in self._options.items()
            if name != "learning_rate" and value is not defaults[name].default
        }
        rule = self._options["learning_rate"]
        facts = {
            "learning rate": _show_option(rule if isinstance(rule, str) else self._learning_rate),
            "steps": f"{self.steps:,}" + (f", {self.skipped:,} skipped" if self.skipped else ""),
            **{name: _show_option(value) for name, value in options.items()},
        }
        return Summary(f"{type(self).__name__} of '{self.engine.name}'", facts)

    def _parameters(self) -> dict[str, Array]:
        """Return the parameters that are trained, by name."""
        passes = self.engine.passes
        values = passes.arrays.stored(passes.model.parameters)  # callers must not change them
        return dict(zip(self._names, map(values.__getitem__, self._names), strict=True))

    def _differentiated(
        self,
        batch: Sequence[Batch],
        clock: StageClock,
        residuals: Residuals | None = None,
        features: FeaturePowers | None = None,
        *,
        losses_alone: bool = False,
    ) -> Differentiated:
        """Return loss and new arrays of gradients; running statistics are updated.

        See ``BatchPasses.step_gradients`` for the arguments.
        """
        passes = self.engine.passes
        with clock("gradients"):
            traced = passes.traced(batch)
            result = passes.step_gradients(traced, residuals, features, losses_alone=losses_alone)
            in_file = passes.model.to_file_layout(result.shard.gradients)
        self._losses = result.losses
        names = () if losses_alone else self._names
        gradients = dict(zip(names, map(in_file.__getitem__, names), strict=True))
        return Differentiated(result.loss, gradients, result.residuals, result.bound)

    def _new_bytes(self) -> int:
        """Return the bytes of states whose memory is not used yet.

        New parameters are written to the memory of the gradients.
        """
        states = max(self._states - bool(self.steps) - bool(self._spare_slots), 0)
        return states * self._state_bytes + self._copied_bytes

    @property
    def _states(self) -> int:
        """Number of states in memory: a step writes the next one beside the present one."""
        return 2

    @property
    def _copied_bytes(self) -> int:
        """Bytes of parts of the state that a step copies and releases."""
        return 0

    @property
    def _state_bytes(self) -> int:
        return sum(array.nbytes for slot in self._slots.values() for array in slot.values())

    def _new_slots(self) -> SlotArrays:
        """Return arrays for the new state: they belonged to the state before the present one."""
        if not self._spare_slots:
            self._spare_slots = {slot: Zeros(arrays) for slot, arrays in self._slots.items()}
        return self._spare_slots

    @abstractmethod
    def _propose(
        self, batch: Sequence[Batch], scale: float, clock: StageClock, undo: Undo
    ) -> Proposal:
        """Compute the new parameters and state without changing either.

        The new parameters are in arrays that the engine may keep. A step that changes averages
        protects them by ``undo``. A step that cannot fail any more may write the new state to the
        memory of the old one: the proposal and the optimizer then have the same slots.
        """

    def _adapt(self, proposal: Proposal, batch: Sequence[Batch], clock: StageClock) -> StepReport:
        """Adapt the optimizer after the parameters have changed; return the final report."""
        del batch, clock
        return proposal.report

    @property
    def _table(self) -> Numbers:
        """The numbers of the state."""
        smallest, largest = sys.float_info.min, sys.float_info.max
        return {
            "steps": Number("steps", COUNTER),
            "skipped": Number("skipped", COUNTER),
            "restraint": Number("_restraint", (smallest, 1.0)),
            LEARNING_RATE: Number("_learning_rate", (0.0, largest)),
        }

    def _saved(self, parts: Parts, run: Mapping[str, object]) -> TrainingState:
        return TrainingState(type(self).__name__, {OPTIMIZER: self.state(), **parts}, run)

    def _check_slots(self, slots: SlotArrays) -> None:
        """Refuse an overflow of slots that divide updates, which leaves parameters finite."""
        backend = self.engine.collection.backend

        def refuse_unless(slot: str, finite: Array) -> None:
            if all(finite):
                return
            with self.engine.passes.history.explain():
                raise NonFiniteError(
                    f"the {slot.replace('_', ' ')} of the optimizer overflows; the gradients are "
                    f"too large. Scale the loss down, or clip the data."
                )

        for slot in _DIVISORS & slots.keys():
            if arrays := list(slots[slot].blocks.values()):
                backend.read_later(backend.are_finite(arrays), partial(refuse_unless, slot))


def _show_option(value: object) -> str:
    """Return an option as text; a function by its name."""
    return f"function {value.__name__}" if hasattr(value, "__name__") else str(value)


def check_rate(name: str, value: object) -> None:
    """Refuse a learning rate that is neither a function nor a number of at least 0."""
    if not callable(value):
        check_at_least_zero(name, value)


def evaluated(
    rate: Rate, step: int, what: str = "learning rate", within: str = "[0, inf)"
) -> float:
    """Return the learning rate of a step, or another number; a function's value is checked.

    A rate is a number, or a function of the number of steps so far.
    """
    if not callable(rate):  # it was checked when it was set
        return float(rate)
    value = rate(step)
    check_number(f"the {what} of step {step}", value, within)
    return float(value)


def trained_names(engine: Engine) -> tuple[str, ...]:
    """Return the names of the parameters that an optimizer updates.

    Copies of tied weights are absent: ``set_parameters`` changes them together with the weight.
    """
    names = {name for layer in engine.layers for name in layer.parameters}
    return tuple(name for name in engine.parameters if name in names)


def _check_types(engine: Engine) -> None:
    """Refuse parameters in half precision, whose rounding loses small updates."""
    for name, value in engine.parameters.items():
        dtype: DType = value.dtype
        if dtype.kind != "f" or dtype.itemsize < np.dtype(np.float32).itemsize:
            raise InputError(
                f"parameter '{name}' has type {dtype}, whose rounding loses small updates; make "
                f"the engine with gradient_dtype='float32'."
            )
