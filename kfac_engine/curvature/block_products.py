"""Products of the block-diagonal matrix of a collection with vectors over its parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from kfac_engine._types import Params, Rows, Vector
from kfac_engine.backend.threads import Task
from kfac_engine.curvature.blocks.base import FisherBlock, parts, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.errors import InputError, ShapeError, UnknownNameError

# Vectors over the parameters of a collection.
Pairs: TypeAlias = Sequence[tuple[Vector, Params]]
# Product of a block and a vector; it must not change blocks or factors.
Product: TypeAlias = Callable[[FisherBlock, Vector], Vector]


class BlockProducts:
    """Products with powers and Cholesky factors of the damped matrix that were registered.

    The blocks store the powers ``exps``. ``name`` is the name of the estimator in messages.
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

    def matpower(self, exp: float, columns: Mapping[Params, slice] | None = None) -> Product:
        """Return the product of a block with a vector for a power of the damped matrix.

        The power 1 reads the current averages; a registered power reads the last refresh.
        ``columns`` has the only columns of products that are needed, by the parameters of a block;
        the other columns may be zero (``FisherBlock.multiply_columns``).
        ``UnknownNameError`` is raised if the power was not registered.
        """
        if float(exp) not in self._exps:
            raise UnknownNameError(
                f"power {exp} was not registered with {self._name}; add it to "
                f"exps={self._exps[1:]}."
            )
        needed = {} if exp == 1 else columns or {}

        def product(block: FisherBlock, vector: Vector) -> Vector:
            chosen = needed.get(block.params or ())
            if chosen is not None:
                return block.multiply_columns(vector, exp, chosen)
            if isinstance(vector, Rows | tuple) or isinstance(block.params, str):
                return block.multiply_matpower(vector, exp)
            return block.multiply_weight(vector, exp)

        return product

    def cholesky(self, transpose: bool = False) -> Product:
        """Return the product with the Cholesky factor ``B`` of the damped matrix, or with ``Bᵀ``.

        ``UnknownNameError`` is raised if the option ``compute_cholesky`` is not set.
        """
        self._require("compute_cholesky", self._cholesky)
        return lambda block, vector: block.multiply_cholesky(vector, transpose)

    def cholesky_inverse(self, transpose: bool = False) -> Product:
        """Return the product with ``B⁻¹``, or with its transpose.

        ``UnknownNameError`` is raised if the option ``compute_cholesky_inverse`` is not set.
        """
        self._require("compute_cholesky_inverse", self._cholesky_inverse)
        return lambda block, vector: block.multiply_cholesky_inverse(vector, transpose)

    def multiply(self, vectors: Mapping[str, Any], product: Product) -> dict[str, Any]:
        """Multiply vectors of some or all blocks, given by parameter, in parallel.

        A vector is an array in the shape of the parameter, or rows of an embedding. The product has
        the shape of its vector. A power of a block may be multiplied by a vector of its first
        parameter alone: the others have zeros, and no product.
        """
        products: dict[str, Any] = {}

        def multiply(names: list[str], block: FisherBlock, vector: Vector) -> None:
            result = product(block, vector)
            arrays = (result,) if isinstance(result, Rows) else parts(result)
            products.update(zip(names, arrays, strict=True))

        tasks = []
        for key, block in self._collection.fisher_blocks.items():
            names = uses(key)
            present = [name for name in names if name in vectors]
            if not present:
                continue
            if present not in ([names[0]], [*names]):
                raise InputError(
                    f"{', '.join(names)} form one block; give the gradients of all of them."
                )
            arrays = tuple(vectors[name] for name in present)
            vector = arrays if isinstance(key, tuple) and len(arrays) == len(key) else arrays[0]
            tasks.append(Task(block.work, partial(multiply, present, block, vector)))
        self._collection.backend.run_parallel(tasks)
        return {name: products[name] for name in vectors if name in products}

    def multiply_pairs(self, vecs_and_vars: Pairs, product: Product) -> list[tuple[Vector, Params]]:
        """Multiply vectors of all parameters, given as pairs, and return pairs in the same order.

        A pair has an array and its parameter, or several of each.

        Raises:
            ShapeError: A pair has another number of arrays than parameters.
            InputError: A parameter is missing, comes twice or is not registered.
        """
        registered = [name for key in self._collection.fisher_blocks for name in uses(key)]
        products = self.multiply(_by_parameter(vecs_and_vars, registered), product)
        return [
            (products[key] if isinstance(key, str) else tuple(products[n] for n in key), key)
            for _, key in vecs_and_vars
        ]

    def _require(self, option: str, is_set: bool) -> None:
        if not is_set:
            raise UnknownNameError(
                f"the product was not registered with {self._name}; make it with {option}=True."
            )


def _by_parameter(vecs_and_vars: Pairs, registered: Sequence[str]) -> dict[str, Any]:
    """Return the vectors of all parameters by name.

    Pairs and errors are as for ``multiply_pairs``.
    """
    vectors: dict[str, Any] = {}
    for vector, key in vecs_and_vars:
        names = uses(key)
        arrays = (vector,) if isinstance(vector, Rows) else parts(vector)
        if len(arrays) != len(names):
            raise ShapeError(f"{key} needs {len(names)} array(s), got {len(arrays)}.")
        if vectors.keys() & set(names):
            raise InputError(f"products take every parameter once; {key} occurs twice.")
        vectors.update(zip(names, arrays, strict=True))
    if set(vectors) != set(registered):
        missing = sorted(set(registered) - set(vectors))
        extra = sorted(set(vectors) - set(registered))
        raise InputError(
            f"products take every registered parameter once; missing: {missing}, not registered: "
            f"{extra}."
        )
    return vectors
