"""Launch of moving averages and of counts of ids; see ``averages.cu``."""

import numpy as np

from kfac_engine.kernels.launch import (
    BLOCK,
    Array,
    Device,
    blocks_for,
    float32,
    int32,
    kernel,
)
from kfac_engine.kernels.variants import INPUTS


def update_average(
    device: Device, average: Array, measured: Array, alpha: float, beta: float
) -> None:
    """Compute ``average ← beta·average + alpha·measured``, of contiguous arrays of one size.

    Args:
        device: Device of the arrays.
        average: Float32.
        measured: Float32, float16 or bfloat16.
        alpha: Scale of the measured values.
        beta: Scale of the old values; zero overwrites.
    """
    update = kernel(device, "averages", "update_average", INPUT=INPUTS[measured.dtype.name])
    numbers = average.size
    arguments = (average, measured, np.int64(numbers), float32(alpha), float32(beta))
    update((blocks_for(numbers, device),), (BLOCK,), arguments)


def count_ids(device: Device, ids: Array, counts: Array) -> None:
    """Add the occurrences of each row in contiguous int64 ``ids`` to int32 ``counts``."""
    count = kernel(device, "averages", "count_ids", INPUT=0)
    arguments = (ids, counts, np.int64(ids.size), int32(counts.size))
    count((blocks_for(ids.size, device),), (BLOCK,), arguments)
