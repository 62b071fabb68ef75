"""Launches conversions of symmetric matrices to damped float64 and back (``symmetric.cu``)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, int32, kernel

# Number of entries of the struct Facts: finite, zero, damping, trace of the undamped matrix.
FACTS = 4
_PARTS = 4  # number of entries of the struct Part
_SUBTILE = 32
_THIN_BLOCK = (_SUBTILE, 8)


class Floor(NamedTuple):
    """The least damping of a matrix, as the larger of two bounds.

    Attributes:
        epsilon: Factor of the Frobenius norm.
        least: Bound that does not depend on the norm.
    """

    epsilon: float
    least: float


def widen(device: Device, stack: Array, dampings: Array, floor: Floor) -> tuple[Array, Array]:
    """Return damped symmetric matrices in float64, and facts about each, ``(n, FACTS)``.

    NaN and infinity become zeros. The stack is ``(n, d, d)``, contiguous; its lower triangles are
    read. The dampings, float64, are added to the diagonals, or the ``floor`` if it is larger.
    """
    count, size, _ = stack.shape
    tiles = _tiles(size)
    kind = INPUTS[stack.dtype.name]
    wide = device.empty(stack.shape, np.float64)
    parts = device.empty((count, tiles, _PARTS), np.float64)
    facts = device.empty((count, FACTS), np.float64)
    sizes = int32(tiles), int32(size)
    copy = kernel(device, "symmetric", "widen", INPUT=kind)
    copy((count * tiles,), _THIN_BLOCK, (stack, wide, parts, *sizes))
    damp = kernel(device, "symmetric", "damp", INPUT=kind)
    limits = np.float64(floor.epsilon), np.float64(floor.least)
    damp((count,), (BLOCK,), (wide, parts, dampings, facts, *sizes, *limits))
    return wide, facts


def narrow(device: Device, wide: Array, dtype: npt.DTypeLike) -> Array:
    """Return symmetric matrices from upper triangles, in float32 or float64.

    ``wide`` is ``(n, d, d)`` float64, contiguous.
    """
    count, size, _ = wide.shape
    tiles = _tiles(size)
    kind = np.dtype(dtype)
    narrowed = device.empty(wide.shape, kind)
    copy = kernel(device, "symmetric", "narrow", INPUT=INPUTS[kind.name])
    copy((count * tiles,), _THIN_BLOCK, (wide, narrowed, int32(tiles), int32(size)))
    return narrowed


def _tiles(size: int) -> int:
    """Return the number of tiles of a lower triangle."""
    rows = -(-size // _SUBTILE)
    return rows * (rows + 1) // 2
