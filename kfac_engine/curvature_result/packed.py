"""The packed form of vectors of a block: a stack of matrices."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.layers.packing import Packing

Number = TypeVar("Number", np.float64, np.intp)


def packing_of(block: FisherBlock) -> Packing | None:
    """Return the packing of a block of a layer; None for a block of concatenated parameters."""
    if isinstance(block, KroneckerProductFB | LayerDiagonalFB):
        return block.form.packing
    return None


def packed(block: FisherBlock, arrays: tuple[NDArray[Number], ...]) -> NDArray[Number]:
    """Return arrays in the shapes of the parameters of a block as a stack, ``(g, d_in, d_out)``.

    Args:
        block: The block.
        arrays: An array for each parameter.

    Returns:
        ``(1, entries, 1)`` for a block of concatenated parameters.
    """
    packing = packing_of(block)
    if packing is None:
        return np.concatenate([array.reshape(-1) for array in arrays]).reshape(1, -1, 1)
    stack = packing.pack(arrays, block.params, np)
    return stack if stack.ndim == 3 else stack[None]
