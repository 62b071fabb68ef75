"""Passes a batch through a model, and returns its values, loss and gradients.

Each process of a communicator has a shard of the batch. A shard has one part, or several that are
computed one after another.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import fsum, isfinite, nan, prod, sqrt
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from kfac_engine._types import Array, Rows, entries
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.readers import Measurements, Update
from kfac_engine.curvature.factors.refresh import Division
from kfac_engine.curvature.factors.row_weights import ExampleWeights
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.curvature.schedule import Due
from kfac_engine.curvature.sources import MeasuredBatch
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.forms import is_array
from kfac_engine.distributed.agreement import raised_by_all_ranks
from kfac_engine.engine.batch_parts import Inputs, TracedParts, parts_of
from kfac_engine.engine.batch_shards import BatchShards, ExchangedPart
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.curvature_products import CurvatureProducts
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.profiling import StageClock
from kfac_engine.engine.rollback import ignore_overflow
from kfac_engine.engine.sample_space import SampleSpace, bytes_of
from kfac_engine.engine.validation import (
    check_batch_size,
    check_finite,
    check_variances,
    refuse_nonfinite,
)
from kfac_engine.errors import DivergenceWarning, KfacError, NonFiniteError, warn
from kfac_engine.layers.feature_powers import FeaturePowers
from kfac_engine.losses.objective import BatchSize, Objective, Observation, Residuals
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.inputs import disagreements
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.nonfinite import first_nonfinite
from kfac_engine.runtime.trace import Trace

# Largest difference of factors that are equal up to rounding.
_EQUAL = 1e-12
# Gradients whose norms have a smaller sum cannot overflow when they are added.
_LARGE_NORM = 1e30


class BackwardResult(NamedTuple):
    """Loss and gradients of a batch."""

    loss: float  # the reduced loss
    gradients: dict[str, Array]  # gradients of the loss by parameter, in new arrays
    # By value, the gradients that statistics of the mode ``empirical`` read; None if statistics
    # need a separate backward pass.
    outputs: dict[str, Array] | None = None
    # New running statistics, if they are computed.
    buffers: Mapping[str, Array] = MappingProxyType({})
    notes: tuple[str, ...] = ()  # notes on the axes of the batch
    each: tuple[float, ...] = ()  # the addend of each loss function in ``loss``
    norm: float | None = None  # norm of the gradients, if it is known

    def plus(self, other: "BackwardResult") -> "BackwardResult":
        """Return the sum of the losses and gradients of two parts, in the arrays of this result."""
        for name, gradient in other.gradients.items():
            self.gradients[name] += gradient
        each = tuple([one + more for one, more in zip(self.each, other.each, strict=True)])
        return BackwardResult(self.loss + other.loss, self.gradients, each=each)

    def times(self, factor: float) -> "BackwardResult":
        """Return the loss and the gradients times a number; the arrays are reused."""
        for gradient in self.gradients.values():
            gradient *= factor
        each = tuple([loss * factor for loss in self.each])
        return BackwardResult(self.loss * factor, self.gradients, each=each)


class StepGradients(NamedTuple):
    """Loss and gradients of a step, over all processes."""

    loss: float
    gradients: Mapping[str, Array | Rows]  # by parameter; with a division, its ``sum_gradients``
    bound: float | None  # an upper bound of the norm of the gradient, if it is known
    residuals: Residuals  # over all processes, if this process measures its own
    losses: dict[str, float]  # the part of the loss of each output, if there are several
    notes: tuple[str, ...]  # notes on the axes of the batch
    shard: BackwardResult  # loss and gradients of this process


def reported_loss(trace: Trace, objective: Objective, observation: Observation) -> float:
    """Return the reduced loss of a batch; a loss that is NaN or infinite raises NonFiniteError."""
    return _finite(objective.value(trace, observation))


def _finite(loss: float) -> float:
    if not isfinite(loss):
        raise NonFiniteError(
            f"the loss of the batch is {loss:g}; check the targets, the inputs and the parameters "
            f"for huge numbers."
        )
    return loss


def run_backward(
    trace: Trace,
    objective: Objective,
    observation: Observation,
    parameters: Sequence[str],
    outputs: Sequence[str] | None = None,
    residuals: Residuals | None = None,
) -> BackwardResult:
    """Compute the loss of a batch and its gradients.

    In the mode ``empirical``, statistics read gradients of the reported loss times a number. One
    pass yields these gradients and those of the parameters. The pass includes the number, because
    statistics read more gradients. The parameters' gradients are then divided by it in place.

    Args:
        trace: The evaluation of the batch.
        objective: The loss.
        observation: The targets of the batch.
        parameters: Names of the parameters.
        outputs: Values whose gradients statistics of the mode ``empirical`` read; None in other
            modes, and if no statistics are due.
        residuals: Receives the squares of the gradients of the predictions.

    Returns:
        The loss and the gradients of the parameters. The gradients of ``outputs`` are included if
        the number is the same for all losses and predictions.
    """
    ratio = None if outputs is None else objective.fisher_ratio(observation)
    times, each = ratio or 1.0, list[Any]()
    loss, cotangents = objective.value_and_cotangents(trace, times, observation, residuals, each)
    if isinstance(loss, float):
        _finite(loss)
    if outputs is None or ratio is None:
        gradients = trace.writable_vjp(cotangents, parameters) if parameters else {}
        return BackwardResult(loss, gradients, each=tuple(each))
    gradients, read = trace.vjp_pair(cotangents, parameters, outputs)
    for gradient in gradients.values():
        gradient *= 1 / ratio
    return BackwardResult(loss, gradients, read, each=tuple(each))


@contextmanager
def origin_named(model: OnnxModel, trace: Trace, objective: Objective) -> Iterator[None]:
    """Name the first node with NaN or infinity in a ``NonFiniteError`` of the ``with`` block.

    The error does not change if no node is found.
    """
    try:
        yield
    except NonFiniteError as error:
        origin, cotangents = "", None
        with suppress(KfacError):
            cotangents = objective.cotangents(trace)
        with suppress(KfacError):
            origin = first_nonfinite(model, trace, cotangents, tuple(model.parameters))
        if not origin:
            raise
        raise NonFiniteError(f"{error} {origin}") from error


class BatchPasses:
    """Evaluates and differentiates batches of a model with its losses.

    Attributes:
        shards: The processes, and their shards of the latest batch.
        agreement: Makes all processes continue, or raise the same error.
        history: Losses of the latest calls.
        part_sizes: Number of examples of each process, for each part of the latest batch.
        absent: Indices of the loss functions without a target that counts in the latest batch.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self.model, self.task = assembly, assembly.model, assembly.task
        self.objective = self.task.objective
        self.example_axes = self.task.example_axes
        self.arrays = ModelArrays(assembly.model, assembly.collection.backend)
        self.shards = BatchShards(
            assembly.options.communicator,
            self.objective,
            self.task.batch,
            lambda: self.arrays.on_host()[0],
        )
        self.agreement = self.shards.agreement
        # Only the first process warns of a diverging run.
        self.history = LossHistory(warns=self.agreement.rank == 0)
        self.part_sizes: tuple[tuple[int, ...], ...] = ()
        self.absent = frozenset[int]()

    @property
    def parameters(self) -> dict[str, Array]:
        """See ``Engine.parameters``."""
        return self.arrays.for_caller(self.model.parameters)

    def parts(self, inputs: Inputs, targets: Targets = None) -> Sequence[Batch]:
        """Return the parts of a batch: one, unless a list of parts is given.

        A part is a pair of inputs and targets. Labels of a loss that the file computes are targets,
        even if they are passed as inputs. Arguments and errors are as for ``parts_of``.
        """
        loss, parts = self.task.file_loss, parts_of(inputs, targets)
        if len(parts) > 1:
            self.task.require_parts()
        if any(is_array(its_inputs) for its_inputs, _ in parts):
            named = self.example_axes.named
            parts = [(named(x) if is_array(x) else x, y) for x, y in parts]
        axes = self.example_axes
        if axes.has_default_targets:
            parts = [(x, axes.with_default_targets(x, y)) for x, y in parts]
        return parts if loss is None else [loss.separated(*part) for part in parts]

    # -- values -----------------------------------------------------------------------------------

    def trace(self, inputs: Mapping[str, Array], targets: Targets = None) -> Trace:
        """Evaluate one of the pairs that ``parts`` returns; see ``Engine.trace``."""
        check_batch_size(self.task.batch, inputs)
        if isinstance(inputs, dict | Mapping):
            inputs = self.arrays.for_model(inputs)
        trace = self.model.run(inputs, self.objective.named_targets(targets))
        return trace.require_finite(self.objective.inputs)

    def traced(self, batch: Trace | Sequence[Batch]) -> TracedParts:
        """Return the evaluations of a batch, or of the parts of a batch."""
        if isinstance(batch, list | tuple) or not isinstance(batch, Trace):
            return TracedParts(batch, self.trace, self.example_axes)
        return TracedParts.of(batch, self.example_axes)

    def observe(self, trace: Trace, *, targets: bool = True) -> Observation:
        """Check the values that the losses read; see ``Objective.observe``."""
        if self.model.new_buffers and self.objective.examples(trace) == 1:
            check_variances(self.model.graph, self.model.facts, trace)
        try:
            return self.objective.observe(trace, targets=targets)
        except NonFiniteError as error:
            self._raise_with_origin(error, trace)

    def check_losses(self, traced: TracedParts) -> None:
        """Check targets and loss of each part of a batch; targets must count in one at least."""
        sizes: list[BatchSize] = []

        def check(trace: Trace) -> None:
            observation = self.observe(trace)
            sizes.append(observation.size)
            with self.explained(trace):
                reported_loss(trace, self.objective, observation.as_piece())

        traced.each(check)
        size = sum(sizes[1:], sizes[0])
        totals = self.shards.agreement.sum(*size.totals)
        self.objective.require_counts(BatchSize(size.examples, totals))

    def loss(self, parts: Sequence[Batch]) -> float:
        """Return the loss of the whole batch, over all processes."""

        def differentiate(trace: Trace, observation: Observation) -> BackwardResult:
            with self.explained(trace):
                return BackwardResult(reported_loss(trace, self.objective, observation), {})

        result = self._joined(self.traced(parts), differentiate)
        return self.shards.agreement.sum(result.loss)[0]

    # -- gradients --------------------------------------------------------------------------------

    def gradients(
        self,
        traced: TracedParts,
        update_buffers: bool,
        residuals: Residuals | None = None,
        features: FeaturePowers | None = None,
        outputs: Sequence[str] | None = None,
        *,
        losses_alone: bool = False,
    ) -> BackwardResult:
        """Differentiate this process's shard of a batch, or compute only its losses.

        If the batch has one part, the result also has the gradients with respect to ``outputs``;
        see ``run_backward``. ``residuals`` receives this process's residuals, and ``features`` the
        powers of the layers' input features.
        """
        count = len(traced.parts)
        parameters = () if losses_alone else tuple(self.model.parameters)
        read = outputs if count == 1 else None
        notes: dict[str, None] = {}
        buffers: list[tuple[int, Mapping[str, Array]]] = []
        # Several processes add the powers of features on their devices.
        read_with = (residuals, features if self.shards.alone else None)
        sums = [of_batch for of_batch in read_with if of_batch is not None]

        def differentiate(trace: Trace, observation: Observation) -> BackwardResult:
            if features is not None:
                weights = map(attrgetter("weights"), observation.terms)
                features.add(trace, self.objective.examples(trace), weights)
            try:
                backward = run_backward(
                    trace, self.objective, observation, parameters, read, residuals
                )
                for of_batch in sums if count == 1 else ():
                    of_batch.read_later()
                # The losses may be on a device, which is read once, with all that waits.
                finite = self.model.memory_space.finite(
                    list(backward.gradients.values()), backward.each
                )
                loss = _finite(sum(finite.numbers))
                refuse_nonfinite(backward.gradients, finite.each)
            except NonFiniteError as error:
                self._raise_with_origin(error, trace)
            if update_buffers and self.model.new_buffers:
                after = self.model.buffers_after(trace)
                with trace.explain():
                    check_finite(after, self.model.memory_space, "the running statistic")
                buffers.append((self.objective.examples(trace), after))
            notes.update(dict.fromkeys(disagreements(self.model.graph, trace)))
            gradients, each = self.arrays.for_backend(backward.gradients), tuple(finite.numbers)
            return BackwardResult(loss, gradients, backward.outputs, each=each, norm=finite.norm)

        with self._assembly.collection.backend.shared_reads():
            backward = self._joined(traced, differentiate)
            for of_batch in sums if count > 1 else ():
                of_batch.read_later()
        joined = self.model.joined_buffers(buffers[-count:]) if buffers else {}
        return backward._replace(buffers=joined, notes=tuple(notes))

    def step_gradients(
        self,
        traced: TracedParts,
        residuals: Residuals | None = None,
        features: FeaturePowers | None = None,
        *,
        update_buffers: bool = True,
        outputs: Sequence[str] | None = None,
        division: Division | None = None,
        losses_alone: bool = False,
    ) -> StepGradients:
        """Differentiate a batch of all processes, and update running statistics.

        Args:
            traced: The shard of this process; the caller has checked the memory.
            residuals: Receives the residuals of this process.
            features: Receives the powers of features in the batch of all processes.
            update_buffers: Whether running statistics change.
            outputs: As for ``gradients``.
            division: Divides the gradients among processes; if None, each process has all of them.
            losses_alone: Whether gradients are left out.
        """
        backward = self.gradients(
            traced, update_buffers, residuals, features, outputs, losses_alone=losses_alone
        )
        norm = backward.norm
        if norm is None and not self.shards.alone:
            arrays = [*backward.gradients.values()]
            norm = sqrt(fsum(self._assembly.collection.backend.squared_norms(arrays)))
        numbers = backward.loss, nan if norm is None else norm, *backward.each
        (loss, bound, *each), residuals = self.shards.totals(numbers, residuals)
        gradients: Mapping[str, Array | Rows] = backward.gradients
        if not self.shards.alone:
            gradients = self._summed(backward.gradients, features, division)
            if not bound < _LARGE_NORM:
                self._check_sums(gradients)
        self.history.add(loss)
        self.model.buffers.update(backward.buffers)
        return StepGradients(
            loss,
            gradients,
            None if norm is None else bound,
            residuals,
            self._losses_by_output(each),
            backward.notes,
            backward,
        )

    def _summed(
        self, gradients: dict[str, Array], features: FeaturePowers | None, division: Division | None
    ) -> Mapping[str, Array | Rows]:
        """Sum gradients over several processes, and the powers of features in place."""
        powers = None if features is None else features.sums
        more = [] if powers is None else [powers]
        with self.agreement.exchanging():
            if division is not None:
                return division.sum_gradients(gradients)
            self.shards.sum([*gradients.values(), *more])
        return gradients

    def _check_sums(self, gradients: Mapping[str, Array | Rows]) -> None:
        """Check gradients that have been summed over several processes."""
        arrays = {name: entries(gradient) for name, gradient in gradients.items()}
        with self.history.explain():
            check_finite(arrays, self.model.memory_space)

    def _losses_by_output(self, each: Sequence[float]) -> dict[str, float]:
        """Return the loss of each output; an empty mapping if losses read a single output."""
        losses: dict[str, float] = {}
        for term, value in zip(self.objective.terms, each, strict=True):
            name = self.objective.outputs.get(term.inputs[0], term.inputs[0])
            losses[name] = losses.get(name, 0.0) + value
        return losses if len(losses) > 1 else {}

    # -- statistics -------------------------------------------------------------------------------

    def measure(
        self,
        fisher: Fisher,
        traced: TracedParts,
        gradients: dict[str, Array] | None = None,
        examples: int | None = None,
        *,
        by_example: bool = True,
    ) -> Update | None:
        """Measure the statistics of a shard; ``Fisher.commit`` then updates the averages.

        Several parts draw the random targets of the whole batch. They are evaluated twice, unless
        an earlier pass has counted their examples and predictions.

        Args:
            fisher: The averages.
            traced: The batch.
            gradients: The gradients of ``fisher.outputs``, if the caller has computed them.
            examples: Number of examples of the batch, if the parts have only some of them. The
                result is then None if a loss has targets that count in the latest batch, and none
                in the parts.
            by_example: Whether gradients of single examples are measured as well.
        """
        self.task.require_examples("statistics of curvature need")
        traced.count(self.shards, partial(self.observe, targets=False), examples)
        if examples is not None and not traced.size.absent <= self.absent:
            return None
        if len(traced.parts) > 1:
            return self._measure_parts(fisher, traced, by_example=by_example)
        (part,), trace = traced.exchanges, traced.only
        self._set_rows(fisher, part)
        batch = self._to_measure(fisher, trace, part.observation)
        release = trace.release if traced.releases else None
        with self.explained(trace):
            return fisher.measure(batch, release, gradients, by_example=by_example)

    def _measure_parts(
        self, fisher: Fisher, traced: TracedParts, *, by_example: bool
    ) -> Update | None:
        """Measure a batch in parts; arguments and result are as for ``measure``."""
        bits, alike = fisher.rng.bit_generator, traced.are_alike

        def measured(bases: Sequence[FisherFactor] = ()) -> Measurements:
            sums, parts = Measurements(), zip(traced.exchanges, traced.rows, strict=True)
            start = bits.state

            def add(trace: Trace) -> None:
                part, rows = next(parts)
                self._set_rows(fisher, part)
                batch = self._to_measure(fisher, trace, part.observation.within(traced.size))
                if alike:
                    # Each part draws its rows of the numbers of the batch.
                    bits.state = start
                    fisher.set_rows(*rows)
                with self.explained(trace):
                    fisher.measure_part(sums, batch, bases, by_example=by_example)

            try:
                traced.each(add)
            finally:
                fisher.set_rows(None)
                if bases:
                    bits.state = start
            return sums

        if bases := fisher.parts_of_bases:
            fisher.set_bases(measured(bases))
        return fisher.joined(measured(), traced.size.absent)

    def _set_rows(self, fisher: Fisher, part: ExchangedPart) -> None:
        """Let statistics draw the rows of this process in a part of a batch."""
        if not self.shards.alone:
            fisher.set_rows(part.rows, *part.of_losses)

    def _to_measure(self, fisher: Fisher, trace: Trace, seen: Observation) -> MeasuredBatch:
        """Return a part of a batch with weights of its examples; None if it has no weights."""
        scales, weights = self.objective.fisher_scales(seen), None
        rows = [observed.weights for observed in seen.terms]
        if any(of_term is not None for of_term in rows):
            pairs = zip(self.objective.terms, rows, strict=True)
            weights = ExampleWeights.of(pairs, trace, seen.size.examples, fisher.sources.places)
        return MeasuredBatch(trace, scales, weights, absent=seen.whole.absent, checked=True)

    def update_due(
        self, fisher: Fisher, due: Due, clock: StageClock, update: Callable[[], object]
    ) -> None:
        """Complete pending refreshes, and call ``update`` if statistics are due."""
        # A refresh begins with messages, which follow a vote.
        votes = bool(due.refreshes) and not due.statistics
        with self.agreement.operation("statistics", ends=votes):
            fisher.wait()
            if due.statistics:
                with clock("statistics"):
                    update()

    def update_averages(
        self,
        fisher: Fisher,
        traced: TracedParts,
        gradients: dict[str, Array] | None = None,
        examples: int | None = None,
        *,
        decay: float | None = None,
        by_example: bool = True,
    ) -> bool:
        """Measure a batch and commit its statistics, in an ``Engine.transaction`` of the caller.

        ``fisher`` has no pending refresh; see ``measure`` for the other arguments. A ``decay`` of
        None is the option ``ema_decay``. Returns the result of ``Engine.update_statistics``.
        """
        update = self.measure(fisher, traced, gradients, examples, by_example=by_example)
        self._assembly.collection.backend.download(())  # what waits fails before averages change
        if update is not None:
            fisher.commit(update, decay=decay)
        return update is not None

    # -- products ---------------------------------------------------------------------------------

    def curvature_products(
        self, batch: Trace | Sequence[Batch], examples: int | None = None
    ) -> CurvatureProducts:
        """See ``Engine.curvature_products``."""
        arguments = self._assembly, self.arrays, self.traced(batch), self.shards
        return CurvatureProducts(*arguments, examples)

    def sample_space(self, parts: Sequence[Batch]) -> SampleSpace:
        """Return the rows of the Fisher matrix for the pairs that ``parts`` returns."""
        return SampleSpace(self._assembly, self.arrays, self.traced(parts), self.shards)

    def sample_space_bytes(self, examples: int) -> int:
        """Return a bound of the memory of a ``sample_space``, from the shapes of the sample run."""
        facts, rows = self.model.facts, 0
        for term in self.objective.terms:
            shapes = {name: tuple(facts[name].shape) for name in term.inputs}
            rows += examples * prod(term.static_inner_shape(shapes)[1:])
        return bytes_of(rows, sum(array.size for array in self.model.parameters.values()))

    @contextmanager
    def explained(self, trace: Trace) -> Iterator[None]:
        """Return a context whose ``NonFiniteError`` names the batch and the latest losses."""
        try:
            yield
        except NonFiniteError:
            with self.history.explain(), trace.explain():
                raise

    # -- private ----------------------------------------------------------------------------------

    def _raise_with_origin(self, error: NonFiniteError, trace: Trace) -> NoReturn:
        """Raise an error as in ``explained``, and name the first node that is not finite."""
        origin = origin_named(self.model, trace, self.objective)
        with ignore_overflow(), self.explained(trace), origin:
            raise error

    def _joined(
        self, traced: TracedParts, differentiate: Callable[[Trace, Observation], BackwardResult]
    ) -> BackwardResult:
        """Return losses and gradients, summed over the parts of a batch.

        The size of a batch is known after its last part. The parts are therefore differentiated
        with the size of the first part, and the sum is multiplied by a correction. If corrections
        of several losses differ, a second pass uses the size of the batch.
        """
        result, sizes = self._sum(traced, differentiate, None)
        whole = sum(sizes[1:], sizes[0])
        self.absent = whole.absent
        if len(sizes) > 1:
            used = sizes[0].positive()
            # A loss without targets that count has no gradient to correct.
            pairs = enumerate(self.objective.corrections(used, whole))
            corrections = [factor for number, factor in pairs if number not in whole.absent]
            if max(corrections) - min(corrections) < _EQUAL:
                result = result.times(corrections[0])
            else:
                result, _ = self._sum(traced, differentiate, whole)
            check_finite(result.gradients, self.model.memory_space)
        return result

    def _sum(
        self,
        traced: TracedParts,
        differentiate: Callable[[Trace, Observation], BackwardResult],
        whole: BatchSize | None,
    ) -> tuple[BackwardResult, list[BatchSize]]:
        """Return the sum of the results of the parts, and the sizes of the parts.

        Results of several parts are divided by the size ``whole``; if it is None, by the size of
        the first part.
        """
        results: list[BackwardResult] = []
        sizes: list[BatchSize] = []

        def add(trace: Trace) -> None:
            if len(sizes) == len(traced.exchanges):
                traced.exchanges.append(self.shards.exchange_sizes(trace, self.observe(trace)))
            observation = traced.exchanges[len(sizes)].observation
            sizes.append(observation.whole)
            if len(traced.parts) > 1:
                observation = observation.within(whole or sizes[0].positive())
            result = differentiate(trace, observation)
            results[:] = [results[0].plus(result) if results else result]

        if len(traced.parts) > 1 or not self.shards.alone:
            self.task.require_examples("a batch in parts, or of several processes, needs")
        traced.each(add)
        self.part_sizes = tuple(map(attrgetter("counts"), traced.exchanges))
        return results[0], sizes


# -- losses of the latest calls, which show a diverging run ----------------------------------------

CURES = (
    "take smaller steps (Result.clipped_rate bounds them), raise the damping, "
    "or refresh the inverses more often (Schedule.refresh_every)"
)
LATEST = 5  # losses that an error lists
EXPLODED = 1000  # times the first loss


class LossHistory:
    """The losses of an engine's latest calls; if ``warns``, a diverging run causes a warning."""

    def __init__(self, *, warns: bool = True) -> None:
        self._warns = warns
        self.restart()

    def restart(self) -> None:
        """Remove all losses, because another run begins."""
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._first: float | None = None
        self._parameters_moved = False
        self._warned = False

    def parameters_moved(self) -> None:
        """Record that parameters were replaced, so that the calls belong to a training run."""
        self._parameters_moved = True

    def add(self, loss: float) -> None:
        """Record the loss of a call; warn once if it is a large multiple of the first loss."""
        self._latest.append(loss)
        if self._first is None:
            self._first = loss
        exploded = loss > EXPLODED * abs(self._first)
        if exploded and self._parameters_moved and self._warns and not self._warned:
            self._warned = True
            warn(
                f"the run diverges: the loss rose from {self._first:.3g} to {loss:.3g}; {CURES}.",
                DivergenceWarning,
            )

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Add the latest losses and the remedies to a ``NonFiniteError`` of a run.

        The error does not change before parameters have moved.
        """
        try:
            yield
        except NonFiniteError as error:
            agreed = raised_by_all_ranks(error)
            if agreed or not (self._latest and self._parameters_moved):
                raise
            losses = ", ".join(f"{loss:.3g}" for loss in self._latest)
            longer = NonFiniteError(
                f"{error} The latest losses were {losses}. If the run diverges: {CURES}."
            )
            longer.place = error.place
            raise longer from error
