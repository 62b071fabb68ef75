"""Measures, commits, refreshes and multiplies the block-diagonal Fisher matrix of a collection.

``Engine.step`` and ``KfacOptimizer.step`` are made of these four. A batch is measured; its
statistics are committed to the averages; the inverses that a planner names are refreshed; vectors
are multiplied by powers of the blocks. The processes of a communicator make the same calls, each
with its shard of a batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np

from kfac_engine._types import Array, Rows
from kfac_engine.arguments import (
    check_bool,
    check_choice,
    check_int,
    check_list,
    check_number,
    check_seed,
    check_texts,
)
from kfac_engine.curvature import block_products, refreshes
from kfac_engine.curvature.block_products import Product, check_products
from kfac_engine.curvature.blocks.base import GradsList, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.config import RelativeDamping, as_damping
from kfac_engine.curvature.estimation_modes import MODES, Draws, MatType
from kfac_engine.curvature.factors.base import FisherFactor, begin_refresh
from kfac_engine.curvature.factors.eigenbasis import begin_bases, without_basis
from kfac_engine.curvature.factors.measurement import LetGo
from kfac_engine.curvature.factors.readers import Measurements, Readers, Update
from kfac_engine.curvature.factors.refresh import UNDIVIDED, Division
from kfac_engine.curvature.schedule import Due, GrowingPlanner, Planner, Schedule, Work
from kfac_engine.curvature.sources import ExampleGradients, MeasuredBatch, Scales, Sources, Trace
from kfac_engine.distributed.shards import RowRange
from kfac_engine.errors import InputError, UnknownNameError, UnsupportedError
from kfac_engine.layers.parameter_slices import ParameterSlice, is_whole, join, split
from kfac_engine.sealed import Sealed


def check_options(
    variables: object, cov_ema_decay: float, exps: object, estimation_mode: object
) -> None:
    """Refuse options of a wrong type or outside their range, with an InputError."""
    check_choice("estimation_mode", estimation_mode, MODES)
    check_texts("variables", variables, "['w', 'b']")
    for exp in check_list("exps", exps, "(-1,)"):
        check_number("each of exps", exp)
    check_number("cov_ema_decay", cov_ema_decay, "[0, 1]")


def check_counts(seed: object, batch_size: object, needs_batch_size: bool) -> None:
    """Refuse a negative seed, and a batch size that is missing or below one, with an InputError."""
    if check_bool("compute_params_stats", needs_batch_size) and batch_size is None:
        raise InputError("Batch size needs to be passed in when compute_params_stats is True.")
    check_seed(seed)
    if batch_size is not None:
        check_int("batch_size", batch_size, least=1)


class Fisher(Sealed):
    """Averages, inverses and products of the blocks of a collection, over one process or several.

    Arguments and errors are those of ``compat.FisherEstimator``. The collection is closed for
    further registrations.

    Attributes:
        sources: Computes the values of a batch that factors read.
        differentiated: Values with respect to which updates differentiate the losses of the whole
            batch.
        differentiated_alone: Values with respect to which updates differentiate the losses of each
            example.
        reads_gradients: Whether statistics read gradients of the training loss; see
            ``propagated``.
        params_stats: ``Σ_sources gradient / batch_size`` of the last update, for each variable.
        division: Divides the averages, the refreshes and the products among processes.
        slices: The slices of each parameter of a model, whose blocks have slices.
        to_file: Converts products by parameter to the layout of a file.
    """

    def __init__(  # noqa: PLR0913 (the options of an estimate)
        self,
        variables: Sequence[str],
        cov_ema_decay: float,
        damping: float,
        layer_collection: LayerCollection,
        exps: Sequence[float] = (-1,),
        estimation_mode: str = "gradients",
        name: str = "FisherEstimator",
        compute_cholesky: bool = False,
        compute_cholesky_inverse: bool = False,
        compute_params_stats: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
        examples: ExampleGradients | None = None,
    ) -> None:
        check_options(variables, cov_ema_decay, exps, estimation_mode)
        check_counts(seed, batch_size, compute_params_stats)
        if not isinstance(layer_collection, LayerCollection):
            raise InputError(f"a LayerCollection is needed, got {layer_collection!r}.")
        self.variables, self.name = tuple(variables), name
        self.damping, self.cov_ema_decay = damping, cov_ema_decay
        self._collection, self._batch_size = layer_collection, batch_size
        self._mode, self._exps = MODES[estimation_mode], tuple(map(float, exps))
        self._options = {
            "compute_cholesky": compute_cholesky,
            "compute_cholesky_inverse": compute_cholesky_inverse,
        }
        layer_collection.check_registration(self.variables)
        layer_collection.finalize()
        self.blocks = layer_collection.get_blocks()
        gradients = self._instantiate_factors(exps)
        self.factors = layer_collection.get_factors()
        generic = (block for block in self.blocks if block.of_parameters and examples is not None)
        self._alone = tuple(factor for block in generic for factor in block.factors)
        self.sources = Sources(
            self._mode,
            layer_collection.registered_losses,
            layer_collection.backend,
            np.random.default_rng(seed),
            gradients,
            tuple(rows for block in self.blocks for rows in block.layer_rows()),
            examples,
            self.variables if compute_params_stats else (),
        )
        alone = tuple(gradients[name] for f in self._alone for name in f.names())
        self.differentiated = tuple(v for v in dict.fromkeys(gradients.values()) if v not in alone)
        self.differentiated_alone = alone
        self.reads_gradients = self._mode.needs_targets and not self.sources.variables
        self.params_stats: list[Array] = []
        self.division: Division = UNDIVIDED
        # Factors that measure a whole batch straight into their averages; None for all.
        self._straight: frozenset[FisherFactor] | None = None
        self._readers: dict[tuple[FisherFactor, ...], Readers] = {}
        self._whole_batch = self._readers_of(f for f in self.factors if f not in self._alone)
        self.slices: Mapping[str, Sequence[ParameterSlice]] = {}
        self.to_file: Callable[[Mapping[str, Array]], dict[str, Array]] = dict
        self._sealed = True

    @property
    def damping(self) -> float:
        """The multiple λ of the identity, which each refresh reads; can be set.

        A ``RelativeDamping`` is a multiple of the mean eigenvalue of each block.
        """
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        check_number("damping", value)
        if value < 0:
            raise InputError(f"damping must not be negative, got {value}.")
        self._damping = as_damping(value)

    @property
    def identity_damping(self) -> float:
        """λ of a parameter without a block; for a relative damping, λ of an average block."""
        if not isinstance(self.damping, RelativeDamping):
            return self.damping
        return self.damping.of(fmean(block.mean_eigenvalue() for block in self.blocks))

    @property
    def least_damping(self) -> float:
        """The smallest multiple of the identity in any block; 0 while it is not known."""
        if not isinstance(self.damping, RelativeDamping):
            return self.damping
        if not all(factor.average.weight > 0 for factor in self.factors):
            return 0.0
        return self.damping.of(min(block.mean_eigenvalue() for block in self.blocks))

    def set_rows(self, value: RowRange | None, *of_losses: RowRange) -> None:
        """Set the rows of a batch that this process has; None for the whole batch.

        Each of several processes sets its rows before an update by its part of a batch. All draw
        from equal generators, and each receives the sampled targets, random signs and sampled
        statistics that one process draws for these rows. Losses have one part. ``of_losses`` are
        the rows among the examples of each loss, if their numbers differ.
        """
        if not isinstance(value, RowRange | None):
            raise InputError(f"rows must be the RowRange of a batch or None, got {value!r}.")
        names = [loss.name for loss in self.sources.losses]
        if value is not None and len({*names}) < len(names):
            raise UnsupportedError("a batch in parts cannot be divided over ranks as well.")
        self.sources.rows, self.sources.rows_of = value, dict(zip(names, of_losses, strict=False))
        for factor in self.factors:
            factor.set_rows(value)

    @property
    def sums_sources(self) -> bool:
        """Whether each update sums several sources before it changes an average."""
        return not self._mode.one_source

    @property
    def mat_type(self) -> MatType:
        """Kind of the curvature matrix that the estimation mode estimates."""
        return self._mode.mat_type

    @property
    def rng(self) -> np.random.Generator:
        """Generator of sampled targets and random signs."""
        return self.sources.rng

    def divide(self, division: Division, linear: Iterable[FisherFactor]) -> None:
        """Divide updates, refreshes and products among processes, for the rest of the run.

        The averages of ``linear`` factors are summed over the processes, not their measurements.
        """
        self.division, self._straight = division, frozenset(linear)

    @property
    def divided(self) -> bool:
        """Whether the batches are divided among processes."""
        return self._straight is not None

    # -- measure ----------------------------------------------------------------------------------

    @property
    def outputs(self) -> Sequence[str] | None:
        """Values whose gradients of the training loss ``measure`` reads; None in most modes."""
        return self.differentiated if self.reads_gradients else None

    def measure(
        self,
        batch: MeasuredBatch,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
        *,
        factors: Sequence[FisherFactor] | None = None,
        by_example: bool = True,
    ) -> Update:
        """Measure one batch; averages do not change before ``commit``.

        Args:
            batch: The batch.
            release: Called with names of values after the last factor has read them. Modes with
                several sources read all values to the end and do not call it.
            propagated: Gradients of all ``differentiated`` values, scales included, if the caller
                has computed them and ``reads_gradients``; the mapping is emptied.
            factors: Factors to measure; None for all.
            by_example: Whether factors that read gradients of single examples are measured.

        Raises:
            KfacError: The batch does not fit the losses or factors, or has NaN or infinity.
        """
        readers, alone = self._chosen(factors, by_example=by_example)
        stats: dict[str, Array] = {}
        singles = self._measure_examples(alone, batch) if alone else {}
        if propagated is None:
            values = self.sources.of_batch(readers, batch, stats)
        else:
            values = self.sources.given(readers, batch, propagated)
        if self._mode.one_source:
            over_ranks = self.division.over_ranks
            update = readers.measure(next(values), release, self._straight, over_ranks)
        else:
            if parts := readers.parts_of_bases:
                # All sources are propagated once more before the first update of EKFAC.
                bits, moments = self.rng.bit_generator, Measurements()
                before: Mapping[str, Any] = bits.state
                self.measure_part(moments, batch, parts)
                self.set_bases(moments)
                bits.state = before
            update = Update(readers.measure_sum(values, joined=self.divided))
        self.params_stats = [total / (self._batch_size or 1) for total in stats.values()]
        if singles:
            update = replace(update, measured={**update.measured, **singles})
        return replace(update, left_out=self._left_out(batch.absent)) if batch.absent else update

    def measure_part(
        self,
        before: Measurements,
        part: MeasuredBatch,
        bases: Sequence[FisherFactor] = (),
        *,
        by_example: bool = True,
    ) -> None:
        """Measure a part of a batch, and join it to the parts before in ``before``.

        If ``bases`` has the factors of ``parts_of_bases``, only these are measured. No average
        changes. Errors are as for ``measure``.
        """
        readers, alone = self._chosen(bases or None, by_example=by_example and not bases)
        measured = self._measure_examples(alone, part) if alone else {}
        values = self.sources.of_batch(readers, part, {})
        if self._mode.one_source:
            readers.add_part(next(values), before)
        else:
            measured |= readers.measure_sum(values, joined=True)
        for factor, measurement in measured.items():
            first = before.get(factor)
            before[factor] = measurement if first is None else factor.join(first, measurement)

    @property
    def parts_of_bases(self) -> tuple[FisherFactor, ...]:
        """The factors whose first batch sets the bases of EKFAC; none after that batch."""
        return self._whole_batch.parts_of_bases

    def set_bases(self, measured: Measurements) -> None:
        """Set the first bases of EKFAC from measurements of ``parts_of_bases``."""
        known = measured.keys()
        new = [f for f in without_basis(self.factors) if known >= {*f.kronecker_factors}]
        begin_bases(new, self.division.over_ranks(measured))

    def joined(self, measured: Measurements, absent: frozenset[int] = frozenset()) -> Update:
        """Return the update by the batch whose parts have been measured.

        ``absent`` is that of the whole batch.
        """
        return Update(measured, left_out=self._left_out(absent))

    # -- commit -----------------------------------------------------------------------------------

    def commit(self, update: Update, *, decay: float | None = None) -> None:
        """Update the averages by a measured batch, of which each process has its shard.

        A ``decay`` of None is ``cov_ema_decay``.
        """
        self.division.commit(update, self.cov_ema_decay if decay is None else decay)

    def accumulate(
        self,
        trace: Trace,
        weight: float,
        draws: Draws | None = None,
        scales: Scales | None = None,
        factors: Sequence[FisherFactor] | None = None,
        decay: float = 1.0,
    ) -> None:
        """Add the statistics of one batch to averages, by default to plain means without decay.

        All factors change or none.

        Args:
            trace: The evaluation of the batch.
            weight: Weight of the batch in the means, such as its number of examples.
            draws: Draws that replace random ones, by loss name.
            scales: Factors of the cotangents, by loss input; ``√w`` multiplies the Fisher matrix of
                the loss by ``w``.
            factors: Factors to update; None for all.
            decay: Weight of the old averages, in [0, 1].

        Raises:
            KfacError: The batch does not fit the losses or factors, or has NaN or infinity. The
                estimator and its random generator have not changed.
        """
        self._require_whole_batches()
        with self._restored_on_error():
            batch = self.sources.batch_of(trace, draws, scales)
            self.measure(batch, factors=factors).commit(decay, weight)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores generator and element types after an error.

        The draws of a refused batch are not used, and its numbers need no wider averages.
        """
        bits = self.sources.rng.bit_generator
        before: Mapping[str, Any] = bits.state
        types = [*map(attrgetter("narrowest"), self.factors)]

        def restore() -> None:
            bits.state = before
            for factor, narrowest in zip(self.factors, types, strict=True):
                factor.narrowest = narrowest

        return restore

    # -- refresh ----------------------------------------------------------------------------------

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Every refresh with its cost, for a ``Planner``; the shapes must be known."""
        return refreshes.works(self._collection, self._refreshed, self.division)

    def planner(self, schedule: Schedule) -> Planner:
        """Return a planner for ``refresh``, with the period of a schedule."""
        return Planner(self.works, schedule)

    def growing_planner(self, schedule: Schedule) -> GrowingPlanner:
        """Return a planner for ``refresh``, with periods that grow."""

        def least_period(examples: int) -> int:
            rates = refreshes.early_rates(self._collection, self.works)
            return int(refreshes.least_period(rates, examples))

        cheap = refreshes.are_cheap(self.works)
        return GrowingPlanner(self.works, schedule, None if cheap else least_period)

    def refresh(self, due: Due, *, overlap: bool = False) -> None:
        """Refresh the factors that are due; with ``overlap`` only begin to, unless in call 0.

        Errors are as for ``begin_refresh``.
        """
        if not due.refreshes:
            return
        finish = self._begin(due.refreshes)
        if not overlap or due.counter == 0:
            finish()

    def update_inverses(self) -> None:
        """Recompute every registered power from the current averages; a collective call."""
        with self.division.refreshing():
            self._begin(self._refreshed)()

    def wait(self) -> None:
        """Complete all refreshes that were begun."""
        for factor in self.factors:
            factor.wait()

    # -- multiply ---------------------------------------------------------------------------------

    def multiply_power(
        self, vectors: Mapping[str, Array | Rows], exp: float, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Multiply vectors by a power of the damped matrix; see ``multiply_blocks``."""
        return self.multiply_blocks(vectors, self.matpower_product(exp), exp, names)

    def multiply_blocks(
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
            names: All parameters, if ``vectors`` has only those that this process owns.

        Returns:
            Products by parameter, in the layout of the file.
        """
        if exp == 1:
            self.division.complete()
        # The damping of entries without a layer may be the mean over the blocks, which takes time.
        whole = self._whole_parameters.issuperset(vectors)
        rest = 1.0 if whole else self.identity_damping**exp
        with self.division.multiplying():
            owned = self.division.owned(vectors)
            pieces = owned if whole else split(self.slices, owned)
            products = block_products.multiply(self._collection, pieces, product)
            if not whole:
                products = {n: join(self.slices[n], products, v, rest) for n, v in owned.items()}
            check_products(products, self._collection.backend, exp)
        return self.to_file(self.division.share(products, tuple(names or vectors)))

    def matpower_product(self, exp: float) -> Product:
        """Return the product of a block with a vector for a power; see ``multiply_power``.

        ``UnknownNameError`` is raised if the power is neither 1 nor in ``exps``.
        """
        if float(exp) not in (1.0, *self._exps):
            raise UnknownNameError(
                f"power {exp} was not registered with {self.name}; add it to exps={self._exps}."
            )
        return partial(block_products.multiply_power, exp)

    def cholesky_product(self, transpose: bool = False) -> Product:
        """Return the product with the Cholesky factor ``B`` of the damped matrix, or with ``Bᵀ``.

        ``UnknownNameError`` is raised if the option ``compute_cholesky`` is not set.
        """
        self._require("compute_cholesky")
        return lambda block, vector: block.multiply_cholesky(vector, transpose)

    def cholesky_inverse_product(self, transpose: bool = False) -> Product:
        """Return the product with ``B⁻¹``, or with its transpose.

        ``UnknownNameError`` is raised if the option ``compute_cholesky_inverse`` is not set.
        """
        self._require("compute_cholesky_inverse")
        return lambda block, vector: block.multiply_cholesky_inverse(vector, transpose)

    # -- private ----------------------------------------------------------------------------------

    @cached_property
    def _refreshed(self) -> dict[str, FisherFactor]:
        """The factors that store inverses or powers, by their position in ``factors``, as text."""
        return {str(i): factor for i, factor in enumerate(self.factors) if factor.has_inverses}

    @cached_property
    def _whole_parameters(self) -> frozenset[str]:
        return frozenset(name for name, slices in self.slices.items() if is_whole(slices))

    def _begin(self, keys: Iterable[str]) -> Callable[[], None]:
        """Begin to refresh factors; the returned function waits for the results and stores them."""
        factors = [*map(self._refreshed.__getitem__, keys)]
        return begin_refresh(factors, self._collection.backend, self.division)

    def _chosen(
        self, factors: Sequence[FisherFactor] | None, *, by_example: bool
    ) -> tuple[Readers, tuple[FisherFactor, ...]]:
        """Divide factors into readers of a whole batch and readers of single examples."""
        if factors is None:
            return self._whole_batch, self._alone if by_example else ()
        alone = tuple(factor for factor in factors if factor in self._alone)
        readers = self._readers_of(factor for factor in factors if factor not in alone)
        return readers, alone if by_example else ()

    def _readers_of(self, factors: Iterable[FisherFactor]) -> Readers:
        key = tuple(factors)
        if key not in self._readers:
            backend, whose = self._collection.backend, f"the batch_size of {self.name}"
            gradients = self.sources.gradients
            self._readers[key] = Readers(key, backend, gradients, self._batch_size, whose)
        return self._readers[key]

    def _measure_examples(
        self, factors: tuple[FisherFactor, ...], batch: MeasuredBatch
    ) -> Measurements:
        """Measure factors that read single examples; averages and generator do not change."""
        measured: Measurements = {}
        generator = self.rng.bit_generator.state
        readers = self._readers_of(factors)
        try:
            for values in self.sources.of_examples(readers, batch):
                sizes = {factor: factor.check(values) for factor in factors}
                measured = {
                    factor: factor.add_source(measured[factor], values)
                    if factor in measured
                    else factor.measure(values, size)
                    for factor, size in sizes.items()
                }
        finally:
            self.rng.bit_generator.state = generator
        return measured

    def _left_out(self, absent: frozenset[int]) -> frozenset[FisherFactor]:
        """Return the factors of layers on which only ``absent`` losses depend.

        Their averages do not change: such a batch has no gradient at these layers.
        """
        if not absent:
            return frozenset()
        numbers = self.sources.losses_of(self.factors)
        return frozenset(f for f, its in numbers.items() if its and its <= absent)

    @contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Return a context that restores a ``snapshot`` after an error."""
        restore = self.snapshot()
        try:
            yield
        except BaseException:
            restore()
            raise

    def _require_whole_batches(self) -> None:
        """Refuse an update of one process if batches are divided among several processes."""
        if self.divided:
            raise UnsupportedError(
                f"the batches of {self.name} are divided among several processes; call "
                f"engine.update_statistics(trace) in all of them, which joins the statistics."
            )

    def _require(self, option: str) -> None:
        if not self._options[option]:
            raise UnknownNameError(
                f"the product was not registered with {self.name}; make it with {option}=True."
            )

    def _instantiate_factors(self, exps: Sequence[float]) -> dict[str, str]:
        """Create the factors; return the differentiated value of each gradient that they read."""
        gradients: dict[str, str] = {}
        for block in self.blocks:
            named: list[str | tuple[str, ...]] = []
            for part in block.tensors_to_compute_grads():
                names = tuple(f"∂{value}" for value in uses(part))
                gradients |= dict(zip(names, uses(part), strict=True))
                named.append(names if len(names) > 1 else names[0])
            # All sources use the same names, one after the other, so that a factor has one source.
            grads_list: GradsList = [tuple(named)] if block.of_parameters else [named]
            block.instantiate_factors(grads_list, lambda: self.damping)
            for exp in exps:
                block.register_matpower(exp)
            if self._options["compute_cholesky"]:
                block.register_cholesky()
            if self._options["compute_cholesky_inverse"]:
                block.register_cholesky_inverse()
        return gradients
