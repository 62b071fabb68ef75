"""The Fisher estimator: updates factors from a trace and multiplies by the estimated matrix."""

from collections.abc import Collection, Sequence
from statistics import fmean

import numpy as np

from kfac_engine._types import Array, Params, Vector
from kfac_engine.arguments import check_seed, flag, listed, number, texts, whole
from kfac_engine.curvature.block_products import Pairs, Product, matpower, multiply_pairs
from kfac_engine.curvature.blocks.base import GradsList, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.config import RelativeDamping, as_damping
from kfac_engine.curvature.covariance_updates import (
    CovarianceUpdates,
    ExampleGradients,
    Scales,
    Trace,
)
from kfac_engine.curvature.estimation_modes import MODES, Draws, MatType
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.eigenbasis import OverRanks
from kfac_engine.curvature.factors.measurement import LetGo
from kfac_engine.curvature.factors.refresh import Division
from kfac_engine.curvature.refreshes import Refreshes
from kfac_engine.distributed.shards import RowRange
from kfac_engine.errors import InputError, UnknownNameError, UnsupportedError, suggestion
from kfac_engine.sealed import Sealed


def check_options(
    variables: object, cov_ema_decay: float, exps: object, estimation_mode: object
) -> None:
    """Refuse options of a wrong type or outside their range, with an InputError."""
    if not isinstance(estimation_mode, str) or estimation_mode not in MODES:
        raise InputError(
            f"unknown estimation_mode '{estimation_mode}'{suggestion(estimation_mode, MODES)}; "
            f"choose one of: {', '.join(MODES)}."
        )
    texts("variables", variables, "['w', 'b']")
    for exp in listed("exps", exps, "(-1,)"):
        number("each of exps", exp)
    number("cov_ema_decay", cov_ema_decay)
    if not 0 <= cov_ema_decay <= 1:
        raise InputError(f"cov_ema_decay must lie in [0, 1], got {cov_ema_decay}.")


def check_counts(seed: object, batch_size: object, needs_batch_size: bool) -> None:
    """Refuse a negative seed, and a batch size that is missing or below one, with an InputError."""
    if flag("compute_params_stats", needs_batch_size) and batch_size is None:
        raise InputError("Batch size needs to be passed in when compute_params_stats is True.")
    check_seed(seed)
    if batch_size is not None:
        whole("batch_size", batch_size, least=1)


class FisherEstimator(Sealed):
    """Estimates the block-diagonal Fisher matrix of a collection and multiplies by it.

    Args:
        variables: The parameters that are registered with the collection.
        cov_ema_decay: Decay of the moving averages, in [0, 1].
        damping: λ; a multiple of the identity added to the matrix. Can be changed later.
        layer_collection: Layers and losses. The estimator closes the collection for further
            registrations; no other estimator can use it.
        exps: Powers of the matrix to multiply by, besides 1.
        estimation_mode: A row of ``MODES``.
        name: For messages.
        compute_cholesky: Whether to store Cholesky factors, for ``multiply_cholesky``.
        compute_cholesky_inverse: Whether to store their inverses, for
            ``multiply_cholesky_inverse``.
        compute_params_stats: Whether ``params_stats`` is computed.
        batch_size: Size of a mini-batch over all parts, which every update must have; needed for
            ``params_stats``.
        seed: Seed of sampled targets and random signs.
        examples: Computes gradients of single examples: called with a trace, cotangents and names
            of parameters, it yields a mapping from name to gradient for each example. Blocks of
            parameters without a layer then average over examples. Without it they use the
            gradient of the batch.

    Attributes:
        blocks: The blocks of the collection.
        factors: The factors of the collection.
        differentiated: Values with respect to which updates differentiate the losses of the whole
            batch.
        differentiated_alone: Values with respect to which updates differentiate the losses of each
            example.
        reads_gradients: Whether statistics read gradients of the training loss; see
            ``propagated``.
        statistics: Measures batches and updates the averages.
        refreshes: Refreshes of single factors, by key, with their costs.

    Raises:
        InputError: No loss is registered, the mode is unknown, the decay is outside [0, 1], or the
            batch size is missing.
        RegistrationError: The variables are not the registered ones, or the collection serves
            another estimator.
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
        self.variables = tuple(variables)
        self.damping = damping
        self.name = name
        self.cov_ema_decay = cov_ema_decay
        self._collection = layer_collection
        self._mode = MODES[estimation_mode]
        self._exps = tuple(map(float, exps))
        self._options = {
            "compute_cholesky": compute_cholesky,
            "compute_cholesky_inverse": compute_cholesky_inverse,
        }
        self.refreshes = Refreshes(layer_collection)
        layer_collection.check_registration(self.variables)
        layer_collection.finalize()
        self.blocks = layer_collection.get_blocks()
        gradients = self._instantiate_factors(exps)
        self.factors = layer_collection.get_factors()
        generic = (block for block in self.blocks if block.of_parameters and examples is not None)
        self.statistics = CovarianceUpdates(
            self._mode,
            layer_collection.registered_losses,
            layer_collection.backend,
            np.random.default_rng(seed),
            self.factors,
            tuple(factor for block in generic for factor in block.factors),
            gradients,
            tuple(rows for block in self.blocks for rows in block.layer_rows()),
            examples,
            self.variables if compute_params_stats else (),
            batch_size,
            name,
        )
        self.differentiated, self.differentiated_alone = self.statistics.read_values()
        self.reads_gradients = self._mode.needs_targets and not self.statistics.variables
        self._sealed = True

    @property
    def damping(self) -> float:
        """The multiple λ of the identity, which each refresh reads; can be set.

        A ``RelativeDamping`` is a multiple of the mean eigenvalue of each block.
        """
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        number("damping", value)
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

    @property
    def rows(self) -> RowRange | None:
        """The rows of a batch that this process has; None for the whole batch. Can be set.

        Each of several processes sets its rows before an update by its part of a batch. All draw
        from equal generators, and each receives the sampled targets, random signs and sampled
        statistics that one process draws for these rows. Losses have one part.
        """
        return self.statistics.rows

    @rows.setter
    def rows(self, value: RowRange | None) -> None:
        if not isinstance(value, RowRange | None):
            raise InputError(f"rows must be the RowRange of a batch or None, got {value!r}.")
        if value is not None and any(len(loss.parts) > 1 for loss in self.statistics.losses):
            raise UnsupportedError("a batch in parts cannot be divided over ranks as well.")
        self.statistics.rows = value
        for factor in self.factors:
            factor.set_rows(value)

    def divide(
        self, division: Division, over_ranks: OverRanks, linear: Collection[FisherFactor]
    ) -> None:
        """Divide updates and refreshes among several processes, for the rest of the run.

        Args:
            division: Divides the refreshes.
            over_ranks: Returns the means of measurements over all processes.
            linear: Factors whose averages are summed over the processes, not their measurements.
        """
        self.statistics.divide(over_ranks, linear)
        self.refreshes.division = division

    @property
    def params_stats(self) -> list[Array]:
        """``Σ_sources gradient / batch_size`` of the last update, for each variable."""
        return self.statistics.params_stats

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
        return self.statistics.rng

    # -- statistics -----------------------------------------------------------------------------

    def update_covariances(
        self,
        trace: Trace,
        draws: Draws | None = None,
        scales: Scales | None = None,
        should_decay: bool = True,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
    ) -> None:
        """Average the statistics of one batch into every factor; all factors change or none.

        Args:
            trace: The evaluation of the batch.
            draws: Draws that replace random ones, by loss name.
            scales: Factors of the cotangents, by loss input; ``√w`` multiplies the Fisher matrix of
                the loss by ``w``.
            should_decay: False for the plain mean of all batches.
            release: Called with names of values after the last factor has read them. Modes with
                several sources read all values to the end and do not call it.
            propagated: Gradients of all ``differentiated`` values, scales included, if the caller
                has computed them and the estimator ``reads_gradients``; the mapping is emptied.

        Raises:
            KfacError: The batch does not fit the losses or factors, or has NaN or infinity. The
                estimator and its random generator have not changed.
        """
        decay = self.cov_ema_decay if should_decay else 1.0
        self.statistics.update(decay, trace, draws, scales, release, propagated)

    def accumulate(
        self,
        trace: Trace,
        weight: float,
        draws: Draws | None = None,
        scales: Scales | None = None,
        factors: Sequence[FisherFactor] | None = None,
    ) -> None:
        """Add the statistics of one batch to plain means, without decay.

        Args:
            trace: The evaluation of the batch.
            weight: Weight of the batch in the means, such as its number of examples.
            draws: Draws that replace random ones, by loss name.
            scales: As for ``update_covariances``.
            factors: Factors to update; None for all. Errors are as for ``update_covariances``.
        """
        chosen = self.factors if factors is None else tuple(factors)
        self.statistics.add(chosen, trace, 1.0, weight, draws, scales)

    def update_inverses(self) -> None:
        """Recompute every registered power from the current averages; a collective call."""
        with self.refreshes.division.refreshing():
            self.refreshes.begin()()

    def wait(self) -> None:
        """Complete all refreshes that were begun."""
        for factor in self.factors:
            factor.wait()

    # -- products -------------------------------------------------------------------------------

    def multiply_matpower(self, exp: float, vecs_and_vars: Pairs) -> list[tuple[Vector, Params]]:
        """Return the damped matrix to the power ``exp`` times a vector.

        Args:
            exp: 1, or one of ``exps``.
            vecs_and_vars: Pairs of an array and its parameter, for all registered parameters.

        Returns:
            Pairs in the same order.

        Raises:
            InputError: A registered parameter is missing, or one is not registered.
            UnknownNameError: The power is not in ``exps``.
        """
        return multiply_pairs(self._collection, vecs_and_vars, self.matpower_product(exp))

    def multiply(self, vecs_and_vars: Pairs) -> list[tuple[Vector, Params]]:
        """Return the damped matrix of the current averages times a vector."""
        return self.multiply_matpower(1, vecs_and_vars)

    def multiply_inverse(self, vecs_and_vars: Pairs) -> list[tuple[Vector, Params]]:
        """Return the inverse of the damped matrix, as of the last refresh, times a vector."""
        return self.multiply_matpower(-1, vecs_and_vars)

    def multiply_cholesky(
        self, vecs_and_vars: Pairs, transpose: bool = False
    ) -> list[tuple[Vector, Params]]:
        """Return ``B v`` with the Cholesky factor ``B`` of the damped matrix, or ``Bᵀ v``."""
        product = self.cholesky_product(transpose)
        return multiply_pairs(self._collection, vecs_and_vars, product)

    def multiply_cholesky_inverse(
        self, vecs_and_vars: Pairs, transpose: bool = False
    ) -> list[tuple[Vector, Params]]:
        """Return ``B⁻¹ v`` with the Cholesky factor ``B`` of the damped matrix, or ``B⁻ᵀ v``."""
        product = self.cholesky_inverse_product(transpose)
        return multiply_pairs(self._collection, vecs_and_vars, product)

    def matpower_product(self, exp: float) -> Product:
        """Return the product of a block with a vector for a power; see ``matpower``.

        ``UnknownNameError`` is raised if the power is neither 1 nor in ``exps``.
        """
        if float(exp) not in (1.0, *self._exps):
            raise UnknownNameError(
                f"power {exp} was not registered with {self.name}; add it to exps={self._exps}."
            )
        return matpower(exp)

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
