"""Computes Gram matrices of patches by the algorithm with the smaller estimated cost.

The patch at output position ``o`` is ``z[u, c] = x[c, o·stride + u·dilation − begin]`` over taps
``u`` and channels ``c``, with zeros outside the image. Two algorithms compute ``Σ z zᵀ``:

* *im2col*: patches of a few images, or of a few rows of one image, are copied and multiplied by
  SYRK; with a single tap, patches are pixels and need no copy (``gram``);
* *shifted*, for stride one: products of shifted images (``shifted_gram``).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.gram import CHUNK_BYTES, check_out, matrices, write_border
from kfac_engine.backend.cpu.shifted_gram import (
    FEW_CHANNELS,
    Resources,
    add_shifted_gram,
    images_per_round,
    scratch_numbers,
)
from kfac_engine.backend.cpu.syrk import accumulate, count_parts
from kfac_engine.backend.kernel_offsets import line_products
from kfac_engine.backend.patch_sums import patch_sums
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers, single_threaded_blas
from kfac_engine.backend.window import Window


def patch_second_moment(
    x: Array, window: Window, out: Array, how: Accumulation, scratch_bytes: int, workers: Workers
) -> None:
    """Compute the lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches, in place.

    Images ``(n, channels, *spatial_shape)`` with any strides are accumulated in the element type of
    ``out``, ``(d, d)`` with ``d = taps·channels (+ 1)``. It is C-contiguous, and features are
    tap-major. ``scratch_bytes`` bounds the scratch memory of all threads together.
    """
    channels, spatial_shape = x.shape[1], x.shape[2:]
    d = window.taps * channels
    check_out(out, d + how.homogeneous)
    positions = len(x) * prod(window.output_shape(spatial_shape))
    core = out[:d, :d]
    chunk_bytes = min(CHUNK_BYTES, scratch_bytes)
    numbers = (scratch_bytes - chunk_bytes) // out.itemsize
    with single_threaded_blas():
        images = Images(len(x), channels, spatial_shape)
        add = _ALGORITHMS[select_algorithm(window, images, numbers, workers.count)]
        add(x, window, core, how, Resources(workers, chunk_bytes, numbers))
    if how.homogeneous:
        write_border(out, patch_sums(x, window, out.dtype, np), positions, how)


def _add_im2col_gram(
    x: Array, window: Window, out: Array, how: Accumulation, resources: Resources
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` from copies of the patches ``z``."""
    positions = len(x) * prod(window.output_shape(x.shape[2:]))
    count = count_parts(positions, len(out), resources.workers, resources.numbers)
    parts = np.array_split(x, max(1, min(len(x), count)))
    chunk_bytes = resources.chunk_bytes // len(parts)
    pieces = [patch_matrices(part, window, out.dtype, chunk_bytes) for part in parts]
    accumulate(pieces, out, how, resources.workers)


# Algorithms by the names of ``COSTS``.
_ALGORITHMS = {"im2col": _add_im2col_gram, "shifted": add_shifted_gram}


# -- cost ------------------------------------------------------------------------------------------
#
# The unit of cost is a multiplication of SYRK at full speed, on one core in float32. The constants
# are fitted to 39 geometries with one to three axes, 1 to 512 channels, and 4 to 2000 pixels along
# an axis. ADR 9 compares estimates with measurements.


# Costs of copying an entry to channels-last order, of writing an entry of a block, and of copying
# an entry of a patch.
_COPIED_NUMBER = 60
_WRITTEN_NUMBER = 30
_PLAIN_NUMBER = 50
# Costs of preparing a product, of a BLAS call for a line, and of writing a block.
_CALL = 1_000_000
_LINE = 400_000
_BLOCK = 600_000
# Cost of a pair of pixels in a small product, in addition to its multiplications.
_PAIR = 130
# Number of rows that take as long to load as to multiply.
_PACKED_ROWS = 64


class Images(NamedTuple):
    """Sizes of a batch of images."""

    number: int
    channels: int
    spatial_shape: tuple[int, ...]


@lru_cache(maxsize=1024)
def select_algorithm(window: Window, images: Images, numbers: int, threads: int) -> str:
    """Return the name in ``COSTS`` of the algorithm with the lower estimated cost.

    It is ``"im2col"`` for a stride above one, a single tap, an empty batch and too little scratch
    memory, and where writing the blocks takes longer. ``numbers`` is the size of this memory in
    entries, without copies of patches.
    """
    if window.taps == 1 or set(window.strides) != {1} or not images.number:
        return "im2col"
    # Line products of many taps take long to list: only if they may be faster.
    if _writing(window, images.channels) >= _im2col(window, images):
        return "im2col"
    if scratch_numbers(window, *images, threads) > numbers:
        return "im2col"
    return min(COSTS, key=lambda name: COSTS[name](window, images))


def _shifted(window: Window, images: Images) -> float:
    """Return the cost of copying the images, multiplying lines, and writing the blocks."""
    count, channels, spatial_shape = images
    few = channels <= FEW_CHANNELS
    groups = line_products(window, spatial_shape, joined=few)
    products = [part for group in groups for part in group.products]
    pairs, calls = sum(part.pairs for part in products), _CALL * len(products)
    if not few:
        rounds = -(-count // images_per_round(*images))
        lines = sum(prod(map(len, part.lines)) for part in products if part.sign > 0)
        calls += _LINE * rounds * lines
    each = channels**2 + _PAIR if few else channels * (channels + _PACKED_ROWS)
    copied = _COPIED_NUMBER * channels * prod(spatial_shape)
    return count * (pairs * each + copied) + calls + _writing(window, channels)


def _writing(window: Window, channels: int) -> float:
    """Return the cost of writing the blocks of all pairs of taps."""
    blocks = window.taps * (window.taps + 1) // 2
    return _BLOCK * blocks + _WRITTEN_NUMBER * (window.taps * channels) ** 2


def _im2col(window: Window, images: Images) -> float:
    """Return the cost of copying the patches and multiplying them by SYRK."""
    features = window.taps * images.channels
    patches = images.number * prod(window.output_shape(images.spatial_shape))
    return patches * features * (features // 2 + _PLAIN_NUMBER)


COSTS: Mapping[str, Callable[[Window, Images], float]] = {"im2col": _im2col, "shifted": _shifted}


# -- copies of patches: all at once, or chunks as operands of BLAS ---------------------------------


def patches(x: Array, window: Window) -> Array:
    """Return all patches; entry ``[n, o, u·channels + c]`` is channel ``c`` under tap ``u``.

    ``x`` is ``(n, channels, *spatial_shape)`` with any strides. The result is a new array
    ``(n, positions, taps·channels)`` of the same type.
    """
    n, channels, *_ = x.shape
    outputs = window.output_shape(x.shape[2:])
    result = np.zeros((n, *outputs, *window.kernel, channels), x.dtype)
    _fill(np.moveaxis(result, -1, 1), x, window)
    return result.reshape(n, prod(outputs), window.taps * channels)


def patch_matrices(x: Array, window: Window, dtype: DType, chunk_bytes: int) -> Iterator[Array]:
    """Yield patches as matrices ``(taps·channels, k)`` for SYRK; the matrices share one buffer.

    Together they contain all patches of the images ``(n, channels, *spatial_shape)`` that see a
    pixel. A copy has at most ``chunk_bytes`` bytes, or more if one patch is larger.
    """
    spatial_shape = x.shape[2:]
    if window.taps == 1:
        pixels = [window.seen(axis, 0, spatial_shape)[1] for axis in range(len(spatial_shape))]
        yield from matrices(np.moveaxis(x[:, :, *pixels], 1, -1), dtype, chunk_bytes)
        return
    positions = max(1, chunk_bytes // (window.taps * x.shape[1] * dtype.itemsize))
    for part in window.split(spatial_shape, positions):
        step = max(1, positions // prod(part.output_shape(spatial_shape)))
        for start in range(0, len(x), step):
            images = x[start : start + step]
            # Only the last chunk can be smaller. The zeros of the padding are reused.
            if start == 0 or len(images) < step:
                canvas, matrix = _canvas(images, part, dtype)
            _fill(canvas, images, part)
            yield matrix


def _canvas(images: Array, window: Window, dtype: DType) -> tuple[Array, Array]:
    """Allocate zeros for patches, as an array for ``_fill`` and as a matrix.

    They are ``(n, channels, *outputs, *kernel)`` and ``(features, n·positions)``, views of one
    memory. Channels are innermost if they are innermost in the images, so that copies read and
    write in order.
    """
    n, channels, *spatial_shape = images.shape
    outputs = window.output_shape(tuple(spatial_shape))
    features = window.taps * channels
    if abs(images.strides[1]) < min(map(abs, images.strides[2:])):
        memory = np.zeros((n, *outputs, *window.kernel, channels), dtype)
        return np.moveaxis(memory, -1, 1), memory.reshape(-1, features).T
    memory = np.zeros((*window.kernel, channels, n, *outputs), dtype)
    axes = len(spatial_shape)
    canvas = np.moveaxis(memory, range(axes), range(-axes, 0)).swapaxes(0, 1)
    return canvas, memory.reshape(features, -1)


def _fill(canvas: Array, x: Array, window: Window) -> None:
    """Copy the pixels of each tap to ``canvas``, ``(n, channels, *outputs, *kernel)``."""
    spatial_shape = x.shape[2:]
    for tap in product(*map(range, window.kernel)):
        seen = [window.seen(axis, u, spatial_shape) for axis, u in enumerate(tap)]
        index: list[slice | int] = [outputs for outputs, _ in seen]
        canvas[:, :, *index, *tap] = x[:, :, *(pixels for _, pixels in seen)]
