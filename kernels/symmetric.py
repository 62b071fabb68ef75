"""Symmetric matrices on the way to a factorisation in float64, and back; see ``symmetric.cu``."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kfac_engine.kernels.launch import (
    BLOCK,
    Array,
    Device,
    int32,
    kernel,
)
from kfac_engine.kernels.variants import INPUTS

# Of the struct Facts: whether all is finite, all is zero, the damping added, and the trace without.
FACTS = 4
_PARTS = 4  # of the struct Part
_SUBTILE = 32
_THIN_BLOCK = (_SUBTILE, 8)


class Floor(NamedTuple):
    """The least damping of a matrix.

    Attributes:
        epsilon: Times its Frobenius norm.
        least: Whatever its norm.
    """

    epsilon: float
    least: float


def widen(device: Device, stack: Array, asked: Array, floor: Floor) -> tuple[Array, Array]:
    """Damped matrices in float64, both triangles, with zeros for what is not finite.

    Args:
        device: Where to.
        stack: ``(n, d, d)``, float32 or float64, contiguous; the lower triangles are read.
        asked: ``(n,)`` float64: what to add to each diagonal, at least.
        floor: What is added where that is more.

    Returns:
        New matrices ``(n, d, d)`` and facts about each, ``(n, FACTS)``, float64.
    """
    count, side, _ = stack.shape
    tiles = _tiles(side)
    kind = INPUTS[stack.dtype.name]
    wide = device.empty(stack.shape, np.float64)
    parts = device.empty((count, tiles, _PARTS), np.float64)
    facts = device.empty((count, FACTS), np.float64)
    sizes = int32(tiles), int32(side)
    copy = kernel(device, "symmetric", "widen", INPUT=kind)
    copy((count * tiles,), _THIN_BLOCK, (stack, wide, parts, *sizes))
    damp = kernel(device, "symmetric", "damp", INPUT=kind)
    limits = np.float64(floor.epsilon), np.float64(floor.least)
    damp((count,), (BLOCK,), (wide, parts, asked, facts, *sizes, *limits))
    return wide, facts


def narrow(device: Device, wide: Array, dtype: npt.DTypeLike) -> Array:
    """Matrices with both triangles from the lower one, rounded to float32 or kept in float64.

    Args:
        device: Where to.
        wide: ``(n, d, d)`` float64, contiguous; the lower triangles are read.
        dtype: Of the result.

    Returns:
        New matrices ``(n, d, d)``.
    """
    count, side, _ = wide.shape
    tiles = _tiles(side)
    kind = np.dtype(dtype)
    found = device.empty(wide.shape, kind)
    copy = kernel(device, "symmetric", "narrow", INPUT=INPUTS[kind.name])
    copy((count * tiles,), _THIN_BLOCK, (wide, found, int32(tiles), int32(side)))
    return found


def _tiles(side: int) -> int:
    """Tiles of a lower triangle."""
    rows = -(-side // _SUBTILE)
    return rows * (rows + 1) // 2
