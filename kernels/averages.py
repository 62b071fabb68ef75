"""Launches updates of moving averages and counts of token ids (``averages.cu``)."""

import numpy as np

from kfac_engine.kernels.launch import (
    BLOCK,
    INPUTS,
    Array,
    Device,
    blocks_for,
    float32,
    int32,
    kernel,
)


def update_average(
    device: Device, average: Array, measured: Array, alpha: float, beta: float
) -> None:
    """Compute ``average ← beta·average + alpha·measured``, in place.

    The arrays are contiguous and of equal size. The average is float32, the measured values are
    float32, float16 or bfloat16. A ``beta`` of zero overwrites.
    """
    update = kernel(device, "averages", "update_average", INPUT=INPUTS[measured.dtype.name])
    numbers = average.size
    arguments = (average, measured, np.int64(numbers), float32(alpha), float32(beta))
    update((blocks_for(numbers, device),), (BLOCK,), arguments)


def count_ids(device: Device, ids: Array, counts: Array) -> None:
    """Add the number of occurrences of each id in ``ids`` (int64) to ``counts`` (int32)."""
    count = kernel(device, "averages", "count_ids", INPUT=0)
    arguments = (ids, counts, np.int64(ids.size), int32(counts.size))
    count((blocks_for(ids.size, device),), (BLOCK,), arguments)
