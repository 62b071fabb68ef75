"""Whether many arrays hold finite numbers only; see ``finite.cu``."""

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

# Arrays of one launch: a side of a grid.
_MOST = 65535


def find_infinite(device: Device, arrays: Sequence[Array], flags: Array) -> None:
    """Set to zero the flags of arrays that hold NaN or infinity.

    Args:
        device: Where to.
        arrays: Of one type, float32 or float64, contiguous.
        flags: One int32 an array, ones.
    """
    for start in range(0, len(arrays), _MOST):
        some = arrays[start : start + _MOST]
        spans = np.array([(device.address(array), array.size) for array in some], np.int64)
        find = kernel(device, "finite", "find_infinite", INPUT=INPUTS[some[0].dtype.name])
        # Blocks that stride over the longest; of shorter arrays most have nothing to do.
        blocks = blocks_for(max(array.size for array in some), device)
        grid = min(blocks, 2 * device.processors), len(some)
        find(grid, (BLOCK,), (device.upload(spans), flags[start : start + len(some)]))
