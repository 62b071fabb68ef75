"""Provides the whole curvature matrix of a data set as a linear operator of SciPy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Float, ParameterVector
from kfac_engine.backend.namespace import on_host
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.datasets.forms import Data, batches_of
from kfac_engine.engine.build import Assembly, build
from kfac_engine.engine.curvature_products import CurvatureProducts
from kfac_engine.engine.memory import require_gradient
from kfac_engine.engine.options import EngineOptions, check_names
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import InputError
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.objective import BatchSize
from kfac_engine.registry import Registry

Product = Callable[[Mapping[str, Array]], dict[str, Array]]
MATRICES: Mapping[str, Callable[[CurvatureProducts], Product]] = Registry(
    "matrix",
    {
        "ggn": lambda products: products.multiply_ggn,
        "fisher": lambda products: products.multiply_fisher,
        "hessian": lambda products: products.multiply_hessian,
    },
)


class CurvatureOperator(LinearOperator):  # type: ignore[misc] # SciPy has no types
    """A curvature matrix of all parameters, the mean over the examples of a data set.

    It is symmetric, has no block structure and is never formed. A product reads the data once.
    Functions of ``scipy.sparse.linalg`` accept it, such as ``eigsh``, ``cg`` and ``lobpcg``.
    ``kfac_engine.curvature_operator`` returns it.

    Args:
        assembly: The model with its losses.
        vector: All parameters as one vector.
        pairs: The batches.
        matrix: Name of the matrix.

    Attributes:
        model: The model.
        vector: The order of the parameters: ``vector.join`` and ``vector.split`` convert mappings
            from parameter to array.
        matrix: Name of the matrix.
        examples: Number of examples of the latest product; 0 before the first product.
    """

    def __init__(
        self, assembly: Assembly, vector: ParameterVector, pairs: Iterable[Batch], matrix: str
    ) -> None:
        super().__init__(np.dtype(np.float64), (vector.size, vector.size))
        self.model, self.vector, self.matrix = TrainableModel(assembly), vector, matrix
        self.examples = 0
        self._pairs, self._product = pairs, MATRICES[matrix]
        self._assembly, self._backend = assembly, assembly.collection.backend
        self._types = {name: array.dtype for name, array in self.model.parameters.items()}
        self._only: list[tuple[int, Product]] = []

    def __repr__(self) -> str:
        """Return the matrix and its size."""
        return f"CurvatureOperator({self.matrix}, {self.vector.size} parameters)"

    def _matvec(self, x: Float) -> Float:
        return self._matmat(np.asarray(x).reshape(-1, 1))[:, 0]

    def _matmat(self, X: Float) -> Float:
        """Return products with the columns of a matrix; each batch is evaluated once."""
        names = tuple(self.vector.shapes)
        columns = [
            self.vector.split(column[None], names, self._types, several=False)
            for column in np.asarray(X, np.float64).T
        ]
        total, examples = np.zeros(X.shape), 0
        for count, product in self._products():
            for index, column in enumerate(columns):
                arrays = on_host(product(column), self._backend)  # with the copies of tied weights
                total[:, index] += (
                    count * self.vector.join({n: np.asarray(arrays[n]) for n in names})[0][0]
                )
            examples += count
        if self.examples not in (0, examples):
            raise InputError(
                f"the data had {self.examples} examples and then {examples}; give data that do not "
                f"change."
            )
        if not examples:
            raise InputError("the data have no examples; pass at least one batch.")
        self.examples = examples
        return total / examples

    def _adjoint(self) -> "CurvatureOperator":
        return self

    # -- private ----------------------------------------------------------------------------------

    def _products(self) -> Iterator[tuple[int, Product]]:
        """Yield the number of examples and the matrix of each batch."""
        if self._only:
            yield from self._only
            return
        number, objective = 0, self.model.objective
        totals = (0.0,) * len(objective.terms)
        for number, (inputs, targets) in enumerate(self._pairs, 1):
            if targets is None and self.matrix == "hessian":
                raise InputError(
                    f"batch {number} has no targets, which the Hessian matrix depends on."
                )
            require_gradient(self._assembly, inputs)
            trace = self.model.trace(inputs, targets)
            products = self.model.curvature_products(trace)
            totals = tuple(map(sum, zip(totals, products.totals, strict=True)))
            product = self._product(products) if any(products.totals) else self._zeros
            entry = objective.examples(trace), product
            yield entry
        if number:
            objective.require_counts(BatchSize(1, totals))
        if number == 1 and isinstance(self._pairs, list):
            self._only = [entry]  # the only batch stays in memory

    def _zeros(self, _: Mapping[str, Array]) -> dict[str, Array]:
        """Return the product with the matrix of a batch in which no target counts."""
        return {name: np.zeros_like(array) for name, array in self.model.parameters.items()}


def curvature_operator(
    model: ModelSource, batches: Data, matrix: str = "ggn", **options: Any
) -> CurvatureOperator:
    """Return a curvature matrix of all parameters as a linear operator.

    The matrix is the mean of the examples' matrices, so it does not depend on how the data are
    divided into batches. An example's loss is its negative log-likelihood: the sum over its
    positions, weighted by its targets' weights.

    Args:
        model: Path, bytes or ``ModelProto``.
        batches: Data as for ``fit``; they are read several times. Only ``"hessian"`` needs targets.
        matrix: ``"ggn"``, the generalized Gauss–Newton matrix; ``"fisher"``, the Fisher matrix,
            which is equal for losses on natural parameters; or ``"hessian"``, the exact Hessian
            matrix of the mean loss.
        **options: Fields of ``EngineOptions`` except the reduction; ``loss`` is needed.

    Returns:
        The operator, float64, over the vector of all parameters. The products are computed in the
        element type of the model, and their sums over batches in float64.

    Raises:
        InputError: The file, an option or the data are wrong.
        UnknownNameError: There is no such matrix, or an option is unknown.
        UnsupportedError: The loss is a single number for the whole batch.
    """
    MATRICES[matrix]
    known = {field.name: field for field in fields(EngineOptions) if field.name != "reduction"}
    check_names("curvature_operator", options, known)
    if "loss" not in options:
        raise InputError("curvature_operator needs loss=, the loss of the model.")
    chosen = EngineOptions(**options, reduction="batch_mean")
    data = batches
    if chosen.sample_inputs is None:
        data, sample = with_first_examples(
            model, data, chosen.batch_axes, labeled=False, passes=2, divided=False
        )
        chosen = replace(chosen, sample_inputs=sample)
    assembly, _ = build(model, chosen)
    assembly.task.require_examples("a curvature needs")
    shapes = {name: array.shape for name, array in assembly.model.parameters.items()}
    vector = ParameterVector(shapes, assembly.discovery.parts)
    pairs = batches_of(data, assembly.task.example_axes, passes=2, labeled=False)
    return CurvatureOperator(assembly, vector, pairs, matrix)
