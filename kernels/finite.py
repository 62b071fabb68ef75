"""Launches checks of many arrays for NaN and infinity (``finite.cu``)."""

from collections.abc import Sequence

import numpy as np

from kfac_engine.kernels.launch import (
    BLOCK,
    Array,
    Device,
    blocks_for,
    kernel,
)
from kfac_engine.kernels.variants import INPUTS

# Largest number of arrays of one launch, which is the bound of a grid axis.
_MOST = 65535


def find_infinite(device: Device, arrays: Sequence[Array], flags: Array) -> None:
    """Set the flags of arrays that contain NaN or infinity to zero.

    Args:
        device: Device of the arrays.
        arrays: Contiguous arrays of one type, float32 or float64.
        flags: An int32 one for each array.
    """
    for start in range(0, len(arrays), _MOST):
        batch = arrays[start : start + _MOST]
        spans = np.array([(device.address(array), array.size) for array in batch], np.int64)
        find = kernel(device, "finite", "find_infinite", INPUT=INPUTS[batch[0].dtype.name])
        # The number of blocks is that of the longest array. Surplus blocks of shorter arrays return
        # immediately.
        blocks = blocks_for(max(array.size for array in batch), device)
        grid = min(blocks, 2 * device.processors), len(batch)
        find(grid, (BLOCK,), (device.upload(spans), flags[start : start + len(batch)]))
