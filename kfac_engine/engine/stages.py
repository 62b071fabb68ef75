"""The stages of a step: evaluate, differentiate, observe, refresh, multiply."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.batched_products import Product
from kfac_engine.curvature.estimator import FisherEstimator
from kfac_engine.engine.backward import BackwardResult, run_backward
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.divergence import LossHistory
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.rollback import quiet
from kfac_engine.engine.validation import check_batch_size, check_finite, check_products
from kfac_engine.layers.parameter_slices import join, split
from kfac_engine.losses.objective import Targets
from kfac_engine.runtime.trace import Trace


class Stages:
    """The stages of a step of one engine.

    Args:
        assembly: The model, its losses and its layers.
        estimator: Statistics and products over the collection.
        arrays: Converts arrays of the model.
        history: Receives the losses and explains errors of a diverging run.
    """

    def __init__(
        self,
        assembly: Assembly,
        estimator: FisherEstimator,
        arrays: ModelArrays,
        history: LossHistory,
    ) -> None:
        self._model, self._task = assembly.model, assembly.task
        self._slices = assembly.found.parts
        self._backend = assembly.collection.backend
        self._estimator, self._arrays, self._history = estimator, arrays, history

    def trace(self, inputs: Mapping[str, Array], targets: Targets) -> Trace:
        """Evaluate the model on a batch; see ``Engine.trace``."""
        check_batch_size(self._task.batch, inputs)
        if isinstance(inputs, Mapping):
            inputs = self._arrays.for_model(inputs)
        return self._model.run(inputs, self._task.objective.named_targets(targets))

    def differentiate(self, trace: Trace, outputs: Sequence[str] | None = None) -> BackwardResult:
        """Compute loss and gradients of a batch, in arrays of the backend.

        Args:
            trace: The batch.
            outputs: As for ``run_backward``.

        Returns:
            Loss and gradients.

        Raises:
            NonFiniteError: The loss or a gradient is not finite.
        """
        with quiet(), self._history.explain():
            backward = run_backward(
                trace, self._task.objective, tuple(self._model.parameters), outputs
            )
            check_finite(backward.gradients, self._model.memory_space)
        self._history.add(backward.loss)
        return replace(backward, gradients=self._arrays.for_backend(backward.gradients))

    def observe(self, trace: Trace, gradients: dict[str, Array] | None) -> None:
        """Average the statistics of a batch into all factors.

        Args:
            trace: The batch; values that no factor reads any more are released.
            gradients: ``BackwardResult.outputs``; None where the statistics take a backward pass.

        Raises:
            NonFiniteError: The batch yields NaN or infinity; no factor has changed.
        """
        with self._history.explain():
            self._estimator.update_covariances(
                trace,
                scales=self._task.objective.fisher_scales(trace),
                release=trace.release,
                propagated=gradients,
            )

    def multiply(
        self, vectors: Mapping[str, Array], product: Product, rest: float, exp: float
    ) -> dict[str, Array]:
        """Multiply vectors over the parameters by the blocks.

        Args:
            vectors: Parameter to array of the backend, in the parameter's shape.
            product: A product of ``estimator.products``.
            rest: Factor of the entries that no layer reads: they have no curvature, so that the
                product is that of the damping alone.
            exp: Power of the Fisher matrix, for messages.

        Returns:
            Parameter to product, in the layout and element types of the file.

        Raises:
            InputError: A block has vectors for some of its parameters only.
            NonFiniteError: A product overflows.
        """
        with quiet():
            blocks = self._estimator.products.multiply(split(self._slices, vectors), product)
            products = {n: join(self._slices[n], blocks, v, rest) for n, v in vectors.items()}
        check_products(products, self._backend, exp)
        return self._model.to_file_layout(products)
