"""Defines ``Engine``, which computes preconditioned gradients from batches (K-FAC).

Read ``Engine.step`` first. It differentiates a batch (``batch_passes.py``), then measures, commits,
refreshes and multiplies (``curvature/fisher.py``), as each step of a ``KfacOptimizer`` does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

from kfac_engine._types import Array, whole_arrays
from kfac_engine.arguments import check_bool, check_choice, check_int, check_number
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.compat.estimator import FisherEstimator
from kfac_engine.curvature.block_products import Product
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.curvature.refreshes import factor_shapes
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.forms import is_array
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone
from kfac_engine.engine.batch_parts import Inputs, parts_of
from kfac_engine.engine.build import Assembly, build
from kfac_engine.engine.checkpoint import Accept, Expected, Extras, State, load_state, save_state
from kfac_engine.engine.distribution import Distribution, Replicate
from kfac_engine.engine.factors import Factors
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.engine.memory import Footprint, MemoryReport, unchecked_examples
from kfac_engine.engine.options import (
    GATHERINGS,
    EngineOptions,
    Gathering,
    by_keyword,
    check_damping,
    check_names,
    check_schedule,
)
from kfac_engine.engine.parameter_entries import ParameterEntries
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rank_checks import check_ranks
from kfac_engine.engine.report import LayerReport, engine_summary, large_factor_notes, layer_reports
from kfac_engine.engine.result import Result
from kfac_engine.engine.rollback import Undo, ignore_overflow
from kfac_engine.engine.shard import Shard
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.engine.validation import check_blocks, check_load, checked_extras, checked_vectors
from kfac_engine.errors import InputError, NotReadyError
from kfac_engine.graph.load import ModelSource, declared_values
from kfac_engine.layers.parameter_slices import Piece
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.trace import Trace
from kfac_engine.summary import Summarized, Summary
from kfac_engine.system.signals import HeldInterrupts

_DISTRIBUTIONS: Mapping[str, type[Distribution]] = {"replicate": Replicate, "shard": Shard}
# The state that several processes compare with each batch.
_STATE = "counters, random generators, dampings or schedules"


class Engine(Summarized, TrainableModel):
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
        fisher: The estimator as ``step`` uses it: to measure, commit, refresh and multiply.
        passes: Evaluates and differentiates batches; it has the model and the processes.
        objective: Losses and reduction.
        example_axes: The axes of the examples in inputs and targets.
        counter: Number of calls of ``observe`` and ``step``.
        planner: Plans the calls that update statistics and refresh inverses, by ``schedule``.
    """

    _fixed = tuple(field.name for field in fields(EngineOptions))

    def __new__(cls, *parts: object, **options: object) -> "Engine":
        """Refuse a model, which ``from_onnx`` takes."""
        if not parts or not isinstance(parts[0], Assembly):
            raise InputError("Engine has no model yet: call Engine.from_onnx(model, loss=...)")
        return super().__new__(cls)

    def __init__(
        self,
        assembly: Assembly,
        estimator: FisherEstimator,
        schedule: Schedule,
        exps: Sequence[float],
    ) -> None:
        assembly.model.free_initial_values()
        super().__init__(assembly)
        self.collection, self.estimator, self._exps = assembly.collection, estimator, tuple(exps)
        self._entries = ParameterEntries(assembly.discovery, self._model.parameters)
        self._factors = Factors(self._entries, self.collection)
        self.fisher: Fisher = estimator
        self._shards.state = self._compared
        if not self._shards.alone:
            kind = _DISTRIBUTIONS[assembly.options.distribution]
            division = kind(self._shards, assembly, estimator, self._layer_reports)
            estimator.divide(division, division.divided)
        self.planner = estimator.planner(schedule)
        self.counter = 0
        self._prepared = False
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
            UnknownNameError: An option names an unknown layer kind, loss, output or parameter.
            UnsupportedOpError: An operator between a parameter and the loss has no derivative rule.
            RankError: Processes have different models, options or parameters.

        Warns:
            ExportWarning: The exporter of the file changed parameters, or left an input without a
                reader; see ``export_changes``.
        """
        with Agreement(options.communicator or Alone()).operation("from_onnx", ends=True):
            assembly, estimator = build(model, options, trains=True)
            engine = cls(assembly, estimator, options.schedule or Schedule(), options.exps)
            check_ranks(engine._shards, assembly, engine._arrays.on_host()[0])
            if not engine._shards.alone:
                engine.fisher.sources.placements()
            engine._warn_of_export()
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
        return self.fisher.damping

    @damping.setter
    def damping(self, value: float) -> None:
        check_damping(value, self._exps)
        self.fisher.damping = value

    @property
    def schedule(self) -> Schedule:
        """Calls that update statistics and refresh inverses; can be set, which keeps all counts."""
        return self.planner.schedule

    @schedule.setter
    def schedule(self, value: Schedule) -> None:
        check_schedule(value)
        refreshed, self.planner = self.planner.refreshed, self.fisher.planner(value)
        self.planner.refreshed = refreshed

    # -- the line ----------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, name: str) -> Iterator[Undo]:
        """Return an ``Agreement.operation`` that changes the engine; an error undoes the changes.

        The generator, the element types of averages, the running statistics, and protected averages
        and inverses are restored. Ctrl-C takes effect at the end.
        """
        undo = Undo(self.fisher, self._model)
        operation = self.passes.agreement.operation(name)
        with HeldInterrupts(), single_threaded_blas(), ignore_overflow(), operation:
            try:
                yield undo
            except BaseException:  # of several processes, the one that fails has another error
                undo.restore()
                raise

    def prepare(self) -> None:
        """Build the sessions of ONNX Runtime for a step that updates statistics, once.

        ``step`` calls it. Calls that report or evaluate build no session that they do not need. A
        call before the first step moves the time for building sessions out of that step.
        """
        if not self._prepared:
            for backward in self._assembly.backwards(self.fisher):
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
            inputs: As for ``trace``; or a list of the parts of the batch, each a pair of inputs
                and targets, as for ``gradients``.
            targets: The targets of the loss; for several losses, by output. None for a list of
                parts.
            gradients: The gradients of the result if the distribution ``"shard"`` divides them
                among several processes: ``"owned"`` for the parameters that this process owns, or
                ``"all"``, which costs one more message. In other cases, the result has all of them.
            update_buffers: Whether ``buffers`` become the running statistics after the batch.
            profile: Whether the result lists time and memory of each stage.

        Returns:
            Loss, gradients and natural gradients.

        Raises:
            InputError: Inputs, targets or ``gradients`` are wrong.
            NonFiniteError: The batch yields NaN or infinity; no state has changed.
        """
        clock = StageClock(memory=check_bool("profile", profile))
        with self.transaction("step") as undo:
            check_choice("gradients", gradients, GATHERINGS)
            parts = self.passes.parts(inputs, targets)
            self.require_memory(parts)
            self.prepare()
            moves = check_bool("update_buffers", update_buffers)
            fisher, passes, exp = self.fisher, self.passes, self._exps[0]
            due = self.planner.due(self.counter)
            with clock("forward"):
                traced = passes.traced(parts)
            with clock("backward"):
                batch = passes.step_gradients(
                    traced,
                    update_buffers=moves,
                    outputs=fisher.outputs if due.statistics else None,
                    division=fisher.division,
                )
            every = batch.shard.gradients
            undo.protect(every, exp, batch.bound, self._model.result_types)
            passes.update_due(
                fisher,
                due,
                clock,
                partial(passes.update_averages, fisher, traced, batch.shard.outputs),
            )
            del traced  # activations
            with clock("inverses"):
                fisher.refresh(due, overlap=self.schedule.overlap)
            in_file = self._model.to_file_layout(whole_arrays(batch.gradients))
            with clock("precondition"):
                natural = fisher.multiply_power(batch.gradients, exp, tuple(every))
            if gradients == "all":
                in_file = self._model.to_file_layout(fisher.division.gather(batch.gradients, every))
            self.planner.advance(due)
            self.counter += 1
            notes = (*self._standing_notes, *batch.notes)
            stages = clock.stages if profile else ()
            return Result(batch.loss, in_file, natural, notes, stages, self._model.ties)

    def observe(self, inputs: Inputs, targets: Targets = None) -> None:
        """Update statistics from a batch and refresh inverses, as scheduled.

        Args:
            inputs: As for ``trace``; or a list of the parts of the batch, each a pair of inputs
                and targets, as for ``gradients``.
            targets: The estimation mode ``"empirical"`` needs them. Every mode checks them as
                ``step`` does if they are given.

        Raises:
            InputError: Inputs or targets are wrong; see ``trace`` for other errors.
            NonFiniteError: The batch yields NaN or infinity; no state has changed.
        """
        with self.transaction("observe"):
            parts = self.passes.parts(inputs, targets)
            self.require_memory(parts)
            traced = self.passes.traced(parts)
            if all(getattr(targets, "targets", targets) is not None for _, targets in parts):
                self.passes.check_losses(traced)
            due = self.planner.due(self.counter)
            update = partial(self.passes.update_averages, self.fisher, traced)
            self.passes.update_due(self.fisher, due, StageClock(), update)
            with self.passes.agreement.operation("refresh", ends=True):
                self.fisher.refresh(due, overlap=self.schedule.overlap)
            self.planner.advance(due)
            self.counter += 1

    def update_statistics(
        self, trace: Trace | Sequence[Batch], examples: int | None = None
    ) -> bool:
        """Update the averages by one batch, whatever the schedule; inverses do not change.

        All processes of a communicator call it, each with its shard of the batch.

        Args:
            trace: The batch, as ``trace`` returns it; or a list of the parts of the batch, each a
                pair of inputs and targets, as for ``gradients``. Several parts are evaluated twice:
                the first pass counts their examples and predictions.
            examples: Number of examples of the batch, if the trace has only a part of it. Under the
                reduction ``"sum"``, the statistics are multiplied by the ratio of the numbers. A
                part in which no target counts changes nothing.

        Returns:
            Whether targets count, so that the averages have changed.

        Raises:
            InputError: The estimation mode ``"empirical"`` needs targets, and the trace has none.
            NonFiniteError: The batch yields NaN or infinity; no state has changed.
        """
        with self.transaction("update_statistics"):
            self.require_memory(trace)
            batch = trace if isinstance(trace, Trace) else self.passes.parts(trace)
            self.fisher.wait()
            traced = self.passes.traced(batch)
            return self.passes.update_averages(self.fisher, traced, examples=examples)

    # -- products ----------------------------------------------------------------------------------

    def precondition(self, gradients: Mapping[str, Array], exp: float = -1) -> dict[str, Array]:
        """Return gradients times a power of the damped Fisher matrix, as of the last refresh.

        Args:
            gradients: Arrays by parameter name, from any library. A block needs the gradients of
                all its parameters; blocks without gradients are left out.
            exp: One of ``exps``, or 1, which reads the current averages.

        Returns:
            New arrays by parameter name.

        Raises:
            UnknownNameError: A name is not a parameter, or the power is not in ``exps``.
            InputError: The bias or the weight of a block is missing.
            ShapeError: A gradient and its parameter have different shapes.
            NonFiniteError: A gradient contains NaN or infinity.
            NotReadyError: No batch was observed yet.
        """
        with self._shards.computing("precondition"):
            check_number("exp", exp)
            return self.fisher.multiply_power(self._checked(gradients), exp)

    def multiply_cholesky(
        self, vectors: Mapping[str, Array], transpose: bool = False
    ) -> dict[str, Array]:
        """Return ``B v`` with the factor ``B`` of the damped Fisher matrix, ``B Bᵀ = F + λI``.

        ``B`` belongs to the last refresh and needs the option ``compute_cholesky``.

        Args:
            vectors: Arrays by parameter name, as for ``precondition``.
            transpose: Whether the product is ``Bᵀ v``.

        Returns:
            New arrays by parameter name.

        Raises:
            KfacError: As for ``precondition``, or the option is not set.
        """
        return self._multiply_root(vectors, self.fisher.cholesky_product, transpose, 0.5)

    def multiply_cholesky_inverse(
        self, vectors: Mapping[str, Array], transpose: bool = False
    ) -> dict[str, Array]:
        """Return ``B⁻¹ v``; see ``multiply_cholesky``. It needs ``compute_cholesky_inverse``.

        With ``transpose`` the product is ``B⁻ᵀ v``: of standard normal numbers ``v`` it has the
        covariance ``(F + λI)⁻¹``.

        Args:
            vectors: Arrays by parameter name, as for ``precondition``.
            transpose: Whether the product is ``B⁻ᵀ v``.

        Returns:
            New arrays by parameter name.

        Raises:
            KfacError: As for ``multiply_cholesky``.
        """
        root = self.fisher.cholesky_inverse_product
        return self._multiply_root(vectors, root, transpose, -0.5)

    def synchronize(self) -> None:
        """Make the averages of all processes whole, so that they can be read; a collective call.

        Between two refreshes, an average that only refreshes read is divided among the processes of
        a communicator. ``save``, and products with the power 1, call this method. With one
        process, the method does nothing.
        """
        with self.passes.agreement.operation("synchronize"):
            self.fisher.division.complete()

    # -- reports -----------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        """A report for each layer with its block, and for each parameter without a layer."""
        return tuple(self._layer_reports())

    @property
    def factors(self) -> Factors:
        """The factors of each parameter by name: averages, eigenvalues and dampings."""
        return self._factors

    @property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces that layers use, by parameter: weights as matrices, and vectors."""
        return self._entries.pieces(self.collection.fisher_blocks)

    def memory(
        self, batch_size: int = 1, accumulate: int = 1, *, statistics: float = True
    ) -> MemoryReport:
        """Return a bound of the peak memory of a step, without running the model.

        Args:
            batch_size: Number of examples, of a part if a batch has several.
            accumulate: Number of parts of a batch.
            statistics: Part of the examples whose statistics a step updates: True for all of them,
                False for steps that compute gradients only.

        Returns:
            Bytes of each part of a step. Inputs, targets and the state of an optimizer are not
            included; an optimizer has its own ``memory``.

        Raises:
            InputError: A number of examples or parts is not a positive whole number, or
                ``statistics`` lies outside [0, 1].
        """
        check_int("batch_size", batch_size, least=1)
        check_int("accumulate", accumulate, least=1)
        return self._footprint_of(accumulate, statistics).peak(batch_size)

    def require_memory(
        self, inputs: Inputs, *, statistics: float = True, more: Callable[[], int] = lambda: 0
    ) -> None:
        """Refuse a batch that does not fit into the available memory, before it is computed.

        Args:
            inputs: Arrays by input name, or a list of the parts of the batch.
            statistics: Part of the examples whose statistics are updated, as for ``memory``.
            more: Returns the bytes of further arrays that are allocated for the batch.

        Raises:
            MemoryLimitError: The batch does not fit; the message names what would fit.
        """
        parts = parts_of(inputs)
        sizes = [
            unchecked_examples(self._assembly, part, statistics=statistics) for part, _ in parts
        ]
        if largest := max(sizes):
            self._footprint_of(len(parts), statistics).require(largest, more())

    def _summary(self) -> Summary:
        settings = self.damping, self.schedule
        reports = self._layer_reports()
        return engine_summary(self.name, self._assembly, settings, self.counter, reports)

    # -- files -------------------------------------------------------------------------------------

    def save(self, path: str | Path, extras: Extras | None = None) -> None:
        """Write the state of the engine to a file, from which ``load`` resumes bit by bit.

        The state consists of averages, inverses, counter, random generator, parameters and
        buffers; ``extras`` are stored with it. The first of several processes writes the file.
        """
        with self.transaction("save"), self.passes.agreement.operation("write", ends=True):
            self.fisher.wait()
            self.fisher.division.complete()
            with self.fisher.division.all_results():
                if self._shards.communicator.rank == 0:
                    save_state(path, self.fisher.factors, self._state(extras))

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
        expected = Expected(self.fisher.rng, factor_shapes(self.collection), damping, accept)
        with self.transaction("load"):
            present = self.fisher.factors, *self._arrays.on_host()
            with self.passes.agreement.operation("read", ends=True):
                state, restore_factors = load_state(path, *present, expected)
            restore_factors()
            self.fisher.division.restart()
            self.fisher.rng.bit_generator.state, self.counter = state.generator, state.counter
            self._model.passes.count = state.passes
            self.planner.restore(state.planner)
            if parameters:
                self._model.set_parameters(state.parameters)
                self.set_buffers(state.buffers)
            self._history.restart()

    # -- private -----------------------------------------------------------------------------------

    def _compared(self) -> Mapping[str, str]:
        """Return the values that all processes must share in a call, by name."""
        fisher = self.fisher
        settings = f"{self.counter} {self.damping} {self.schedule} {fisher.cov_ema_decay}"
        return {_STATE: f"{settings} {fisher.rng.bit_generator.state}"}

    def _multiply_root(
        self,
        vectors: Mapping[str, Array],
        root: Callable[[bool], Product],
        transpose: bool,
        exp: float,
    ) -> dict[str, Array]:
        with self._shards.computing("multiply_cholesky"):
            product = root(transpose)
            return self.fisher.multiply_blocks(self._checked(vectors), product, exp)

    def _checked(self, vectors: Mapping[str, Array]) -> dict[str, Array]:
        """Return vectors by parameter name, checked; a factor without statistics is an error."""
        if any(factor.average.value is None for factor in self.fisher.factors):
            raise NotReadyError("there are no statistics yet; call observe() or step() first.")
        checked = checked_vectors(self._model, self.collection.backend, vectors)
        parts = self._assembly.discovery.parts
        check_blocks(self.collection, {part.name for name in checked for part in parts[name]})
        return checked

    def _state(self, extras: Extras | None) -> State:
        rest = *self._arrays.on_host(), self.damping, self.planner.saved(), checked_extras(extras)
        passes = self._model.passes.count
        return State(self.counter, self.fisher.rng.bit_generator.state, *rest, passes)

    def _layer_reports(self) -> Iterator[LayerReport]:
        return layer_reports(self._entries, self.collection, self._model, self._exps)

    def _footprint_of(self, parts: int, statistics: float) -> Footprint:
        if not isinstance(statistics, bool):
            check_number("statistics", statistics, "[0, 1]")
        if not statistics:
            return Footprint(self._assembly)
        sums = self.fisher.sums_sources + (parts > 1)
        return Footprint(self._assembly, self.layers, self._exps, sums, float(statistics))


def precondition(
    model: ModelSource,
    inputs: Mapping[str, Array] | Array,
    targets: Targets,
    loss: LossChoices,
    **options: object,
) -> Result:
    """Return gradients and natural gradients of one batch, from a temporary engine.

    Args:
        model: Path, bytes or ``ModelProto``.
        inputs: Arrays by input name; a model of one input takes the array alone.
        targets: The targets of the loss.
        loss: As for ``Engine.from_onnx``.
        **options: Further options of ``Engine.from_onnx``.

    Returns:
        Loss, gradients, natural gradients.

    Raises:
        UnknownNameError: An option is unknown.
    """
    check_names(precondition.__name__, options, [field.name for field in fields(EngineOptions)])
    if not isinstance(inputs, Mapping) and is_array(inputs):
        declared, _ = declared_values(model)
        inputs = dict.fromkeys((entry.name for entry in declared), inputs)
        if len(inputs) > 1:
            raise InputError(
                f"the model has several inputs; give a dictionary with arrays for "
                f"{', '.join(inputs)}."
            )
    engine = Engine.from_onnx(model, loss=loss, **{"sample_inputs": inputs, **options})  # type: ignore[arg-type] # options are from_onnx's own
    return engine.step(inputs, targets)
