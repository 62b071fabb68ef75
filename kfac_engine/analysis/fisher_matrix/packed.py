"""The packed form of vectors of a block: a stack of matrices."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kfac_engine.curvature.blocks.base import FisherBlock

Number = TypeVar("Number", np.float64, np.intp)


def packed(block: FisherBlock, arrays: tuple[NDArray[Number], ...]) -> NDArray[Number]:
    """Return arrays in the shapes of the parameters of a block as a stack, ``(g, d_in, d_out)``.

    Args:
        block: The block.
        arrays: An array for each parameter.

    Returns:
        ``(1, entries, 1)`` for a block of concatenated parameters.
    """
    if block.packing is None:
        return np.concatenate([array.reshape(-1) for array in arrays]).reshape(1, -1, 1)
    stack = block.packing.pack(arrays, block.params, np)
    return stack.reshape(-1, *stack.shape[-2:])
