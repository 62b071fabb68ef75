"""Computes Gram matrices of rows by SYRK, in the lower triangle, mostly without copies.

The homogeneous coordinate is not appended to the rows. Its row of the Gram matrix is the sum of the
rows, followed by their number.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import scale
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.cpu.syrk import (
    accumulate,
    add_columns,
    count_parts,
    run_tasks,
    threads_for,
)
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers, single_threaded_blas
from kfac_engine.errors import ShapeError

# Bytes of a copy, so that it stays in the cache. Sizes from 1 to 16 MB are equally fast.
CHUNK_BYTES = 4 << 20
_MIRROR_BLOCK = 256
# Size below which one thread copies a triangle in less than a millisecond.
_SHARED_MIRROR = 1024
_ABOVE = np.triu(np.ones((_MIRROR_BLOCK, _MIRROR_BLOCK), bool), 1)
# Images with fewer pixels are copied and concatenated, because SYRK on few rows mostly reads and
# writes its result. On 784 rows views save up to 10 %; on 196 rows they cost up to 40 %.
_FEW_ROWS = 512


def second_moment(
    x: Array, out: Array, how: Accumulation, scratch_bytes: int, workers: Workers
) -> None:
    """Compute the lower triangle of ``out ← beta·out + alpha·Σ_rows x xᵀ``, in place.

    ``x`` is ``(…, d)`` with any strides; it is accumulated in the type of ``out``, which is
    C-contiguous and has the homogeneous coordinate last. ``scratch_bytes`` bounds the scratch
    memory of all threads together.
    """
    d, rows, homogeneous = x.shape[-1], prod(x.shape[:-1]), how.homogeneous
    check_out(out, d + homogeneous)
    stack = None if homogeneous else as_gram_stack(x, out.dtype)
    if stack is not None:
        with single_threaded_blas():
            add_batched_gram(stack, out, how, scratch_bytes, workers)
        return
    one_thread = x.ndim > 1 and x.size and threads_for(rows * d * d / 2, workers) == 1
    if one_thread and (whole := _merged(x, out.dtype)) is not None:
        with single_threaded_blas():
            blas.syrk(whole, out[:d, :d], alpha=how.alpha, beta=how.beta)
            if homogeneous:
                total = np.zeros(d)
                add_columns(whole, total)
                write_border(out, total, rows, how)
        return
    spare = (scratch_bytes - CHUNK_BYTES) // out.itemsize
    parts = split_rows(x, count_parts(rows, d, workers, spare))
    chunk_bytes = min(CHUNK_BYTES, scratch_bytes) // len(parts)
    sums = [np.zeros(d) for _ in parts]
    pieces = [matrices(part, out.dtype, chunk_bytes) for part in parts]
    with single_threaded_blas():
        accumulate(pieces, out[:d, :d], how, workers, sums if homogeneous else ())
    if homogeneous:
        write_border(out, sum(sums[1:], sums[0]), rows, how)


def check_out(out: Array, size: int) -> None:
    """Raise ``ShapeError`` unless ``out`` is ``(size, size)``, C-contiguous, float32 or float64."""
    if out.shape != (size, size) or not out.flags.c_contiguous or out.dtype.char not in "fd":
        raise ShapeError(
            f"a second moment needs a C-contiguous float32 or float64 result of shape "
            f"{(size, size)}, got {out.dtype} of shape {out.shape} and strides {out.strides}."
        )


def split_rows(x: Array, count: int) -> list[Array]:
    """Return views of rows ``(…, d)`` in ``count`` parts of about equal size, or in fewer parts.

    There are fewer parts if no axis is long enough.
    """
    if count == 1 or x.ndim == 1:
        return [x]
    lengths = x.shape[:-1]
    # A part of the first axis is contiguous in memory. An axis too short for equal parts is
    # skipped.
    equal = (i for i, length in enumerate(lengths) if length % count == 0 or length > 8 * count)
    axis = next(equal, int(np.argmax(lengths)))
    return np.array_split(x, min(count, lengths[axis]), axis=axis)


def write_border(out: Array, sums: Array, count: int, how: Accumulation) -> None:
    """Compute ``row ← beta·row + alpha·(sums, count)`` for the last row of ``(d + 1, d + 1)``.

    ``sums`` is the sum of ``count`` rows, ``(d,)``, float64.
    """
    scale(out[-1], how.beta)
    out[-1, :-1] += (how.alpha * sums).astype(out.dtype)
    out[-1, -1] += how.alpha * count


def mirror(matrix: Array, workers: Workers | None = None) -> None:
    """Copy the lower triangle of each matrix to the upper triangle, in blocks that fit a cache.

    The array is ``(…, d, d)``. A large matrix is copied in threads, unless ``workers`` is None.
    """
    size = matrix.shape[-1]
    tasks = [partial(_mirror_rows, matrix, i) for i in range(0, size, _MIRROR_BLOCK)]
    if workers is not None and size >= _SHARED_MIRROR:
        workers.run(reversed(tasks))
        return
    for task in tasks:
        task()


def _mirror_rows(matrix: Array, start: int) -> None:
    """Copy a block of rows left of the diagonal to the columns above the diagonal."""
    rows = slice(start, start + _MIRROR_BLOCK)
    for j in range(0, start, _MIRROR_BLOCK):
        columns = slice(j, j + _MIRROR_BLOCK)
        matrix[..., columns, rows] = matrix[..., rows, columns].swapaxes(-1, -2)
    block = matrix[..., rows, rows]
    size = block.shape[-1]
    np.copyto(block, block.swapaxes(-1, -2).copy(), where=_ABOVE[:size, :size])


def matrices(x: Array, dtype: DType, chunk_bytes: int) -> Iterator[Array]:
    """Yield the rows of ``x``, ``(…, d)``, as matrices ``(d, k)`` that BLAS can read.

    They are views where possible; a copy has at most ``chunk_bytes`` bytes. Together they contain
    all rows, in any order. A matrix may reuse the memory of the matrix before.
    """
    if not x.size:
        return
    x = x if x.ndim > 1 else x[None]
    whole = _merged(x, dtype)
    if whole is not None:
        yield whole
    elif prod(x.shape[1:-1]) >= _FEW_ROWS and _merged(x[0], dtype) is not None:
        for part in x:  # parts of equal shape and strides
            view = _merged(part, dtype)
            assert view is not None
            yield view
    else:
        numbers = max(chunk_bytes // dtype.itemsize, x.shape[-1])
        yield from _copies(x, np.empty(min(numbers, x.size), dtype))


def _merged(x: Array, dtype: DType) -> Array | None:
    """Return ``x`` as one matrix ``(d, rows)`` without a copy; None if that is impossible."""
    if x.dtype != dtype:
        return None
    if x.ndim > 2:
        axes = [axis for axis in range(x.ndim - 1) if x.shape[axis] > 1]
        if any(x.strides[a] != x.strides[b] * x.shape[b] for a, b in pairwise(axes)):
            return None
        x = x.reshape(-1, x.shape[-1])
    rows = x.T
    return rows if x.flags.carray or blas.layout(rows) else None  # ``carray`` is most often


def _copies(x: Array, buffer: Array) -> Iterator[Array]:
    """Yield the rows of ``x`` as chunks in a buffer, with features on the first or last axis."""
    part_size = prod(x.shape[1:])
    if part_size > buffer.size:
        for part in x:
            yield from _copies(part, buffer)
        return
    innermost = abs(x.strides[-1]) <= min(abs(stride) for stride in x.strides[:-1])
    for start in range(0, len(x), buffer.size // part_size):
        chunk = x[start : start + buffer.size // part_size]
        if not innermost:
            chunk = np.moveaxis(chunk, -1, 0)
        copy = buffer[: chunk.size].reshape(chunk.shape)
        copy[...] = chunk
        yield copy.reshape(-1, x.shape[-1]).T if innermost else copy.reshape(x.shape[-1], -1)


# -- few features with channels first --------------------------------------------------------------
#
# SYRK on few features mostly loads its operand, and a call for each image costs more than its
# arithmetic. A batch of products of half of the features with all features needs no copy and few
# calls. It computes both triangles, which costs less than it saves: 1.4 ms instead of 3.3 ms for
# 128 × 16 × 32 × 32 on one thread (ADR 9).


_FEW_FEATURES = 48
# Largest depth and largest number of multiplications of a product whose operands BLAS does not
# copy.
_POSITIONS = 1024
_UNPACKED = 900_000
# Least depth of a product that takes longer than its call.
_LEAST_POSITIONS = 32
# Entries that the products read at a time, so that they stay in a cache.
_CACHED = 1 << 18
# Number of multiplications in the time that one entry is read from memory.
_TO_READ = 40


def as_gram_stack(x: Array, dtype: DType) -> Array | None:
    """Return rows with few features as a stack for ``add_batched_gram``.

    The rows are ``(n, *spatial_shape, d)``. The stack is a view ``(n, pieces, d, k)`` with
    positions adjacent in memory. The result is None if no such view exists or if another algorithm
    is faster.
    """
    if not x.size or x.ndim < 3 or x.dtype != dtype or x.shape[-1] > _FEW_FEATURES:
        return None
    images, d = np.moveaxis(x, -1, 1), x.shape[-1]
    positions = images[0, 0].size
    most = min(_POSITIONS, 2 * _UNPACKED // d**2)
    pieces = range(-(-positions // most), positions + 1)
    k = positions // next(count for count in pieces if positions % count == 0)
    if k < _LEAST_POSITIONS or not images[0, 0].flags.c_contiguous:
        return None
    return images.reshape(len(x), d, -1, k).swapaxes(1, 2)


def add_batched_gram(
    stack: Array, out: Array, how: Accumulation, scratch_bytes: int, workers: Workers
) -> None:
    """Compute both triangles of ``out ← beta·out + alpha·Σ x xᵀ``, in place.

    The stack is a view from ``as_gram_stack``. All threads together use ``scratch_bytes`` of
    scratch memory, or more if the products of one image are larger.
    """
    threads = threads_for(stack.size * (len(out) + _TO_READ), workers)
    parts = np.array_split(stack, min(threads, len(stack)))
    spare = scratch_bytes // (len(parts) * out.itemsize)
    sums = [np.zeros_like(out) for _ in parts]
    tasks = [partial(_add, *part, spare) for part in zip(parts, sums, strict=True)]
    run_tasks(tasks, threads, workers)
    scale(out, how.beta)
    out += how.alpha * sum(sums[1:], sums[0])


def _add(stack: Array, total: Array, spare: int) -> None:
    """Add the Gram matrix of all images to ``total``, with ``spare`` entries of scratch memory."""
    d, products = len(total), stack.shape[1] * total.size
    count = max(1, min(len(stack), _CACHED // stack[0].size, spare // products))
    buffer = np.empty((count, stack.shape[1], d, d), total.dtype)
    # In two halves: NumPy would call SYRK for a product of a matrix with itself.
    halves = [slice(d // 2), slice(d // 2, d)]
    for start in range(0, len(stack), count):
        images = stack[start : start + count]
        products_of_images = buffer[: len(images)]
        for half in halves:
            np.matmul(
                images, images[:, :, half].swapaxes(-1, -2), out=products_of_images[..., half]
            )
        total += products_of_images.sum(axis=(0, 1))
