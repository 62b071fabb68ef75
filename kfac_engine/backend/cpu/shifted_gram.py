"""Computes Gram matrices of patches with stride one from products of shifted images.

**Formula.** A patch at output position ``o`` has the features ``z[u, c] = x[c, o + u·d − begin]``
for taps ``u``, channels ``c`` and dilation ``d``, with zeros outside the image. The Gram matrix
``Σ z zᵀ`` has one ``(C, C)`` block for each pair of taps. With the offset ``δ = u − v`` and the
pixel ``q = o + v·d − begin`` it is

    block[u, v] = Σ_q x[:, q + δ·d] x[:, q]ᵀ.

Only the set of pixels ``q`` depends on ``v``, and it depends on ``v`` at the image border only. So
all pairs of taps with one offset share a product: the image, shifted by ``δ·d``, times the image.
The few pixels at the border are then subtracted from each block (``kernel_offsets``).

**Complexity.** A 2-D kernel of ``k × k`` taps has ``((2k − 1)² + 1) / 2`` offsets up to sign. With
``C`` channels and ``P`` pixels each offset costs ``C² P`` multiplications. The product of copied
patches costs ``k⁴ C² P / 2``. The ratio is 13 to 40 for ``3 × 3`` and 41 to 312 for ``5 × 5``. No
patch is copied. The scratch memory is one matrix ``(C, C)`` for each offset.

**Where it applies.** All strides are one and the kernel has several taps; padding and dilation are
arbitrary. It is slower than copied patches for few channels under a large kernel, and for few
pixels (``patch_gram.COSTS``).

**Two variants.** With few channels, all offsets along a line are one batch of small products, which
are then summed. With many channels, BLAS accumulates line after line in the matrix of an offset.
Both read images in channels-last order (``ChannelsLastLines``). Measurements are in ADR 9.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import scale
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.cpu.syrk import run_tasks, threads_for
from kfac_engine.backend.kernel_offsets import (
    LineProduct,
    OffsetGroup,
    border_strips,
    line_products,
)
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window


class ChannelsLastLines:
    """Reusable buffer that stores a group of images with the channels on the last axis.

    Lines are along the last axis of an image, and have ``length`` pixels. There are ``gap`` zero
    pixels before each line and after the last line. ``group`` is the largest number of images.
    """

    def __init__(
        self, images: int, channels: int, spatial_shape: tuple[int, ...], gap: int, dtype: DType
    ) -> None:
        self.group, self.channels, self._gap = images, channels, gap
        self.length = spatial_shape[-1]
        self._flat = np.zeros(buffer_numbers(images, channels, spatial_shape, gap), dtype)
        pixel = images * channels
        lines = self._flat[: self._flat.size - gap * pixel]
        with_gaps = lines.reshape(*spatial_shape[:-1], gap + spatial_shape[-1], images, channels)
        self._pixels = with_gaps[..., gap:, :, :]

    def fill(self, x: Array) -> None:
        """Copy at most ``group`` images to the buffer, and set its other entries to zero.

        The images are ``(n, channels, *spatial_shape)`` with any strides.
        """
        # One copy of each image would take half of the time on one thread. On two threads calls of
        # 10 µs take longer, because each call waits for the interpreter.
        self._pixels[..., : len(x), :] = np.moveaxis(x, (0, 1), (-2, -1))
        self._pixels[..., len(x) :, :] = 0.0

    def runs(
        self, lines: Sequence[range], pixels: range, *, shifts: int = 1, apart: int = 1
    ) -> Array:
        """Return a view of runs of pixels, and of the same runs shifted along their lines.

        ``lines`` has a range for each axis but the last. A run of ``pixels`` starts at ``-gap`` or
        later; it and its ``shifts``, ``apart`` pixels from each other, end at most ``gap`` pixels
        after the line. The result is ``(*lines, shifts, len(pixels)·group, channels)``.
        """
        *strides, pixel, _, number = self._pixels.strides
        start = (self._gap + pixels.start) * pixel
        start += sum(line.start * step for line, step in zip(lines, strides, strict=True))
        shape = (*map(len, lines), shifts, len(pixels) * self.group, self.channels)
        steps = (*strides, apart * pixel, self.channels * number, number)
        return as_strided(self._flat[start // number :], shape, steps)


def buffer_numbers(images: int, channels: int, spatial_shape: tuple[int, ...], gap: int) -> int:
    """Return the number of entries of the buffer of ``ChannelsLastLines``, zeros included.

    ``gap`` is the number of zero pixels before each line.
    """
    return images * channels * (prod(spatial_shape[:-1]) * (gap + spatial_shape[-1]) + gap)


# Largest number of channels for products in batches. For 32 images of 28 × 28 with 96 channels,
# batches take 32 ms and single lines 44 ms; with 128 channels, 62 ms and 57 ms.
FEW_CHANNELS = 96
# Number of entries of a line that stay in the first-level cache while the shifted lines are read.
_LINE = 5 << 10
# Number of entries from which a round takes longer than the calls that it makes.
_ROUND = 1 << 16
# Largest number of entries in a round with many channels.
_MOST = 1 << 21
# Number of entries of small products, or of border pixels, that are computed at a time.
_BATCH = 1 << 17
# Number of multiplications in the time that Python takes to prepare a product.
_PREPARED = 3_000_000
# Number of rows of a block that are written at a time.
_WRITTEN_ROWS = 64

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of the computation of one Gram matrix."""

    workers: Workers  # threads
    chunk_bytes: int  # bound of the copies of patches
    numbers: int  # bound of all other scratch memory of all threads together, in entries


def add_shifted_gram(
    x: Array, window: Window, out: Array, how: Accumulation, resources: Resources
) -> None:
    """Compute the lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches ``z``.

    There is at least one image in ``x``, ``(n, channels, *spatial_shape)``, and all strides of the
    window are one. The rows of ``out``, ``(taps·channels, taps·channels)``, may have gaps. Its
    upper triangle is overwritten with unspecified numbers. The resources have memory for at least
    ``scratch_numbers`` entries.
    """
    n, channels, *_ = x.shape
    workers = resources.workers
    groups = _groups(window, channels, x.shape[2:])
    products = [part for group in groups for part in group.products]
    work = n * channels**2 * sum(part.pairs for part in products)
    threads = threads_for(work, workers)
    if images_per_round(n, channels, x.shape[2:]) == n:
        lines = ChannelsLastLines(n, channels, x.shape[2:], window.reaches[-1], out.dtype)
        lines.fill(x)
        tasks = [partial(_add_group, group, lines, out, how.alpha, how.beta) for group in groups]
        run_tasks(tasks, threads, workers)
        return
    # Threads divide either the images or the offsets. If they divide the images, each thread
    # prepares all products and has separate sums.
    each = scratch_numbers(window, n, channels, x.shape[2:], 1)
    worth = work // (_PREPARED * max(1, len(products)))
    parts = max(1, min(threads, resources.numbers // each, worth))
    summed = channels**2 * sum(group.matrices for group in groups)
    fits = summed + threads * (each - summed) <= resources.numbers
    lots = threads if parts == 1 and fits else 1
    sums = [[_GroupSums(group, channels, out.dtype) for group in groups] for _ in range(parts)]
    tasks = [
        partial(_add_images, images, part[i::lots])
        for images, part in zip(np.array_split(x, parts), sums, strict=True)
        for i in range(min(lots, len(groups)))
    ]
    run_tasks(tasks, len(tasks), workers)
    tasks = [
        partial(_write, of_group, out, how.alpha, how.beta) for of_group in zip(*sums, strict=True)
    ]
    run_tasks(tasks, threads, workers)


def scratch_numbers(
    window: Window, images: int, channels: int, spatial_shape: tuple[int, ...], threads: int
) -> int:
    """Return the least scratch memory of ``add_shifted_gram``, in entries.

    The number of threads matters only if one round multiplies all images.
    """
    count, image = (
        images_per_round(images, channels, spatial_shape),
        channels * prod(spatial_shape),
    )
    buffer = buffer_numbers(count, channels, spatial_shape, window.reaches[-1])
    matrices = sorted(group.matrices for group in _groups(window, channels, spatial_shape))
    # Runs at the border are copied, at least a line of all images at a time.
    border = 2 * count * channels * spatial_shape[-1]
    batch = max(_batch_numbers(window, channels), _BATCH, border)
    if count < images:
        return max(buffer, image, _BATCH) + batch + sum(matrices) * channels**2
    return buffer + sum(batch + number * channels**2 for number in matrices[-threads:])


def images_per_round(images: int, channels: int, spatial_shape: tuple[int, ...]) -> int:
    """Return the number of images that are multiplied together.

    The number makes lines long enough for BLAS, and rounds about equal in size.
    """
    line, image = channels * spatial_shape[-1], channels * prod(spatial_shape)
    if channels <= FEW_CHANNELS:
        count = max(_LINE // line, _ROUND // image)
    else:
        # With operands four times as long as wide, reading and writing the sums takes little time.
        count = min(4 * channels // spatial_shape[-1], _MOST // image)
    return -(-images // -(-images // max(1, min(images, count))))


def _groups(
    window: Window, channels: int, spatial_shape: tuple[int, ...]
) -> tuple[OffsetGroup, ...]:
    return line_products(window, spatial_shape, joined=channels <= FEW_CHANNELS)


class _GroupSums:
    """The sums over images of the products of a group of offsets.

    ``sums`` has an array ``(alongs, channels, channels)`` for each product.
    """

    def __init__(self, group: OffsetGroup, channels: int, dtype: DType) -> None:
        self.group, self.dtype = group, dtype
        self._whole = [part for part in group.products if part.sign > 0]
        alongs = len(self._whole[0].alongs) if self._whole else 0
        self._of_lines = np.zeros((len(self._whole), alongs, channels, channels), dtype)
        of_lines = iter(self._of_lines)
        self.sums = [
            next(of_lines) if part.sign > 0 else np.zeros((1, channels, channels), dtype)
            for part in group.products
        ]

    def line_calls(self, lines: ChannelsLastLines, batch: Array) -> Iterator[Call]:
        """Yield functions that add the products of the whole lines that are then in the buffer.

        ``batch`` is scratch memory for the small products of one or several lines.
        """
        if not self._whole:
            return
        channels = self._of_lines.shape[-1]
        if channels > FEW_CHANNELS:
            for part, total in zip(self._whole, self._of_lines, strict=True):
                yield partial(blas.gemm_sum, *_runs(lines, part, 0, part.lines), total[0])
            return
        part, width = self._whole[0], self._of_lines[0].size
        hull = [_hull(axis) for axis in zip(*(part.lines for part in self._whole), strict=True)]
        for box in _boxes(hull, max(1, batch.size // width)):
            partners, pixels = _runs(lines, part, 0, box)
            small = batch[: prod(map(len, box)) * width].reshape(-1, width)
            products = small.reshape(*partners.shape[:-2], channels, channels)
            yield partial(np.matmul, partners.swapaxes(-1, -2), pixels, out=products)
            # A row is 1 for each line of a term and 0 for other lines, so that a product sums the
            # lines.
            counted = np.array([_within(box, other.lines) for other in self._whole], small.dtype)
            yield blas.gemm_call(
                counted, small.T, self._of_lines.reshape(-1, width), alpha=1.0, beta=1.0
            )

    def border_calls(self, lines: ChannelsLastLines, strip: range) -> Iterator[Call]:
        """Yield functions that add the negative terms of a strip of pixels in the buffer."""
        for part, total in zip(self.group.products, self.sums, strict=True):
            if part.sign < 0 and part.pixels.start in strip:
                numbers = len(part.pixels) * lines.group * total.shape[-1]
                for box in _boxes(part.lines, max(1, _BATCH // (2 * numbers))):
                    yield partial(_add_copied, *_runs(lines, part, strip.start, box), total[0])


def _add_group(
    group: OffsetGroup, lines: ChannelsLastLines, out: Array, alpha: float, beta: float
) -> None:
    """Compute the blocks of a group of offsets from a buffer that contains all images."""
    sums = _GroupSums(group, lines.channels, out.dtype)
    batch = np.empty(_batch_numbers(group.window, lines.channels), out.dtype)
    whole = range(lines.length)
    for call in chain(sums.line_calls(lines, batch), sums.border_calls(lines, whole)):
        call()
    _write([sums], out, alpha, beta)


def _add_images(x: Array, groups: Sequence[_GroupSums]) -> None:
    """Add the products of all images to ``groups``: of whole lines, then of border strips."""
    n, channels, *leading, length = x.shape
    window, dtype = groups[0].group.window, groups[0].dtype
    count = images_per_round(n, channels, (*leading, length))
    lines = ChannelsLastLines(count, channels, (*leading, length), window.reaches[-1], dtype)
    batch = np.empty(_batch_numbers(window, channels), dtype)
    _run_rounds(x, lines, [call for sums in groups for call in sums.line_calls(lines, batch)])
    del lines
    for strip in border_strips([sums.group for sums in groups]):
        count = max(1, min(n, _BATCH // (channels * prod(leading) * len(strip))))
        edge = ChannelsLastLines(count, channels, (*leading, len(strip)), 0, dtype)
        calls = [call for sums in groups for call in sums.border_calls(edge, strip)]
        _run_rounds(x[..., strip.start : strip.stop], edge, calls)


def _run_rounds(x: Array, lines: ChannelsLastLines, calls: Sequence[Call]) -> None:
    """Copy each round of images to the buffer, and run all calls for it."""
    for start in range(0, len(x), lines.group):
        lines.fill(x[start : start + lines.group])
        for call in calls:
            call()


def _runs(
    lines: ChannelsLastLines, part: LineProduct, origin: int, box: Sequence[range]
) -> tuple[Array, Array]:
    """Return views of the partners and the pixels of a product, for a box of lines.

    The box is a range for each axis but the last. The buffer starts at the pixel ``origin`` of the
    last axis. The views are ``(*box, alongs, k, channels)`` and ``(*box, 1, k, channels)``.
    """
    steps = (step * d for step, d in zip(part.leading, part.dilations[:-1], strict=True))
    others = [range(axis.start + s, axis.stop + s) for axis, s in zip(box, steps, strict=True)]
    pixels, partners = (
        range(run.start - origin, run.stop - origin) for run in (part.pixels, part.partners)
    )
    shifted = lines.runs(others, partners, shifts=len(part.alongs), apart=part.dilations[-1])
    return shifted, lines.runs(box, pixels)


def _add_copied(partners: Array, pixels: Array, total: Array) -> None:
    """Add ``Σ partnersᵀ pixels`` to ``total`` by one product; short runs are copied first."""
    rows, columns = (run.reshape(-1, run.shape[-1]) for run in (partners, pixels))
    total += rows.T @ columns


def _hull(ranges: Sequence[range]) -> range:
    return range(min(r.start for r in ranges), max(r.stop for r in ranges))


def _within(box: Sequence[range], lines: Sequence[range]) -> list[bool]:
    """Return whether each line of a box, in row-major order, is in a range of lines."""
    return [all(i in axis for i, axis in zip(line, lines, strict=True)) for line in product(*box)]


def _batch_numbers(window: Window, channels: int) -> int:
    """Return the number of entries for small products: at least one line with all offsets."""
    few = channels <= FEW_CHANNELS
    return max(_BATCH, (2 * window.kernel[-1] - 1) * channels**2) if few else 0


def _boxes(lines: Sequence[range], count: int) -> Iterator[tuple[range, ...]]:
    """Yield boxes of at most ``count`` lines each; leading axes are split first."""
    lengths = [
        min(len(axis), max(1, count // prod(map(len, lines[i + 1 :]))))
        for i, axis in enumerate(lines)
    ]
    return product(
        *(
            [axis[start : start + length] for start in range(0, len(axis), length)]
            for axis, length in zip(lines, lengths, strict=True)
        )
    )


def _write(parts: Sequence[_GroupSums], out: Array, alpha: float, beta: float) -> None:
    """Compute ``block ← beta·block + alpha·Σ terms`` for the blocks of a group of offsets.

    The parts are sums over disjoint sets of images; the first is overwritten with the total.
    """
    first, *others = parts
    for other in others:
        for total, addend in zip(first.sums, other.sums, strict=True):
            total += addend
    kernel = first.group.window.kernel
    channels = len(out) // prod(kernel)
    blocks = out.reshape(*kernel, channels, *kernel, channels)
    for u, v, terms in first.group.blocks:
        index: tuple[int | slice, ...] = (*u, slice(None), *v)
        matrices = [(first.sums[i][along], sign * alpha) for i, along, sign in terms]
        for start in range(0, channels, _WRITTEN_ROWS):
            rows = slice(start, start + _WRITTEN_ROWS)
            block = blocks[index][rows]
            scale(block, beta)
            for matrix, factor in matrices:
                block += matrix[rows] if factor == 1.0 else factor * matrix[rows]
