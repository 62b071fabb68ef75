"""K-FAC for one model: from a batch to preconditioned gradients.

Read ``Engine.step`` first; it calls all stages in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from kfac_engine._types import Array, whole_arrays
from kfac_engine.arguments import flag, one_of
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.measurement import Combine
from kfac_engine.curvature.factors.row_weights import ExampleWeights
from kfac_engine.curvature.factors.updater import LetGo, PartSums, PendingUpdate
from kfac_engine.curvature.refreshes import factor_shapes
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.datasets.examples import Batch
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.cost import Distribution, RankCost, rank_costs
from kfac_engine.distributed.protocol import Alone
from kfac_engine.distributed.sizes import Periods
from kfac_engine.engine.backward import BackwardResult, reported_loss
from kfac_engine.engine.batch_parts import Inputs, TracedParts
from kfac_engine.engine.build import Assembly, build
from kfac_engine.engine.checkpoint import Accept, Expected, Extras, State, load_state, save_state
from kfac_engine.engine.draw_placements import draw_placements
from kfac_engine.engine.engine_summary import engine_summary
from kfac_engine.engine.large_factors import large_factor_notes
from kfac_engine.engine.model_size import model_size
from kfac_engine.engine.options import (
    GATHERINGS,
    EngineOptions,
    Gathering,
    by_keyword,
    check_damping,
    check_schedule,
)
from kfac_engine.engine.preconditioning import PreconditioningModel
from kfac_engine.engine.profiling import Recorder
from kfac_engine.engine.rank_checks import check_ranks
from kfac_engine.engine.result import Result
from kfac_engine.engine.rollback import quiet, undone_on_overflow
from kfac_engine.engine.validation import check_load, checked_extras
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.objective import Observation
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.trace import Trace
from kfac_engine.system.deferred_signals import HeldInterrupts
from kfac_engine.text.summary import Summarized, Summary

# Gradients whose norms have a smaller sum cannot overflow when they are added.
_LARGE_NORM = 1e30
# The state that several processes compare with each batch.
_STATE = "counters, random generators, dampings or schedules"


class Computed(NamedTuple):
    """What a step computes of a batch before any state changes.

    Attributes:
        backward: Loss and gradients.
        buffers: New running statistics.
        notes: Notes on the batch.
        update: Its statistics; None if they are not due.
    """

    backward: BackwardResult
    buffers: dict[str, Array]
    notes: tuple[str, ...]
    update: PendingUpdate | None


class Engine(Summarized, PreconditioningModel):
    """K-FAC for one ONNX model: gradients, curvature statistics, preconditioned gradients.

    ``from_onnx`` returns an engine. Its options ``damping`` and ``schedule`` can be changed later;
    setting any other attribute raises an ``UnknownAttributeError``.

    Args:
        assembly: The model, its losses and its layers.
        estimator: Statistics and products over the collection.
        schedule: Calls that update statistics and refresh inverses.
        exps: Powers to precondition with.

    Attributes:
        collection: Layers, losses and blocks.
        estimator: Statistics and products.
        objective: Losses and reduction.
        counter: Number of calls of ``observe`` and ``step``.
        planner: Plans the calls that update statistics and refresh inverses, by ``schedule``.
    """

    _fixed = tuple(field.name for field in fields(EngineOptions))

    def __init__(
        self,
        assembly: Assembly,
        estimator: FisherEstimator,
        schedule: Schedule,
        exps: Sequence[float],
    ) -> None:
        super().__init__(assembly, estimator, exps)
        self.counter = 0
        self.planner = estimator.refreshes.planner(schedule)
        self._prepared = self._draws_placed = False
        self._standing_notes = (*assembly.notes, *large_factor_notes(self.layers))
        self._sealed = True

    @classmethod
    @by_keyword(EngineOptions)
    def from_onnx(cls, model: ModelSource, options: EngineOptions) -> "Engine":
        """Return an engine for a model.

        Args:
            model: Path, bytes or ``ModelProto``.
            options: The fields of ``EngineOptions``, each as a keyword; only ``loss`` is needed.

        Returns:
            The engine; it has no statistics yet.

        Raises:
            InputError: The file, the loss or an option is wrong.
            UnknownNameError: An option names no layer kind, loss, output or parameter.
            UnsupportedOpError: An operator between a parameter and the loss has no derivative rule.
            RankError: Processes have different models, options or parameters.

        Warns:
            ExportWarning: The exporter of the file changed parameters; see ``export_changes``.
        """
        with Agreement(options.communicator or Alone()).together():
            assembly, estimator = build(model, options)
            engine = cls(assembly, estimator, options.schedule or Schedule(), options.exps)
            check_ranks(engine._shards, assembly, engine._arrays.on_host()[0])
            if not engine._shards.alone:
                estimator.place_draws(draw_placements(assembly))
                engine._draws_placed = True
            engine._warn_of_export()
            engine.agreement.vote(place="from_onnx")
        return engine

    @property
    def options(self) -> EngineOptions:
        """The options of ``from_onnx``; ``damping`` and ``schedule`` may have been set since."""
        return self._assembly.options

    @property
    def damping(self) -> float:
        """The multiple λ > 0 of the identity that is added to the Fisher matrix; can be set.

        Diagonal blocks, blocks of parameters without a layer and products with the power 1 use a
        new value at once. Stored inverses use it from their next refresh;
        ``estimator.update_inverses()`` refreshes all of them.
        """
        return self.estimator.damping

    @damping.setter
    def damping(self, value: float) -> None:
        check_damping(value, self._exps)
        self.estimator.damping = value

    @property
    def schedule(self) -> Schedule:
        """Calls that update statistics and refresh inverses; can be set, which keeps times."""
        return self.planner.schedule

    @schedule.setter
    def schedule(self, value: Schedule) -> None:
        check_schedule(value)
        state, self.planner = self.planner.state, self.estimator.refreshes.planner(value)
        self.planner.state = state

    @property
    def combine(self) -> Combine | None:
        """Combines the statistics of several processes; can be set: see ``estimator.combine``."""
        return self.estimator.combine

    @combine.setter
    def combine(self, value: Combine | None) -> None:
        self.estimator.combine = value

    # -- the line ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Build the sessions of ONNX Runtime for a step that updates statistics, once.

        ``step`` calls it. Calls that report or evaluate build no session that they do not need. A
        call before the first step moves the time for building sessions out of that step.
        """
        if not self._prepared:
            for backward in self._assembly.backwards(self.estimator):
                if backward.gradients:
                    self._model.backward_session(backward)
            self._prepared = True

    def step(
        self,
        inputs: Inputs,
        targets: Targets = None,
        *,
        gradients: Gathering = "owned",
        update_buffers: bool = True,
        profile: bool = False,
    ) -> Result:
        """Compute gradients of a batch, update the curvature as scheduled, and precondition.

        Parameters do not change; ``set_parameters`` changes them.

        Args:
            inputs: Input name to array; or a list of the parts of the batch, each a pair of inputs
                and targets, as for ``gradients``.
            targets: The targets of the loss; for several losses, by output. None for a list of
                parts.
            gradients: The gradients of the result where the distribution ``"shard"`` divides them
                among several processes: ``"owned"``, those of the parameters that this process
                owns, or ``"all"``, which costs one more message. Otherwise both are all gradients.
            update_buffers: Whether ``buffers`` become the running statistics after the batch.
            profile: Whether the result lists time and memory of each stage.

        Returns:
            Loss, gradients and natural gradients.

        Raises:
            InputError: Inputs, targets or ``gradients`` are wrong.
            NonFiniteError: The batch yields NaN or infinity; no state has changed.
        """
        start, record = perf_counter(), Recorder(flag("profile", profile))
        with single_threaded_blas(), self._together():
            one_of("gradients", gradients, GATHERINGS)
            parts = self.parts(inputs, targets)
            self.require_memory(parts)
            self.prepare()
            compute = self._compute if len(parts) == 1 else self._compute_parts
            backward, moved, notes, update = compute(parts, update_buffers, record)
            every, types, exp = backward.gradients, self._model.result_types, self._exps[0]
            loss, bound = self._distribution.meet(backward.loss, update, every)
            with undone_on_overflow(self.estimator, every, types, exp, bound):
                with record("statistics"):
                    owned = self._distribution.combine(update, every)
                with record("inverses"):
                    self.estimator.refreshes.run(self.planner, self.counter)
                # Checks of gradients that not all processes have precede a vote.
                self._record(loss, owned if bound is not None and bound > _LARGE_NORM else {})
                in_file = self._model.to_file_layout(whole_arrays(owned))
                with record("precondition"):
                    natural = self._precondition(owned, exp, tuple(every))
                self._distribution.conclude()
                if gradients == "all":
                    in_file = self._model.to_file_layout(self._distribution.gather(owned, every))
            self._advance(perf_counter() - start)
            self._model.buffers.update(moved)
            return Result(loss, in_file, natural, notes, record.stages, self._model.ties)

    def _compute(self, parts: Sequence[Batch], update_buffers: bool, record: Recorder) -> Computed:
        """Differentiate a batch of one part, and measure its statistics if they are due."""
        with record("forward"):
            trace = self.trace(*parts[0])
        observation = self._meet(trace, self._observe(trace))
        along = self._is_due and self.estimator.reads_gradients
        with record("backward"):
            read = self.estimator.differentiated if along else None
            backward = self._differentiate(trace, observation, read)
        moved = self._updated_buffers(trace) if flag("update_buffers", update_buffers) else {}
        update = self._measure_if_due(trace, observation, record, backward.outputs)
        return Computed(backward, moved, self._notes(trace), update)

    def _compute_parts(
        self, parts: Sequence[Batch], update_buffers: bool, record: Recorder
    ) -> Computed:
        """Differentiate a batch of several parts, and then measure its statistics if due."""
        with record("backward"):
            backward, moved, notes = self._gradients_of(parts, update_buffers, None)
        update = None
        if self._is_due:
            with record("statistics"), quiet():
                update = self._measure_parts(self._traced(parts), None)
        self.estimator.refreshes.wait()
        return Computed(backward, moved, notes, update)

    def observe(self, inputs: Inputs, targets: Targets = None) -> None:
        """Update statistics from a batch and refresh inverses, as scheduled.

        Args:
            inputs: Input name to array; or a list of the parts of the batch, each a pair of inputs
                and targets, as for ``gradients``.
            targets: The estimation mode ``"empirical"`` needs them. Every mode checks them as
                ``step`` does if they are given.

        Raises:
            InputError: Inputs or targets are wrong; see ``trace`` for other errors.
            NonFiniteError: The batch yields NaN or infinity; no state has changed.
        """
        start = perf_counter()
        with single_threaded_blas(), quiet(), self._together():
            parts = self.parts(inputs, targets)
            self.require_memory(parts)
            labeled = all(getattr(t, "targets", t) is not None for _, t in parts)
            update = None
            if len(parts) == 1:
                trace = self.trace(*parts[0])
                observation = self._meet(trace, self._observe(trace, targets=labeled))
                if labeled:
                    self._check_loss(trace, observation)
                update = self._measure_if_due(trace, observation, Recorder())
            else:
                traced = self._traced(parts)
                if labeled:
                    traced.each(self._check_loss)
                if self._is_due:
                    update = self._measure_parts(traced, None)
            self._distribution.meet(0.0, update)
            self._distribution.combine(update)
            self.estimator.refreshes.run(self.planner, self.counter)
            self._shards.agreement.vote(place="observe")
            self._advance(perf_counter() - start)

    def _check_loss(self, trace: Trace, observation: Observation | None = None) -> None:
        """Check the targets and the loss of a batch."""
        with self._history.explain(), trace.explain():
            reported_loss(trace, self.objective, observation or self.objective.observe(trace))

    def update_statistics(
        self, trace: Trace | Sequence[Batch], examples: int | None = None
    ) -> bool:
        """Update the averages by one batch, whatever the schedule; inverses do not change.

        All processes of a communicator call it, each with its shard of the batch.

        Args:
            trace: The batch, as ``trace`` returns it; or a list of the parts of the batch, each a
                pair of inputs and targets, as for ``gradients``. Several parts are evaluated twice:
                the first pass counts their examples and predictions.
            examples: Number of examples of the batch, if the trace is that of a part of the batch.
                Under the reduction ``"sum"``, the statistics are multiplied by the ratio of the
                numbers. A part in which no target counts changes nothing.

        Returns:
            Whether targets count, so that the averages have changed.

        Raises:
            InputError: The estimation mode ``"empirical"`` needs targets, and the trace has none.
            NonFiniteError: The batch yields NaN or infinity; no state has changed.
        """
        with single_threaded_blas(), quiet(), self._together():
            self.require_memory(trace)
            parts = () if isinstance(trace, Trace) else self.parts(trace)
            if len(parts) > 1:
                update = self._measure_parts(self._traced(parts), examples)
            else:
                only = trace if isinstance(trace, Trace) else self.trace(*parts[0])
                observation = self._meet(only, self._observe(only, targets=False), examples)
                self.estimator.refreshes.wait()
                counts = examples is None or all(observation.whole.totals)
                update = self._measure(only, observation) if counts else None
            if update is None:
                return False
            self._distribution.meet(0.0, update)
            self._distribution.combine(update)
            return True

    def _measure_parts(self, traced: TracedParts, examples: int | None) -> PendingUpdate | None:
        """Measure the statistics of a batch in parts; its random targets are those of the batch.

        Returns:
            The update; None if no target of some examples of a batch counts.
        """
        estimator, alone = self.estimator, self._shards.alone
        self.require_examples("statistics of curvature need")

        def meet(trace: Trace) -> Observation:
            return self._meet(trace, self._observe(trace, targets=False))

        traced.count(self._shards, meet, examples)
        if examples is not None and not all(traced.size.totals):
            return None
        estimator.refreshes.wait()
        if not self._draws_placed:
            estimator.place_draws(draw_placements(self._assembly))
            self._draws_placed = True
        statistics, bits = estimator.statistics, estimator.rng.bit_generator
        alike = traced.are_alike

        def measured(bases: Sequence[FisherFactor] = ()) -> PartSums:
            sums, rows = PartSums(), iter(traced.rows)
            start = bits.state

            def add(trace: Trace) -> None:
                part, observation = next(rows), meet(trace)
                sums.begin(observation.whole.examples)
                scales = self.objective.fisher_scales(observation.within(traced.size))
                weights = self._example_weights(trace, observation)
                if alike:
                    # Each part draws its rows of the numbers of the batch.
                    bits.state, estimator.rows = start, part
                with self._history.explain(), trace.explain():
                    statistics.measure_part(sums, trace, scales, weights, bases)

            try:
                traced.each(add)
            finally:
                estimator.rows = None if alone else self._shards.rows
                if bases:
                    bits.state = start
            return sums

        if bases := statistics.parts_of_bases:
            statistics.set_bases(measured(bases))
        return statistics.joined(measured())

    # -- parameters and files ---------------------------------------------------------------------

    def save(self, path: str | Path, extras: Extras | None = None) -> None:
        """Write the state of the engine to a file, from which ``load`` resumes bit by bit.

        The state consists of averages, inverses, counter, random generator, parameters and
        buffers; ``extras`` are stored with it. The first of several processes writes the file.
        """
        with self._together():
            self.estimator.wait()
            self._shards.agreement.vote(place="save")
            self._distribution.complete()
            with self._distribution.all_results():
                if self._shards.communicator.rank == 0:
                    save_state(path, self.estimator.factors, self._state(extras))
            self._shards.agreement.vote(place="save")

    def _state(self, extras: Extras | None) -> State:
        schedule = self.planner.saved(), self.estimator.refreshes.saved()
        rest = *self._arrays.on_host(), self.damping, *schedule, checked_extras(extras)
        return State(self.counter, self.estimator.rng.bit_generator.state, *rest)

    def load(
        self, path: str | Path, *, parameters: bool = True, accept: Accept | None = None
    ) -> None:
        """Restore a state that ``save`` wrote; an error leaves the engine unchanged.

        Args:
            path: The file.
            parameters: Whether to restore parameters and buffers as well.
            accept: Receives the extras before anything changes, and returns their differences.

        Raises:
            InputError: The file does not fit this engine; every difference is listed.
        """
        check_load(parameters, accept)
        damping = None if accept else self.damping  # a caller with extras restores it
        shapes, meet = factor_shapes(self.collection), self._shards.agreement.vote
        expected = Expected(self.estimator.rng, shapes, damping, accept, meet)
        with self._together():
            state = load_state(path, self.estimator.factors, *self._arrays.on_host(), expected)
            self._distribution.restart()
            self.estimator.rng.bit_generator.state, self.counter = state.generator, state.counter
            self.planner.restore(state.planner)
            self.estimator.refreshes.restore(state.samples)
            if parameters:
                self._model.set_parameters(state.parameters)
                self.set_buffers(state.buffers)
            self._history.restart()

    def ranks_report(self, ranks: int) -> Mapping[Distribution, RankCost]:
        """Return traffic, memory and work of one of several processes, without running the model.

        Args:
            ranks: Number of processes.

        Returns:
            The cost by distribution; ``"sgd"`` averages gradients, and nothing else.

        Raises:
            InputError: The number is not a positive whole number.
        """
        schedule = self.schedule
        periods = Periods(schedule.refresh_every, schedule.covariance_every)
        return rank_costs(model_size(self._assembly, self.layers), ranks, periods)

    def _summary(self) -> Summary:
        settings = self.damping, self.schedule
        reports = self._layer_reports()
        return engine_summary(self.name, self._assembly, settings, self.counter, reports)

    # -- private ----------------------------------------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Return a context that leaves no half of a change after an error of a rank or Ctrl-C."""
        restored = self.estimator.statistics.restored_on_error
        with HeldInterrupts(), self._shards.together(), restored():
            yield

    def _meet(
        self, trace: Trace, observation: Observation, examples: int | None = None
    ) -> Observation:
        """Exchange the sizes of shards, which determine the draws of random targets."""
        if self._shards.alone:
            return self._shards.meet(trace, observation, examples)
        settings = self.damping, self.schedule, self.estimator.cov_ema_decay
        state = f"{self.counter} {settings} {self.estimator.rng.bit_generator.state}"
        whole = self._shards.meet(trace, observation, examples, {_STATE: state})
        self.estimator.rows = self._shards.rows
        return whole

    @property
    def _is_due(self) -> bool:
        """Whether the next call updates statistics."""
        return self.planner.observes(self.counter)

    def _measure_if_due(
        self,
        trace: Trace,
        observation: Observation,
        record: Recorder,
        gradients: dict[str, Array] | None = None,
    ) -> PendingUpdate | None:
        self.estimator.refreshes.wait()
        if not self._is_due:
            return None
        with record("statistics"):
            return self._measure(trace, observation, trace.release, gradients)

    def _measure(
        self,
        trace: Trace,
        observation: Observation,
        release: LetGo | None = None,
        gradients: dict[str, Array] | None = None,
    ) -> PendingUpdate:
        """Measure the statistics of a shard."""
        self.require_examples("statistics of curvature need")
        scales = self.objective.fisher_scales(observation)
        weights = self._example_weights(trace, observation)
        with self._history.explain(), trace.explain():
            return self.estimator.statistics.measure(
                trace, scales=scales, release=release, propagated=gradients, weights=weights
            )

    def _example_weights(self, trace: Trace, observation: Observation) -> ExampleWeights | None:
        """Return the weights of the examples; None if no target has a weight."""
        rows = [observed.weights for observed in observation.towers]
        if all(weights is None for weights in rows):
            return None
        pairs = zip(self.objective.towers, rows, strict=True)
        axes = self.estimator.statistics.sources.axes
        return ExampleWeights.of(pairs, trace, observation.size.examples, axes)

    def _advance(self, seconds: float) -> None:
        """Record that a call has succeeded."""
        self.estimator.refreshes.advance(self.planner, self.counter, seconds)
        self.counter += 1
