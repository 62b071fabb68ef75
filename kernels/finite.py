"""Check of many arrays for NaN and infinity in one launch; see ``finite.cu``."""

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

# Largest number of arrays of one launch: bound of a grid axis.
_MOST = 65535


def find_infinite(device: Device, arrays: Sequence[Array], flags: Array) -> None:
    """Set the flags of arrays with NaN or infinity to zero.

    Args:
        device: Device of the arrays.
        arrays: Of one type, float32 or float64, contiguous.
        flags: One int32 an array, ones.
    """
    for start in range(0, len(arrays), _MOST):
        batch = arrays[start : start + _MOST]
        spans = np.array([(device.address(array), array.size) for array in batch], np.int64)
        find = kernel(device, "finite", "find_infinite", INPUT=INPUTS[batch[0].dtype.name])
        # Blocks for the longest array; most blocks of shorter arrays return at once.
        blocks = blocks_for(max(array.size for array in batch), device)
        grid = min(blocks, 2 * device.processors), len(batch)
        find(grid, (BLOCK,), (device.upload(spans), flags[start : start + len(batch)]))
