"""Products of the block-diagonal matrix of a collection with vectors over its parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from kfac_engine._types import Params, Vector
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.blocks.batched_products import (
    Pairs,
    Product,
    by_parameter,
    multiply_blocks,
)
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.errors import UnknownNameError


class BlockProducts:
    """Products with powers and Cholesky factors of the damped matrix that were registered.

    Args:
        collection: The registered layers.
        exps: Powers that the blocks store.
        compute_cholesky: Whether the blocks store the Cholesky factor ``B``.
        compute_cholesky_inverse: Whether the blocks store ``B⁻¹``.
        name: Name of the estimator, for messages.
    """

    def __init__(
        self,
        collection: LayerCollection,
        exps: Sequence[float],
        compute_cholesky: bool = False,
        compute_cholesky_inverse: bool = False,
        name: str = "FisherEstimator",
    ) -> None:
        self._collection, self._name = collection, name
        self._exps = (1.0, *map(float, exps))
        self._cholesky, self._cholesky_inverse = compute_cholesky, compute_cholesky_inverse

    def matpower(self, exp: float) -> Product:
        """Return the product of a block with a vector for a power of the damped matrix.

        Args:
            exp: 1, which reads the current averages, or a registered power, as of the last refresh.

        Returns:
            A product for ``multiply`` and ``multiply_pairs``.

        Raises:
            UnknownNameError: The power was not registered.
        """
        if float(exp) not in self._exps:
            raise UnknownNameError(
                f"power {exp} was not registered with {self._name}; add it to "
                f"exps={self._exps[1:]}."
            )
        return lambda block, vector: block.multiply_matpower(vector, exp)

    def cholesky(self, transpose: bool = False) -> Product:
        """Return the product with the Cholesky factor ``B`` of the damped matrix, or with ``Bᵀ``.

        Args:
            transpose: Whether it is ``Bᵀ``.

        Returns:
            A product for ``multiply`` and ``multiply_pairs``.

        Raises:
            UnknownNameError: The option ``compute_cholesky`` is not set.
        """
        self._require("compute_cholesky", self._cholesky)
        return lambda block, vector: block.multiply_cholesky(vector, transpose)

    def cholesky_inverse(self, transpose: bool = False) -> Product:
        """Return the product with ``B⁻¹``, or with its transpose.

        Args:
            transpose: Whether it is the transpose.

        Returns:
            A product for ``multiply`` and ``multiply_pairs``.

        Raises:
            UnknownNameError: The option ``compute_cholesky_inverse`` is not set.
        """
        self._require("compute_cholesky_inverse", self._cholesky_inverse)
        return lambda block, vector: block.multiply_cholesky_inverse(vector, transpose)

    def multiply(self, vectors: Mapping[str, Any], product: Product) -> dict[str, Any]:
        """Multiply vectors of some or all blocks, given by parameter.

        Args:
            vectors: Parameter to array; all parameters of each block that is to be multiplied.
            product: A product of this object.

        Returns:
            Parameter to product, in the shape of its vector.

        Raises:
            InputError: A block has vectors for some of its parameters only.
        """
        collection = self._collection
        return multiply_blocks(collection.fisher_blocks, vectors, product, collection.backend)

    def multiply_pairs(self, vecs_and_vars: Pairs, product: Product) -> list[tuple[Vector, Params]]:
        """Multiply vectors of all parameters, given as pairs.

        Args:
            vecs_and_vars: Pairs of an array and its parameter, or of several of each.
            product: A product of this object.

        Returns:
            Pairs in the order given.

        Raises:
            ShapeError: A pair has another number of arrays than parameters.
            InputError: A parameter is missing, comes twice or is not registered.
        """
        registered = [name for key in self._collection.fisher_blocks for name in uses(key)]
        products = self.multiply(by_parameter(vecs_and_vars, registered), product)
        return [
            (products[key] if isinstance(key, str) else tuple(products[n] for n in key), key)
            for _, key in vecs_and_vars
        ]

    def _require(self, option: str, is_set: bool) -> None:
        if not is_set:
            raise UnknownNameError(
                f"the product was not registered with {self._name}; make it with {option}=True."
            )
