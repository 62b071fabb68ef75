"""Gradients of the kernels of convolutions: for each tap, cotangent times the pixels under it.

The image is copied once for each tap of some axes, the cotangent once for each tap of the others,
moved the other way. One product of matrices then holds every pair of copies, which is every tap: a
kernel of 3 × 3 takes three copies of each instead of nine of the image, and a product with sides
three times as long, which BLAS does at twice the rate. A few images are copied at a time, so that
the copies are still in a cache when they are multiplied.

Milliseconds on one thread at some 120 GFLOP/s, of 128 images, 3 × 3 taps:

| channels, pixels | copies of image and cotangent | copies of the image alone |
|---|---|---|
| 16 → 16, 32 × 32 | 9.4 | 25 |
| 32 → 32, 16 × 16 | 7.5 | 16 |
| 64 → 64, 8 × 8 | 6.6 | 12 |
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

# Copies that stay in a cache beside the product; more of them where those are of few positions.
_CACHED_BYTES, _MOST_CACHED_BYTES = 1 << 20, 4 << 20
# Positions that make a product of BLAS quick, and those below which loading and storing its result
# takes longer than adding to it.
_ENOUGH_POSITIONS, _LEAST_POSITIONS = 1024, 256
# Multiplications in the time that it takes to copy a number within a cache.
_TO_COPY = 16


@dataclass(frozen=True, slots=True)
class Correlation:
    """A sum over images and positions of cotangent times pixel, for every tap.

    Attributes:
        window: How the kernel slides.
        cut: Along the first ``cut`` axes, all of stride one, the cotangent is moved and positions
            are those of pixels; along the others the image is, and they are those of the outputs.
        groups: Of channels.
        ins: Channels of the image in a group.
        outs: Channels of the cotangent in a group.
        spatial_shape: Pixels of the image an axis.
    """

    window: Window
    cut: int
    groups: int
    ins: int
    outs: int
    spatial_shape: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Positions an axis."""
        return *self.spatial_shape[: self.cut], *self.window.output_shape(self.spatial_shape)[
            self.cut :
        ]

    @property
    def image_rows(self) -> tuple[int, ...]:
        """Copies of the image an axis, and channels."""
        return *self.window.kernel[self.cut :], self.ins

    @property
    def cotangent_rows(self) -> tuple[int, ...]:
        """Copies of the cotangent an axis, and channels."""
        return *self.window.kernel[: self.cut], self.outs

    @property
    def copied(self) -> int:
        """Numbers copied for each position."""
        return self.groups * (prod(self.image_rows) + prod(self.cotangent_rows))

    @property
    def summed(self) -> int:
        """Numbers of the result."""
        return self.groups * prod(self.image_rows) * prod(self.cotangent_rows)


class Scratch:
    """Working memory that one task leaves to the next: fresh memory costs a fault for each page.

    Args:
        most_bytes: Of all tasks that run at a time.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._free: deque[Array] = deque()

    @contextmanager
    def bytes(self, count: int) -> Iterator[Array]:
        """Memory for the time of a task, of any content."""
        try:
            held = self._free.pop()
        except IndexError:
            held = np.empty(0, np.uint8)
        if held.size < count:
            held = np.empty(count, np.uint8)
        try:
            yield held[:count]
        finally:
            self._free.append(held)


def add_weight_gradient(
    x: Array, g: Array, window: Window, out: Array, workers: Workers, *, scratch: Scratch
) -> None:
    """``out[o, c, u] += Σ g[n, o, q] x[n, c, q·stride + u·dilation − begin]``.

    Args:
        x: Images, ``(n, groups · ins, *spatial_shape)``, float32 or float64.
        g: Cotangents of all outputs of the window, ``(n, groups · outs, *outputs)``.
        window: How the kernel slides.
        out: ``(groups · outs, ins, *kernel)``, of the same dtype, any strides.
        workers: Threads.
        scratch: Working memory of all threads together; more only where one position of an image
            and the results of one thread do not fit.
    """
    groups = x.shape[1] // out.shape[1]
    sizes = groups, out.shape[1], out.shape[0] // groups
    how = Correlation(window, _cut(window, *sizes[1:]), *sizes, x.shape[2:])
    free = len(workers.row_blocks(workers.count))  # the others are at tasks of their own
    numbers = scratch.most_bytes * free // workers.count // x.itemsize
    multiplied = len(x) * (prod(g.shape[2:]) * out.size + _TO_COPY * prod(how.grid) * how.copied)
    threads = threads_for(float(multiplied), workers)
    wanted = _wanted(how, x.itemsize)
    pieces = _shares(x, g, how, max(1, min(threads, numbers // (how.summed + wanted))))
    room = max(min(numbers // len(pieces) - how.summed, wanted), how.copied // groups)
    sums = [np.zeros(_sum_shape(how), x.dtype) for _ in pieces]
    tasks = [
        partial(_add_piece, piece, total, room, scratch)
        for piece, total in zip(pieces, sums, strict=True)
    ]
    run_tasks(tasks, len(pieces), workers)
    for part in sums[1:]:
        sums[0] += part
    _add_taps(sums[0], how, out)


def _cut(window: Window, ins: int, outs: int) -> int:
    """The division of axes that copies the fewest numbers."""
    kernel = window.kernel
    unit = next((axis for axis, s in enumerate(window.strides) if s > 1), len(kernel))
    return min(range(unit + 1), key=lambda i: ins * prod(kernel[i:]) + outs * prod(kernel[:i]))


def _wanted(how: Correlation, itemsize: int) -> int:
    """Numbers of copies made at a time, where memory allows."""
    least, most = (size // itemsize for size in (_CACHED_BYTES, _MOST_CACHED_BYTES))
    group = how.copied // how.groups
    return max(least, min(group * _ENOUGH_POSITIONS, most), group * _LEAST_POSITIONS)


def _sum_shape(how: Correlation) -> tuple[int, ...]:
    return how.groups, prod(how.cotangent_rows), prod(how.image_rows)


def _add_taps(total: Array, how: Correlation, out: Array) -> None:
    """Add the products of all pairs of copies where their tap stands in the kernel."""
    axes, cut = len(how.window.kernel), how.cut
    taps = total.reshape(how.groups, *how.cotangent_rows, *how.image_rows)
    first, last = range(1, cut + 1), range(cut + 2, axes + 2)
    turned = taps.transpose(0, cut + 1, axes + 2, *first, *last)
    kernel = out.reshape(how.groups, how.outs, *out.shape[1:])  # a view: it only splits an axis
    kernel += turned


class _Piece(NamedTuple):
    """Some images, or some positions of all: pixels and cotangents that meet there, and how."""

    x: Array
    g: Array
    how: Correlation


def _shares(x: Array, g: Array, how: Correlation, count: int) -> list[_Piece]:
    """About so many pieces of equal size: of the images, or of the positions of few images."""
    if count == 1:
        return [_Piece(x, g, how)]
    if len(x) >= count:
        halves = zip(np.array_split(x, count), np.array_split(g, count), strict=True)
        return [_Piece(*half, how) for half in halves]
    return list(_bands(_Piece(x, g, how), ceil(prod(how.grid) / count)))


def _bands(piece: _Piece, positions: int) -> Iterator[_Piece]:
    """Bands along the longest axis, where the positions of an image are more than so many."""
    x, g, how = piece
    grid, window = how.grid, how.window
    axis = max(range(len(grid)), key=lambda i: grid[i])
    length = max(1, positions * grid[axis] // prod(grid))
    if length >= grid[axis]:
        yield piece
        return
    for start in range(0, grid[axis], length):
        band = range(start, min(start + length, grid[axis]))
        there = (slice(None),) * (2 + axis) + (slice(band.start, band.stop),)
        if axis < how.cut:  # some pixels, and all outputs that might see them
            spatial_shape = (*how.spatial_shape[:axis], len(band), *how.spatial_shape[axis + 1 :])
            begins, ends = [*window.begins], [*window.ends]
            begins[axis] += band.start
            ends[axis] += how.spatial_shape[axis] - band.stop
            part = replace(window, begins=tuple(begins), ends=tuple(ends))
            yield _Piece(x[there], g, replace(how, window=part, spatial_shape=spatial_shape))
        else:
            part = window.restricted(axis, how.spatial_shape, band)
            yield _Piece(x, g[there], replace(how, window=part))


def _add_piece(piece: _Piece, total: Array, numbers: int, scratch: Scratch) -> None:
    """Add the products of a piece; copies take so many numbers."""
    for first, part in _some_groups(piece, numbers):
        there = total[first : first + part.how.groups]
        positions = numbers // part.how.copied
        for band in _bands(part, positions):
            step = max(1, positions // prod(band.how.grid))
            whole = len(band.x) - len(band.x) % step
            for images, count in ((slice(whole), step), (slice(whole, None), len(band.x) - whole)):
                some = _Piece(band.x[images], band.g[images], band.how)
                if len(some.x):
                    room = max(numbers, count * prod(band.how.grid) * part.how.copied)
                    with scratch.bytes(room * total.itemsize) as memory:
                        _add_chunks(some, there, count, memory.view(total.dtype))


def _some_groups(piece: _Piece, numbers: int) -> Iterator[tuple[int, _Piece]]:
    """As many groups of channels at a time as leave room for enough positions, with the first."""
    x, g, how = piece
    most = max(1, numbers // (how.copied // how.groups * _ENOUGH_POSITIONS))
    for first in range(0, how.groups, most):
        part = replace(how, groups=min(most, how.groups - first))
        ins, outs = (
            value[:, first * channels : (first + part.groups) * channels]
            for value, channels in ((x, how.ins), (g, how.outs))
        )
        yield first, _Piece(ins, outs, part)


def _add_chunks(piece: _Piece, total: Array, count: int, memory: Array) -> None:
    """Add the products of a piece, so many images at a time."""
    x, g, how = piece
    # Threads wait for each other where Python runs: views are made before the loop.
    shapes = [
        (how.groups, *rows, count, *how.grid) for rows in (how.image_rows, how.cotangent_rows)
    ]
    seen, given = _zeros(memory, shapes)
    left, right = (
        canvas.reshape(len(total), side, -1)
        for canvas, side in zip((given, seen), total.shape[1:], strict=True)
    )
    products = [
        blas.gemm_call(rows, columns, out, alpha=1.0, beta=1.0)
        for rows, columns, out in zip(left, right, total, strict=True)
    ]
    copies = [*_copies(x, how, seen, of_image=True), *_copies(g, how, given, of_image=False)]
    for start in range(0, len(x), count):
        for canvas, source in copies:
            np.copyto(canvas, source[start : start + count])
        for add_product in products:
            add_product()


def _zeros(memory: Array, shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    """Zeros of some shapes, one behind the other in the given memory."""
    start = 0
    for shape in shapes:
        numbers = memory[start : start + prod(shape)]
        numbers.fill(0)
        start += prod(shape)
        yield numbers.reshape(shape)


class _Copy(NamedTuple):
    """Where a tap's values go, of some images, and where they come from, of all images."""

    canvas: Array
    source: Array


def _copies(value: Array, how: Correlation, canvas: Array, *, of_image: bool) -> Iterator[_Copy]:
    """What each tap meets at the positions; zeros where it meets nothing, which stay.

    Args:
        value: Images or cotangents.
        how: Where they meet.
        canvas: ``(groups, *copies, channels, images, *grid)`` of zeros.
        of_image: Which of both ``value`` is. A tap of the last axes sees pixels at the positions of
            outputs; a tap of the first axes lies at a pixel for one output.
    """
    window, cut = how.window, how.cut
    axes = range(cut, len(how.grid)) if of_image else range(cut)
    source, taps = _grouped(value, how), 1 + len(axes)
    there = np.moveaxis(canvas, (taps + 1, 0, taps), (0, 1, 2))
    for tap in product(*(range(window.kernel[axis]) for axis in axes)):
        at: list[slice | int] = [slice(None)] * len(how.grid)
        of = at.copy()
        for axis, u in zip(axes, tap, strict=True):
            seen = window.seen(axis, u, how.spatial_shape)
            at[axis], of[axis] = seen if of_image else seen[::-1]
        yield _Copy(there[:, :, :, *tap, *at], source[:, :, :, *of])


def _grouped(value: Array, how: Correlation) -> Array:
    """``(n, groups · channels, *spatial_shape)`` as ``(n, groups, channels, *spatial_shape)``."""
    return value.reshape(len(value), how.groups, -1, *value.shape[2:])
