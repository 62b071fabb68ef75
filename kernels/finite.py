"""Launches checks of many arrays for NaN and infinity, and sums of squares (``finite.cu``)."""

from collections.abc import Sequence

import numpy as np

from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, blocks_for, kernel

# Largest number of arrays of one launch, which is the bound of a grid axis.
_MOST = 65535


def find_infinite(device: Device, arrays: Sequence[Array], flags: Array) -> None:
    """Set the flags of arrays that contain NaN or infinity to zero.

    The arrays are contiguous, of one type, float32 or float64. ``flags`` has an int32 one for each
    of them.
    """
    _launch(device, "find_infinite", arrays, flags, _blocks(device, arrays))


def sum_squares(device: Device, arrays: Sequence[Array]) -> Array:
    """Return sums of squares in float64, ``(arrays, parts)``: a row adds up to the sum of an array.

    The arrays are contiguous, of one type, float32 or float64.
    """
    blocks = _blocks(device, arrays)
    parts = device.empty((len(arrays), blocks), np.float64)
    _launch(device, "sum_squares", arrays, parts, blocks)
    return parts


def _blocks(device: Device, arrays: Sequence[Array]) -> int:
    """Return the number of blocks of the longest array; surplus blocks of others return at once."""
    longest: int = max(array.size for array in arrays)
    blocks: int = min(blocks_for(longest, device), 2 * device.processors)
    return blocks


def _launch(device: Device, name: str, arrays: Sequence[Array], out: Array, blocks: int) -> None:
    find = kernel(device, "finite", name, INPUT=INPUTS[arrays[0].dtype.name])
    for start in range(0, len(arrays), _MOST):
        batch = arrays[start : start + _MOST]
        spans = np.array([(device.address(array), array.size) for array in batch], np.int64)
        rows = out[start : start + len(batch)]
        find((blocks, len(batch)), (BLOCK,), (device.upload(spans), rows))
