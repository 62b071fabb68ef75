"""Products with many blocks, side by side."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kfac_engine._types import Vector
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.tasks import Task
from kfac_engine.blocks.base import FisherBlock

Product: TypeAlias = Callable[[FisherBlock, Vector], Vector]


def multiply_all(
    pairs: Sequence[tuple[FisherBlock, Vector]], product: Product, backend: Backend
) -> list[Vector]:
    """The product of each block with its vector.

    Args:
        pairs: Blocks, none of them twice, and what to multiply.
        product: A product, which neither changes a block nor what it is made of.
        backend: Of the blocks.

    Returns:
        The products, in the order of the pairs.

    Raises:
        KfacError: As the product raises it, for one of the pairs.
    """
    found: dict[int, Vector] = {}

    def do(index: int, block: FisherBlock, vector: Vector) -> None:
        found[index] = product(block, vector)

    backend.share([Task(pair[0].work, partial(do, i, *pair)) for i, pair in enumerate(pairs)])
    return [found[index] for index in range(len(pairs))]
