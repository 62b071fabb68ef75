"""Computes weight gradients of convolutions from shifted copies of images and cotangents.

The gradient is ``dW[o, c, u] = Σ_{n,q} g[n, o, q] x[n, c, q·stride + u·dilation − begin]``. The
image is copied once for each tap of the last axes, and the cotangent once for each tap of the first
axes, shifted the other way. One matrix product then contains every pair of copies, which is every
tap. For a 3 × 3 kernel, three copies of each replace nine copies of the image. The sizes of the
product are three times as large, and BLAS computes it at twice the rate. A few images are copied at
a time, so the copies are in a cache when they are multiplied (ADR 7).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.cpu.syrk import run_tasks, threads_for
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

# Bytes of copies that stay in a cache together with the product, and their bound for few positions.
_CACHED_BYTES, _MOST_CACHED_BYTES = 1 << 20, 4 << 20
# Number of positions of an efficient product, and the number below which loading and storing the
# result dominates.
_ENOUGH_POSITIONS, _LEAST_POSITIONS = 1024, 256
# Number of multiplications in the time that one entry is copied within a cache.
_TO_COPY = 16


@dataclass(frozen=True, slots=True)
class Correlation:
    """Geometry of the sums of cotangent times pixel over images and positions, for every tap."""

    window: Window  # geometry of the convolution
    # Number of leading axes, all of stride one, along which the cotangent is shifted and positions
    # are pixels. Along the other axes the image is shifted and positions are outputs.
    cut: int
    groups: int  # number of groups of channels
    ins: int  # channels of the image in a group
    outs: int  # channels of the cotangent in a group
    spatial_shape: tuple[int, ...]  # shape of the image

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of output positions along each axis."""
        return *self.spatial_shape[: self.cut], *self.window.output_shape(self.spatial_shape)[
            self.cut :
        ]

    @property
    def image_rows(self) -> tuple[int, ...]:
        """Number of copies of the image for each axis, followed by the number of channels."""
        return *self.window.kernel[self.cut :], self.ins

    @property
    def cotangent_rows(self) -> tuple[int, ...]:
        """Number of copies of the cotangent for each axis, followed by the number of channels."""
        return *self.window.kernel[: self.cut], self.outs

    @property
    def copied(self) -> int:
        """Number of entries of images and cotangents that are copied for each position."""
        return self.groups * (prod(self.image_rows) + prod(self.cotangent_rows))

    @property
    def summed(self) -> int:
        """Number of entries of the result."""
        return self.groups * prod(self.image_rows) * prod(self.cotangent_rows)


class Scratch:
    """Scratch memory that tasks reuse, because new memory costs a page fault for each page.

    All simultaneous tasks together have at most ``most_bytes``.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._free: deque[Array] = deque()

    @contextmanager
    def bytes(self, count: int) -> Iterator[Array]:
        """Return a context with uninitialised memory for one task."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if memory.size < count:
            memory = np.empty(count, np.uint8)
        try:
            yield memory[:count]
        finally:
            self._free.append(memory)


def add_weight_gradient(
    x: Array, g: Array, window: Window, out: Array, workers: Workers, *, scratch: Scratch
) -> None:
    """Compute ``out[o, c, u] += Σ g[n, o, q] x[n, c, q·stride + u·dilation − begin]``.

    The images ``x`` are ``(n, groups · ins, *spatial_shape)``, float32 or float64, ``g`` has the
    cotangents of all outputs of the window, ``(n, groups · outs, *outputs)``, and ``out`` is
    ``(groups · outs, ins, *kernel)`` of the same type with any strides. More memory than
    ``scratch`` is allocated if one position of an image and the results of one thread do not fit.
    """
    groups = x.shape[1] // out.shape[1]
    sizes = groups, out.shape[1], out.shape[0] // groups
    geometry = Correlation(window, _cut(window, *sizes[1:]), *sizes, x.shape[2:])
    numbers = scratch.most_bytes * workers.free // workers.count // x.itemsize
    multiplied = len(x) * (
        prod(g.shape[2:]) * out.size + _TO_COPY * prod(geometry.grid) * geometry.copied
    )
    threads = threads_for(float(multiplied), workers)
    wanted = _target_numbers(geometry, x.itemsize)
    pieces = _pieces(x, g, geometry, max(1, min(threads, numbers // (geometry.summed + wanted))))
    room = max(min(numbers // len(pieces) - geometry.summed, wanted), geometry.copied // groups)
    sums = [np.zeros(_sum_shape(geometry), x.dtype) for _ in pieces]
    tasks = [
        partial(_add_piece, piece, total, room, scratch)
        for piece, total in zip(pieces, sums, strict=True)
    ]
    run_tasks(tasks, len(pieces), workers)
    for part in sums[1:]:
        sums[0] += part
    _add_taps(sums[0], geometry, out)


def _cut(window: Window, ins: int, outs: int) -> int:
    """Return the number of leading axes that minimises the copied entries."""
    kernel = window.kernel
    unit = next((axis for axis, s in enumerate(window.strides) if s > 1), len(kernel))
    return min(range(unit + 1), key=lambda i: ins * prod(kernel[i:]) + outs * prod(kernel[:i]))


def _target_numbers(geometry: Correlation, itemsize: int) -> int:
    """Return the number of entries that are copied at a time if memory suffices."""
    least, most = (size // itemsize for size in (_CACHED_BYTES, _MOST_CACHED_BYTES))
    group = geometry.copied // geometry.groups
    return max(least, min(group * _ENOUGH_POSITIONS, most), group * _LEAST_POSITIONS)


def _sum_shape(geometry: Correlation) -> tuple[int, ...]:
    return geometry.groups, prod(geometry.cotangent_rows), prod(geometry.image_rows)


def _add_taps(total: Array, geometry: Correlation, out: Array) -> None:
    """Add the product of each pair of copies to its tap of ``out``."""
    axes, cut = len(geometry.window.kernel), geometry.cut
    taps = total.reshape(geometry.groups, *geometry.cotangent_rows, *geometry.image_rows)
    first, last = range(1, cut + 1), range(cut + 2, axes + 2)
    transposed = taps.transpose(0, cut + 1, axes + 2, *first, *last)
    kernel = out.reshape(
        geometry.groups, geometry.outs, *out.shape[1:]
    )  # a view, because it only splits an axis
    kernel += transposed


class _Piece(NamedTuple):
    """Images, or positions of images, with their cotangents and geometry."""

    x: Array
    g: Array
    geometry: Correlation


def _pieces(x: Array, g: Array, geometry: Correlation, count: int) -> list[_Piece]:
    """Split the sum into about ``count`` equal pieces, by images or by positions."""
    if count == 1:
        return [_Piece(x, g, geometry)]
    if len(x) >= count:
        parts = zip(np.array_split(x, count), np.array_split(g, count), strict=True)
        return [_Piece(*part, geometry) for part in parts]
    return list(_split_positions(_Piece(x, g, geometry), ceil(prod(geometry.grid) / count)))


def _split_positions(piece: _Piece, positions: int) -> Iterator[_Piece]:
    """Yield pieces along the longest axis with at most ``positions`` positions in an image."""
    x, g, geometry = piece
    grid, window = geometry.grid, geometry.window
    axis = max(range(len(grid)), key=lambda i: grid[i])
    length = max(1, positions * grid[axis] // prod(grid))
    if length >= grid[axis]:
        yield piece
        return
    for start in range(0, grid[axis], length):
        band = range(start, min(start + length, grid[axis]))
        there = (slice(None),) * (2 + axis) + (slice(band.start, band.stop),)
        if axis < geometry.cut:  # a piece has a part of the pixels and all outputs
            spatial_shape = (
                *geometry.spatial_shape[:axis],
                len(band),
                *geometry.spatial_shape[axis + 1 :],
            )
            begins, ends = [*window.begins], [*window.ends]
            begins[axis] += band.start
            ends[axis] += geometry.spatial_shape[axis] - band.stop
            part = replace(window, begins=tuple(begins), ends=tuple(ends))
            yield _Piece(x[there], g, replace(geometry, window=part, spatial_shape=spatial_shape))
        else:
            part = window.restricted(axis, geometry.spatial_shape, band)
            yield _Piece(x, g[there], replace(geometry, window=part))


def _add_piece(piece: _Piece, total: Array, numbers: int, scratch: Scratch) -> None:
    """Add the products of a piece to ``total``; copies have at most ``numbers`` entries."""
    for first, part in _group_slices(piece, numbers):
        result = total[first : first + part.geometry.groups]
        positions = numbers // part.geometry.copied
        for band in _split_positions(part, positions):
            step = max(1, positions // prod(band.geometry.grid))
            whole = len(band.x) - len(band.x) % step
            for images, count in ((slice(whole), step), (slice(whole, None), len(band.x) - whole)):
                chunk = _Piece(band.x[images], band.g[images], band.geometry)
                if len(chunk.x):
                    room = max(numbers, count * prod(band.geometry.grid) * part.geometry.copied)
                    with scratch.bytes(room * total.itemsize) as memory:
                        _add_chunks(chunk, result, count, memory.view(total.dtype))


def _group_slices(piece: _Piece, numbers: int) -> Iterator[tuple[int, _Piece]]:
    """Yield slices of channel groups whose copies fit ``numbers`` entries, with their start."""
    x, g, geometry = piece
    most = max(1, numbers // (geometry.copied // geometry.groups * _ENOUGH_POSITIONS))
    for first in range(0, geometry.groups, most):
        part = replace(geometry, groups=min(most, geometry.groups - first))
        ins, outs = (
            value[:, first * channels : (first + part.groups) * channels]
            for value, channels in ((x, geometry.ins), (g, geometry.outs))
        )
        yield first, _Piece(ins, outs, part)


def _add_chunks(piece: _Piece, total: Array, count: int, memory: Array) -> None:
    """Add the products of a piece to ``total``, ``count`` images at a time."""
    x, g, geometry = piece
    # Views are created before the loop: threads wait for each other in Python code.
    shapes = [
        (geometry.groups, *rows, count, *geometry.grid)
        for rows in (geometry.image_rows, geometry.cotangent_rows)
    ]
    pixels, cotangents = _zeros(memory, shapes)
    left, right = (
        canvas.reshape(len(total), side, -1)
        for canvas, side in zip((cotangents, pixels), total.shape[1:], strict=True)
    )
    products = [
        blas.gemm_call(rows, columns, out, alpha=1.0, beta=1.0)
        for rows, columns, out in zip(left, right, total, strict=True)
    ]
    copies = [
        *_copies(x, geometry, pixels, of_image=True),
        *_copies(g, geometry, cotangents, of_image=False),
    ]
    for start in range(0, len(x), count):
        for canvas, source in copies:
            np.copyto(canvas, source[start : start + count])
        for add_product in products:
            add_product()


def _zeros(memory: Array, shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    """Yield arrays of zeros, one after the other in ``memory``."""
    start = 0
    for shape in shapes:
        numbers = memory[start : start + prod(shape)]
        numbers.fill(0)
        start += prod(shape)
        yield numbers.reshape(shape)


def _copies(
    value: Array, geometry: Correlation, canvas: Array, *, of_image: bool
) -> Iterator[tuple[Array, Array]]:
    """Yield the destination of each tap for a few images, and its source for all images.

    The canvas contains zeros, ``(groups, *copies, channels, images, *grid)``. Positions where a tap
    sees no pixel remain zero. In images, a tap of
    the last axes sees pixels at the positions of outputs. In cotangents, a tap of the first axes is
    at a pixel for one output.
    """
    window, cut = geometry.window, geometry.cut
    axes = range(cut, len(geometry.grid)) if of_image else range(cut)
    source = value.reshape(len(value), geometry.groups, -1, *value.shape[2:])
    taps = 1 + len(axes)
    there = np.moveaxis(canvas, (taps + 1, 0, taps), (0, 1, 2))
    for tap in product(*(range(window.kernel[axis]) for axis in axes)):
        at: list[slice | int] = [slice(None)] * len(geometry.grid)
        of = at.copy()
        for axis, u in zip(axes, tap, strict=True):
            seen = window.seen(axis, u, geometry.spatial_shape)
            at[axis], of[axis] = seen if of_image else seen[::-1]
        yield there[:, :, :, *tap, *at], source[:, :, :, *of]
