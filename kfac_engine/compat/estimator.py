"""Provides ``FisherEstimator`` with the signature and thunks of TensorFlow's K-FAC library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kfac_engine._types import Array, Params, Vector
from kfac_engine.compat.collection import get_default_layer_collection
from kfac_engine.curvature.block_products import Pairs, multiply_pairs
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.estimation_modes import Draws
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.curvature.sources import ExampleGradients, Scales, Trace
from kfac_engine.errors import UnsupportedError


@dataclass(slots=True)
class _Round:
    """One pass of the covariance thunks over a batch, in which all thunks see the same draws."""

    trace: Trace  # the batch
    generator: Mapping[str, object]  # state of the random generator from which each thunk draws
    # ``id`` of each factor that was updated; changed by the thunks.
    done: set[int] = field(default_factory=set)

    def includes(self, trace: Trace, factor: FisherFactor) -> bool:
        """Return whether an update belongs to this pass; a second update begins a new pass."""
        return trace is self.trace and id(factor) not in self.done


class FisherEstimator(Fisher):
    """Estimates the block-diagonal Fisher matrix of a collection and multiplies by it.

    Args:
        variables: The parameters that are registered with the collection.
        cov_ema_decay: Decay of the moving averages, in [0, 1].
        damping: λ; a multiple of the identity added to the matrix. Can be changed later.
        layer_collection: Layers and losses. The estimator closes the collection for further
            registrations; no other estimator can use it. None for the default collection.
        exps: Powers of the matrix to multiply by, besides 1.
        estimation_mode: A row of ``MODES``.
        colocate_gradients_with_ops: Whether the backward pass runs where the forward pass does;
            otherwise it runs on the CPU. ONNX Runtime runs both there, so the numbers are the same.
        name: For messages.
        compute_cholesky: Whether to store Cholesky factors, for ``multiply_cholesky``.
        compute_cholesky_inverse: Whether to store their inverses, for
            ``multiply_cholesky_inverse``.
        compute_params_stats: Whether ``params_stats`` is computed.
        batch_size: Size of a mini-batch over all towers, which every update must have; needed for
            ``params_stats``.
        seed: Seed of sampled targets and random signs.
        examples: Computes gradients of single examples: called with a trace, cotangents and names
            of parameters, it yields a mapping from name to gradient for each example. Without it,
            blocks of parameters without a layer use the gradient of the batch.

    Attributes:
        blocks: The blocks of the collection.
        factors: The factors of the collection.

    Raises:
        InputError: No loss is registered, the mode is unknown, the decay is outside [0, 1], or the
            batch size is missing.
        RegistrationError: The variables are not the registered ones, or the collection serves
            another estimator.
    """

    def __init__(  # noqa: PLR0913 (the specification's signature)
        self,
        variables: Sequence[str],
        cov_ema_decay: float,
        damping: float,
        layer_collection: LayerCollection | None,
        exps: Sequence[float] = (-1,),
        estimation_mode: str = "gradients",
        colocate_gradients_with_ops: bool = True,
        name: str = "FisherEstimator",
        compute_cholesky: bool = False,
        compute_cholesky_inverse: bool = False,
        compute_params_stats: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
        examples: ExampleGradients | None = None,
    ) -> None:
        self.colocate_gradients_with_ops = colocate_gradients_with_ops
        self._round: _Round | None = None
        super().__init__(
            variables,
            cov_ema_decay,
            damping,
            get_default_layer_collection() if layer_collection is None else layer_collection,
            exps,
            estimation_mode,
            name,
            compute_cholesky,
            compute_cholesky_inverse,
            compute_params_stats,
            batch_size,
            seed,
            examples,
        )

    def update_covariances(
        self,
        trace: Trace,
        draws: Draws | None = None,
        scales: Scales | None = None,
        should_decay: bool = True,
    ) -> None:
        """Average the statistics of one batch into every factor; all factors change or none.

        Args:
            trace: The evaluation of the batch.
            draws: As for ``accumulate``.
            scales: Likewise.
            should_decay: False for the plain mean of all batches.
        """
        decay = self.cov_ema_decay if should_decay else 1.0
        self.accumulate(trace, 1.0, draws, scales, decay=decay)

    @property
    def cov_update_thunks(self) -> list[Callable[..., None]]:
        """Callables that update one factor each, in the order of creation.

        Each receives ``(trace, should_decay=True)``, as ``update_covariances`` does. All callables
        see the same draws for the same trace.
        """
        return [partial(self._update_one, factor) for factor in self.factors]

    @property
    def inv_update_thunks(self) -> list[Callable[[], None]]:
        """Callables that refresh one factor each, in the order of creation.

        Raises:
            UnsupportedError: The averages are divided among the processes of a communicator.
        """
        if self.divided:
            raise UnsupportedError(
                "the processes of a communicator refresh factors together; call update_inverses() "
                "on all of them."
            )
        return [factor.refresh for factor in self.factors]

    def get_cov_vars(self) -> tuple[list[Array], ...]:
        """For each factor, its current average; a NotReadyError before the first update."""
        return tuple([factor.get_cov_var()] for factor in self.factors)

    def get_inv_vars(self) -> tuple[list[Array], ...]:
        """Return copies of the stored inverses and powers of each factor."""
        stored = (factor.arrays().items() for factor in self.factors)
        return tuple([array.copy() for name, array in s if name != "average"] for s in stored)

    def _update_one(self, factor: FisherFactor, trace: Trace, should_decay: bool = True) -> None:
        """Update one average; all factors of a pass over a batch see the same draws."""
        now = self.rng.bit_generator.state
        if self._round is None or not self._round.includes(trace, factor):
            self._round = _Round(trace, now)
        first = not self._round.done
        self.rng.bit_generator.state = self._round.generator
        try:
            decay = self.cov_ema_decay if should_decay else 1.0
            self.accumulate(trace, 1.0, factors=(factor,), decay=decay)
        finally:
            if not first:  # the first factor of the pass has advanced the generator
                self.rng.bit_generator.state = now
        self._round.done.add(id(factor))

    # -- products -------------------------------------------------------------------------------

    def multiply_matpower(self, exp: float, vecs_and_vars: Pairs) -> list[tuple[Vector, Params]]:
        """Return the product of a vector with the damped matrix to the power ``exp``.

        Args:
            exp: 1, or one of ``exps``.
            vecs_and_vars: Pairs of an array and its parameter, for all registered parameters.

        Returns:
            Pairs in the same order.

        Raises:
            InputError: A registered parameter is missing, or a given parameter is not registered.
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
