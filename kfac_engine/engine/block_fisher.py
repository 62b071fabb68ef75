"""The block-diagonal Fisher matrix of an engine: measure, commit, refresh, multiply.

``Engine.step`` and ``KfacOptimizer.step`` are made of these four. A batch is measured; its
statistics are committed to the averages; the inverses that a planner names are refreshed; vectors
are multiplied by powers of the blocks. The processes of a communicator make the same calls, each
with its shard of a batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kfac_engine._types import Array, Rows
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature import block_products
from kfac_engine.curvature.block_products import Product
from kfac_engine.curvature.covariance_updates import MeasuredBatch
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.row_weights import ExampleWeights
from kfac_engine.curvature.factors.updater import Measurements, Update
from kfac_engine.curvature.schedule import Planner
from kfac_engine.datasets.examples import Batch
from kfac_engine.distributed.shards import Placement
from kfac_engine.engine.batch_parts import TracedParts
from kfac_engine.engine.batch_passes import BatchPasses
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.distribution import Distribution, Replicate
from kfac_engine.engine.report import LayerReport
from kfac_engine.engine.rollback import Undo, quiet
from kfac_engine.engine.shard import Shard
from kfac_engine.engine.validation import check_products
from kfac_engine.layers.parameter_slices import is_whole, join, split
from kfac_engine.losses.objective import Observation
from kfac_engine.runtime.batch_axis import find_position_orders
from kfac_engine.runtime.trace import Trace
from kfac_engine.system.deferred_signals import HeldInterrupts

DISTRIBUTIONS: Mapping[str, type[Distribution]] = {"replicate": Replicate, "shard": Shard}
# The state that several processes compare with each batch.
_STATE = "counters, random generators, dampings or schedules"


class BlockFisher:
    """Averages, inverses and products of the blocks of a model, over one process or several.

    Args:
        assembly: The model, its losses and its layers.
        estimator: Statistics and products over the collection.
        passes: Evaluates batches.
        reports: Returns a report for each layer with its block.
        settings: Returns what all processes must have alike in a call, besides the generator.

    Attributes:
        estimator: As given.
        distribution: Averages and inverses over several processes.
    """

    def __init__(
        self,
        assembly: Assembly,
        estimator: FisherEstimator,
        passes: BatchPasses,
        reports: Callable[[], Iterable[LayerReport]],
        settings: Callable[[], str],
    ) -> None:
        self.estimator = estimator
        self._assembly, self._passes, self._settings = assembly, passes, settings
        self._shards = passes.shards
        self._shards.state = self._state
        distribution = DISTRIBUTIONS[assembly.options.distribution]
        self.distribution = distribution(self._shards, assembly, estimator, reports)
        if not self._shards.alone:
            shared = self.distribution
            estimator.divide(shared, shared.over_ranks, shared.divided)
        self._draws_placed = False
        slices = assembly.discovery.parts.items()
        self._whole = frozenset(name for name, parts in slices if is_whole(parts))

    @contextmanager
    def transaction(self, name: str) -> Iterator[Undo]:
        """Return an ``Agreement.operation`` that changes the engine; an error undoes the changes.

        The generator, the element types of averages, the running statistics, and protected averages
        and inverses are restored. Ctrl-C takes effect at the end.
        """
        undo = Undo(self.estimator, self._assembly.model)
        operation = self._shards.agreement.operation(name)
        with HeldInterrupts(), single_threaded_blas(), quiet(), operation:
            try:
                yield undo
            except BaseException:  # of several processes, the one that fails has another error
                undo.restore()
                raise

    def place_draws(self) -> None:
        """Find where the examples lie in random numbers; batches in parts, or divided, need it."""
        if not self._draws_placed:
            self.estimator.statistics.placements = draw_placements(self._assembly)
            self._draws_placed = True

    # -- measure ----------------------------------------------------------------------------------

    @property
    def outputs(self) -> Sequence[str] | None:
        """Values whose gradients of the training loss ``measure`` reads; None in most modes."""
        return self.estimator.differentiated if self.estimator.reads_gradients else None

    def measure(
        self,
        traced: TracedParts,
        gradients: dict[str, Array] | None = None,
        examples: int | None = None,
        *,
        by_example: bool = True,
    ) -> Update | None:
        """Measure the statistics of the shard of a batch; no average changes before ``commit``.

        Several parts are evaluated twice: the first pass counts their examples and predictions,
        and the parts draw the random targets of the whole batch. ``gradients`` are the gradients of
        ``outputs``, if the caller has computed them. ``examples`` is the number of examples of the
        batch, if the parts have only some of them; the result is then None if no target of them
        counts for a loss that has others in the latest batch. With ``by_example``, gradients of
        single examples are measured as well.
        """
        self._assembly.task.require_examples("statistics of curvature need")
        if len(traced.parts) > 1:
            return self._measure_parts(traced, examples, by_example=by_example)
        passes, trace = self._passes, traced.only
        seen = traced.seen or self._exchange(trace, examples)
        if examples is not None and not seen.whole.absent <= passes.absent:
            return None
        self._set_rows()
        scales = passes.objective.fisher_scales(seen)
        weights = self._example_weights(trace, seen)
        batch = MeasuredBatch(trace, scales, weights, absent=seen.whole.absent)
        release = trace.release if traced.releases else None
        with passes.explained(trace):
            return self.estimator.statistics.measure(
                batch, release, gradients, by_example=by_example
            )

    def _measure_parts(
        self, traced: TracedParts, examples: int | None, *, by_example: bool
    ) -> Update | None:
        """Measure the statistics of a batch in parts, with the random targets of the whole batch.

        Arguments and result are as for ``measure``.
        """
        estimator, passes = self.estimator, self._passes
        traced.count(self._shards, self._exchange, examples)
        if examples is not None and not traced.size.absent <= passes.absent:
            return None
        self.place_draws()
        statistics, bits = estimator.statistics, estimator.rng.bit_generator
        alike = traced.are_alike

        def measured(bases: Sequence[FisherFactor] = ()) -> Measurements:
            sums, rows = Measurements(), iter(traced.rows)
            start = bits.state

            def add(trace: Trace) -> None:
                part, observation = next(rows), self._exchange(trace)
                self._set_rows()
                scales = passes.objective.fisher_scales(observation.within(traced.size))
                weighted = MeasuredBatch(trace, scales, self._example_weights(trace, observation))
                if alike:
                    # Each part draws its rows of the numbers of the batch.
                    bits.state, estimator.rows = start, part
                with passes.explained(trace):
                    statistics.measure_part(sums, weighted, bases, by_example=by_example)

            try:
                traced.each(add)
            finally:
                estimator.rows = None
                self._set_rows()
                if bases:
                    bits.state = start
            return sums

        if bases := statistics.parts_of_bases:
            statistics.set_bases(measured(bases))
        return statistics.joined(measured(), traced.size.absent)

    # -- commit, refresh --------------------------------------------------------------------------

    def update(
        self,
        batch: Trace | Sequence[Batch],
        examples: int | None = None,
        *,
        decay: float | None = None,
        by_example: bool = True,
    ) -> bool:
        """Measure a batch, and commit its statistics, in a ``transaction`` of the caller.

        ``batch`` is the evaluation of the batch, or its parts. ``examples`` and ``by_example`` are
        as for ``measure``. A ``decay`` of None is the decay of the estimator. Return whether
        targets count, so that the averages have changed.
        """
        self.wait()
        update = self.measure(self._passes.traced(batch), examples=examples, by_example=by_example)
        if update is None:
            return False
        _, _, update = self.agree(0.0, update)
        self.commit(update, decay=decay)
        return True

    def agree(
        self,
        loss: float,
        update: Update | None,
        gradients: Mapping[str, Array] | None = None,
    ) -> tuple[float, float | None, Update | None]:
        """Exchange losses and counts before ``commit``; see ``Distribution.exchange_losses``."""
        return self.distribution.exchange_losses(loss, update, gradients or {})

    def commit(
        self,
        update: Update | None,
        gradients: dict[str, Array] | None = None,
        *,
        decay: float | None = None,
    ) -> Mapping[str, Array | Rows]:
        """Update the averages, and return the gradients of the batch that this process multiplies.

        ``gradients`` are the gradients of the shard; they are summed over the processes as by
        ``Distribution.combine``. ``update`` is None if no statistics are due. A ``decay`` of None
        is the decay of the estimator.
        """
        present = self.estimator.cov_ema_decay
        return self.distribution.combine(update, gradients, present if decay is None else decay)

    def wait(self) -> None:
        """Complete the refreshes that an earlier call began."""
        self.estimator.refreshes.wait()

    def refresh(self, planner: Planner, counter: int, bound: int | None = None) -> None:
        """Refresh the inverses that are due in a call; see ``Refreshes.run``."""
        self.estimator.refreshes.run(planner, counter, bound)

    # -- multiply ---------------------------------------------------------------------------------

    def multiply_matpower(
        self, vectors: Mapping[str, Array | Rows], exp: float, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Multiply vectors by a power of the damped matrix; see ``multiply``."""
        product = self.estimator.matpower_product(exp)
        return self.multiply(vectors, product, exp, names)

    def multiply(
        self,
        vectors: Mapping[str, Array | Rows],
        product: Product,
        exp: float,
        names: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Multiply vectors by blocks, and entries of parameters without a layer by the damping.

        Args:
            vectors: Arrays by parameter, or the rows of a table that this process owns.
            product: A product of a block.
            exp: The power of the product, for parameters without a block.
            names: Parameters of all products, if ``vectors`` has only the parameters of this
                process.

        Returns:
            Products by parameter, in the layout of the file.
        """
        if exp == 1:
            self.distribution.complete()
        slices = self._assembly.discovery.parts
        # The damping of entries without a layer may be the mean over the blocks, which takes time.
        whole = self._whole.issuperset(vectors)
        rest = 1.0 if whole else self.estimator.identity_damping**exp
        with self._shards.agreement.operation("products", ends=True):
            owned = self.distribution.owned(vectors)
            pieces = split(slices, owned)
            blocks = block_products.multiply(self._assembly.collection, pieces, product)
            products = {n: join(slices[n], blocks, v, rest) for n, v in owned.items()}
            check_products(products, self._assembly.collection.backend, exp)
        shared = self.distribution.share(products, tuple(vectors) if names is None else names)
        return self._assembly.model.to_file_layout(shared)

    # -- private ----------------------------------------------------------------------------------

    def _exchange(self, trace: Trace, examples: int | None = None) -> Observation:
        """Exchange the sizes of shards, which determine the draws of random targets."""
        observed = self._passes.observe(trace, targets=False)
        return self._shards.exchange_sizes(trace, observed, examples)

    def _set_rows(self) -> None:
        """Let statistics draw the rows of this process in the latest batch."""
        if not self._shards.alone:
            self.estimator.rows = self._shards.rows

    def _state(self) -> Mapping[str, str]:
        """Return what all processes must have alike in a call, by name."""
        return {_STATE: f"{self._settings()} {self.estimator.rng.bit_generator.state}"}

    def _example_weights(self, trace: Trace, observation: Observation) -> ExampleWeights | None:
        """Return the weights of the examples; None if no target has a weight."""
        rows = [observed.weights for observed in observation.terms]
        if all(weights is None for weights in rows):
            return None
        pairs = zip(self._passes.objective.terms, rows, strict=True)
        statistics, examples = self.estimator.statistics, observation.size.examples
        return ExampleWeights.of(pairs, trace, examples, statistics.places)


def draw_placements(assembly: Assembly) -> dict[str, Placement]:
    """Return the axis of the examples in the random numbers of each loss, by its name.

    The model runs twice if an output has examples and positions on one axis.
    """
    task, model = assembly.task, assembly.model
    places = {head.output: task.batch.places[head.output] for head in task.heads}
    folded = [output for output, place in places.items() if place.repeats > 1]
    orders: dict[str, bool | None] = {}
    if folded:
        orders = find_position_orders(model.graph, model.facts, folded, task.batch, task.inputs)
    placements = {}
    for loss, head in zip(task.objective.losses, task.heads, strict=True):
        axis, rank = places[head.output].axis, len(model.facts[head.output].shape)
        # Samples of classes have no class axis. An axis behind it is counted from the end.
        if axis >= head.loss.class_axis % rank:
            axis -= rank
        placements[loss.name] = Placement(axis, orders.get(head.output, False))
    return placements
