"""Multiplies the block-diagonal matrix of a collection by vectors over its parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from kfac_engine._types import Array, Params, Rows, Vector, entries
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.threads import Task
from kfac_engine.curvature.blocks.base import FisherBlock, parts, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.errors import InputError, NonFiniteError, ShapeError

# Vectors over the parameters of a collection.
Pairs: TypeAlias = Sequence[tuple[Vector, Params]]
# Product of a block and a vector; it must not change blocks or factors.
Product: TypeAlias = Callable[[FisherBlock, Vector], Vector]


def multiply_power(exp: float, block: FisherBlock, vector: Vector) -> Vector:
    """Return a power of a block's damped matrix times a vector.

    The power 1 reads the current averages; a registered power reads the last refresh.
    """
    if isinstance(vector, Rows | tuple) or isinstance(block.params, str):
        return block.multiply_matpower(vector, exp)
    return block.multiply_weight(vector, exp)


def multiply(
    collection: LayerCollection, vectors: Mapping[str, Any], product: Product
) -> dict[str, Any]:
    """Multiply each block by its vector, in parallel; blocks without a vector are left out.

    The vectors and the products have parts by parameter. A part is an array in the shape of the
    parameter, or rows of an embedding. A power of a block may be multiplied by a part of its first
    parameter alone: the others have zeros, and no product.
    """
    products: dict[str, Any] = {}

    def multiply_part(part: _Part) -> None:
        names, vector = part.names, vectors[part.names[0]]
        if part.whole:
            result: Any = product(part.block, tuple(map(vectors.__getitem__, names)))
            products.update(zip(names, result, strict=True))
        else:
            products[names[0]] = product(part.block, vector)

    named = tuple(vectors)
    divided = collection.divided.get(named) or _divided(collection, named)
    collection.backend.run_parallel([Task(p.work, partial(multiply_part, p)) for p in divided])
    collection.divided[named] = divided  # the averages, which are read for works, exist
    return {name: products[name] for name in vectors if name in products}


class _Part(NamedTuple):
    """The part of a vector over all parameters that a block multiplies."""

    block: FisherBlock
    names: Sequence[str]  # the parameters
    whole: bool  # whether the block takes an array for each parameter
    work: float  # see ``FisherBlock.work``


def _divided(collection: LayerCollection, vectors: Sequence[str]) -> Sequence[_Part]:
    """Divide vectors over some parameters among the blocks."""
    divided = list[_Part]()
    for key, block in collection.fisher_blocks.items():
        names = uses(key)
        present = [name for name in names if name in vectors]
        if not present:
            continue
        if len(present) < len(names) and present != [names[0]]:
            raise InputError(
                f"{', '.join(names)} form one block; give the gradients of all of them."
            )
        whole = isinstance(key, tuple) and len(present) == len(key)
        divided.append(_Part(block, present, whole, block.work))
    return divided


def check_products(products: Mapping[str, Array | Rows], backend: Backend, exp: float) -> None:
    """Refuse natural gradients that are not finite; ``exp`` is the power of the Fisher matrix.

    A device may be read later.
    """
    names = [*products]

    def refuse_unless(finite: Array) -> None:
        if not all(finite):
            name = names[int(finite.argmin())]
            raise NonFiniteError(
                f"the gradient of '{name}' times the Fisher matrix to the power {exp:g} overflows; "
                f"raise the damping, or check the gradient and the data for huge numbers."
            )

    flags = backend.are_finite(list(map(entries, products.values())))
    backend.read_later(flags, refuse_unless)


def multiply_pairs(
    collection: LayerCollection, vecs_and_vars: Pairs, product: Product
) -> list[tuple[Vector, Params]]:
    """Multiply vectors of all parameters, given as pairs, and return pairs in the same order.

    A pair has an array and its parameter, or several of each. A pair with another number of arrays
    than parameters raises a ShapeError. A parameter that is missing, comes twice or is not
    registered raises an InputError.
    """
    registered = [name for key in collection.fisher_blocks for name in uses(key)]
    products = multiply(collection, _by_parameter(vecs_and_vars, registered), product)
    return [
        (products[key] if isinstance(key, str) else tuple(products[n] for n in key), key)
        for _, key in vecs_and_vars
    ]


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
