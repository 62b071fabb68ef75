"""Second moments of few features with channels first: from images as they lie, in batches.

SYRK on so few rows mostly brings them to its product, and a call for each image takes longer than
its work. A batch of products of half of the features with all of them needs no copy and few calls;
both triangles are computed, which costs less than what is saved. Milliseconds on one thread and on
two, a task each, image by image / in batches:

    128 × 16 × 32 × 32    3.3, 4.5 / 1.4, 0.8
    128 × 32 × 16 × 16    1.8, 1.0 / 1.2, 0.7
     32 × 48 × 28 × 28    2.1, 1.5 / 1.6, 0.9
    128 × 64 ×  8 ×  8    1.1, 0.7 / 1.5, 0.9
"""

from functools import partial

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.syrk import scale, share, threads_for
from kfac_engine.backend.threads import Workers

_FEW_FEATURES = 48
# Positions and multiplications of a product that BLAS does without packing its operands.
_POSITIONS = 1024
_UNPACKED = 900_000
# Shorter products are mostly calls.
_LEAST_POSITIONS = 32
# Numbers read at a time by both products, which a cache holds.
_CACHED = 1 << 18
# Multiplications in the time that it takes to read a number from memory.
_TO_READ = 40


def thin_stack(x: Array, dtype: DType) -> Array | None:
    """Few features of many positions, as matrices that BLAS multiplies fastest, if they lie so.

    Args:
        x: Rows ``(n, *sides, d)``, any strides.
        dtype: Of the result.

    Returns:
        A view ``(n, pieces, d, k)`` of all rows with adjacent positions; None where there is none,
        or no gain.
    """
    if not x.size or x.ndim < 3 or x.dtype != dtype or x.shape[-1] > _FEW_FEATURES:
        return None
    images, d = np.moveaxis(x, -1, 1), x.shape[-1]
    positions = images[0, 0].size
    most = min(_POSITIONS, 2 * _UNPACKED // d**2)
    pieces = range(-(-positions // most), positions + 1)
    k = positions // next(some for some in pieces if positions % some == 0)
    if k < _LEAST_POSITIONS or not images[0, 0].flags.c_contiguous:
        return None
    return images.reshape(len(x), d, -1, k).swapaxes(1, 2)


def thin_moment(
    stack: Array, out: Array, *, alpha: float, beta: float, scratch_bytes: int, workers: Workers
) -> None:
    """``out ← beta·out + alpha·Σ x xᵀ``, both triangles, in place.

    Args:
        stack: As ``thin_stack`` gives it.
        out: ``(d, d)``.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        scratch_bytes: Bound of the working memory, that of all threads together, if the products of
            an image fit it.
        workers: Threads.
    """
    threads = threads_for(stack.size * (len(out) + _TO_READ), workers)
    parts = np.array_split(stack, min(threads, len(stack)))
    spare = scratch_bytes // (len(parts) * out.itemsize)
    sums = [np.zeros_like(out) for _ in parts]
    tasks = [partial(_add, *some, spare) for some in zip(parts, sums, strict=True)]
    share(tasks, threads, workers)
    scale(out, beta)
    out += alpha * sum(sums[1:], sums[0])


def _add(stack: Array, total: Array, spare: int) -> None:
    """Add the moment of some images, as many at a time as the cache and the memory hold."""
    d, products = len(total), stack.shape[1] * total.size
    count = max(1, min(len(stack), _CACHED // stack[0].size, spare // products))
    found = np.empty((count, stack.shape[1], d, d), total.dtype)
    # In two halves, because a product with the same matrix is SYRK to NumPy.
    halves = [slice(d // 2), slice(d // 2, d)]
    for start in range(0, len(stack), count):
        images = stack[start : start + count]
        own = found[: len(images)]
        for half in halves:
            np.matmul(images, images[:, :, half].swapaxes(-1, -2), out=own[..., half])
        total += own.sum(axis=(0, 1))
