"""Multiplies whole curvature matrices by vectors over the parameters, by name."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kfac_engine._types import Array
from kfac_engine.curvature.products import (
    CurvatureMatrixVectorProductComputer as _Computer,
    TermWeight,
    Vectors,
)
from kfac_engine.engine.batch_parts import TracedParts
from kfac_engine.engine.batch_shards import BatchShards
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.model_arrays import ModelArrays
from kfac_engine.engine.validation import check_finite, checked_vectors
from kfac_engine.errors import InputError
from kfac_engine.runtime.trace import Trace


class CurvatureProducts:
    """Products of the Fisher, Gauss–Newton and Hessian matrix of one batch, without a matrix.

    The matrices are of the engine's loss under its reduction. They belong to all parameters
    together, have no block structure, and contain no damping. With the reduction ``"mean"`` the
    Fisher matrix is ``1/(n·t) Σ Jᵀ k F J`` over ``n`` examples with ``t`` positions each, where
    ``J`` is the Jacobian matrix of the values that the losses read, ``F`` the Fisher matrix of a
    loss with respect to them and ``k`` its coefficient.

    With several processes, the batch is the whole batch, of which each process has a shard in its
    trace. All processes make the same calls.

    A vector has one array for each parameter, in the shape and layout of the file, from any
    library. Parameters that are absent count as zeros. The first product on a batch of a new shape
    takes the time of building a session.

    Source: Martens 2014, arXiv:1412.1193, sections 8 and 9.

    Args:
        assembly: The model with its losses.
        arrays: Converts arrays of the model.
        traced: The batch. The Hessian matrix needs its targets.
        shards: The shards of the batch.
        examples: Number of examples of the batch, if the traces have a part of them.

    Attributes:
        totals: For each loss, the sum of the weights of its targets. If all are zero, products
            raise a ``NonFiniteError``.
    """

    def __init__(
        self,
        assembly: Assembly,
        arrays: ModelArrays,
        traced: TracedParts,
        shards: BatchShards,
        examples: int | None = None,
    ) -> None:
        self._assembly, self._model = assembly, assembly.model
        self._arrays, self._traced, self._shards = arrays, traced, shards
        objective = self._objective = assembly.task.objective

        traced.count(shards, partial(objective.observe, targets=False), examples)
        self.totals = traced.size.totals

    def multiply_fisher(self, vector: Mapping[str, Array]) -> dict[str, Array]:
        """Return the Fisher matrix times a vector.

        Args:
            vector: Arrays by parameter name.

        Returns:
            Arrays by parameter name, for all parameters.

        Raises:
            UnknownNameError: A name is not a parameter.
            ShapeError: An array has another shape than its parameter.
            NonFiniteError: An array or the product contains NaN or infinity.
            UnsupportedOpError: An operator cannot be differentiated twice.
        """
        return self._multiply(vector, _Computer.multiply_fisher)

    def multiply_ggn(self, vector: Mapping[str, Array]) -> dict[str, Array]:
        """Return the generalized Gauss–Newton matrix times a vector.

        It equals the Fisher matrix for losses on natural parameters, and exists for these only.

        Args:
            vector: Arrays by parameter name.

        Returns:
            Arrays by parameter name, for all parameters.

        Raises:
            UnsupportedError: A loss does not read natural parameters.
            KfacError: As for ``multiply_fisher``.
        """
        return self._multiply(vector, _Computer.multiply_ggn)

    def multiply_hessian(self, vector: Mapping[str, Array]) -> dict[str, Array]:
        """Return the Hessian matrix of the loss on the targets of the batch, times a vector.

        Args:
            vector: Arrays by parameter name.

        Returns:
            Arrays by parameter name, for all parameters.

        Raises:
            InputError: The trace has no targets.
            KfacError: As for ``multiply_fisher``.
        """
        return self._multiply(vector, _Computer.multiply_hessian)

    def quadratic_forms(self, *vectors: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return ``vᵢᵀ F vⱼ`` for all pairs of vectors, with ``F`` the Fisher matrix.

        Each vector takes one product with the Jacobian matrix and no backward pass. Inner products
        are sums in float64.

        Args:
            *vectors: Arrays by parameter name, each; all with the same names.

        Returns:
            ``(m, m)`` for ``m`` vectors, symmetric and positive semidefinite up to rounding.

        Raises:
            InputError: There is no vector, or the names differ.
            KfacError: As for ``multiply_fisher``.
        """
        if not vectors or any(vector.keys() != vectors[0].keys() for vector in vectors):
            raise InputError("give at least one vector, and all vectors with the same parameters.")
        with self._shards.computing("quadratic forms"):
            checked = [self._checked(vector) for vector in vectors]
            forms = np.zeros((len(checked), len(checked)))

            def add(trace: Trace) -> None:
                names = tuple(checked[0])
                computer = self._computer(trace, names)
                images = [
                    computer.multiply_fisher_factor_transpose([vector[name] for name in names])
                    for vector in checked
                ]
                forms[...] += [[_inner(one, other) for other in images] for one in images]

            self._traced.each(add)
            self._sum([forms])
        return forms

    # -- private ----------------------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._model.parameters)

    def _computer(self, trace: Trace, names: Sequence[str]) -> _Computer:
        return _Computer(self._assembly.collection, names, trace, self._term_weights(trace))

    def _term_weights(self, trace: Trace) -> list[TermWeight]:
        objective, size = self._objective, self._traced.size
        observed = objective.observe(trace, targets=False).terms
        # The products are computed from the measured examples: means, or estimates of the whole
        # sum.
        ratio = size.examples / self._traced.measured
        return [
            TermWeight(ratio * weight, seen.weights)
            for weight, seen in zip(objective.weights(size), observed, strict=True)
        ]

    def _checked(self, vector: Mapping[str, Array]) -> dict[str, Array]:
        backend = self._assembly.collection.backend
        return checked_vectors(self._model, backend, vector, "the vector of")

    def _multiply(
        self, vector: Mapping[str, Array], multiply: Callable[[_Computer, Vectors], Sequence[Array]]
    ) -> dict[str, Array]:
        with self._shards.computing("curvature product"):
            checked = self._checked(vector)
            arrays = [
                checked[name] if name in checked else np.zeros_like(parameter)
                for name, parameter in self._model.parameters.items()
            ]
            products: dict[str, Array] = {}

            def add(trace: Trace) -> None:
                with trace.explain():
                    product = multiply(self._computer(trace, self._names), arrays)
                    of_part = self._arrays.for_backend(dict(zip(self._names, product, strict=True)))
                    check_finite(of_part, self._model.memory_space, "the product of")
                for name, array in of_part.items():
                    products[name] = products[name] + array if name in products else array

            self._traced.each(add)
            if not self._shards.alone:
                products = {name: array.copy() for name, array in products.items()}
            self._sum(list(products.values()))
            check_finite(products, self._model.memory_space, "the product of")
        return self._model.to_file_layout(products)

    def _sum(self, arrays: Sequence[Array]) -> None:
        """Sum arrays over the shards of all processes, in place."""
        agreement = self._shards.agreement
        with agreement.operation("sum", begins=True), agreement.exchanging():
            self._shards.sum(arrays)


def _inner(one: Sequence[Array], other: Sequence[Array]) -> float:
    """Return the inner product of two vectors that have one array for each loss."""
    return sum(float((a * b).sum(dtype=np.float64)) for a, b in zip(one, other, strict=True))
