"""Products with many blocks in parallel."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from kfac_engine._types import Params, Rows, Vector
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.tasks import Task
from kfac_engine.curvature.blocks.base import FisherBlock, parts, uses
from kfac_engine.errors import InputError, ShapeError

# Vectors over the parameters of a collection.
Pairs: TypeAlias = Sequence[tuple[Vector, Params]]
Product: TypeAlias = Callable[[FisherBlock, Vector], Vector]


def batched_products(
    pairs: Sequence[tuple[FisherBlock, Vector]], product: Product, backend: Backend
) -> list[Vector]:
    """Multiply each block by its vector, in parallel.

    Args:
        pairs: Distinct blocks with their vectors.
        product: Product of a block and a vector; must not change blocks or factors.
        backend: Array library of the blocks.

    Returns:
        The products, in the order of the pairs.

    Raises:
        KfacError: The product raised it for a pair.
    """
    products: dict[int, Vector] = {}

    def multiply(index: int, block: FisherBlock, vector: Vector) -> None:
        products[index] = product(block, vector)

    backend.run_parallel(
        [Task(pair[0].work, partial(multiply, i, *pair)) for i, pair in enumerate(pairs)]
    )
    return [products[index] for index in range(len(pairs))]


def multiply_blocks(
    blocks: Mapping[Params, FisherBlock],
    vectors: Mapping[str, Any],
    product: Product,
    backend: Backend,
) -> dict[str, Any]:
    """Return the products of blocks with the vectors of their parameters.

    Blocks whose parameters have no vector are left out.

    Args:
        blocks: Parameters to block.
        vectors: Parameter to array in the parameter's shape, or to rows of an embedding.
        product: As for ``batched_products``.
        backend: Array library of the blocks.

    Returns:
        Parameter to product, in the shape of its vector.

    Raises:
        InputError: A block has vectors for some of its parameters only.
    """
    chosen: list[tuple[str, ...]] = []
    pairs: list[tuple[FisherBlock, Vector]] = []
    for key, block in blocks.items():
        names = uses(key)
        present = [name for name in names if name in vectors]
        if not present:
            continue
        if len(present) < len(names):
            raise InputError(
                f"{', '.join(names)} form one block; give the gradients of all of them."
            )
        vector = vectors[key] if isinstance(key, str) else tuple(vectors[name] for name in key)
        chosen.append(names)
        pairs.append((block, vector))
    products: dict[str, Any] = {}
    for names, result in zip(chosen, batched_products(pairs, product, backend), strict=True):
        arrays = (result,) if isinstance(result, Rows) else parts(result)
        products.update(zip(names, arrays, strict=True))
    return products


def by_parameter(vecs_and_vars: Pairs, registered: Sequence[str]) -> dict[str, Any]:
    """Return the vectors of all parameters by name.

    Args:
        vecs_and_vars: Pairs of an array and its parameter, or of a tuple of arrays and parameters.
        registered: All parameters.

    Returns:
        Parameter to array, or to rows of an embedding.

    Raises:
        ShapeError: The numbers of arrays and parameters of a pair differ.
        InputError: A parameter is missing, occurs twice or is not registered.
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
