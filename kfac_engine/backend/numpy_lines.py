"""Second moments of patches for stride one, from lines of many small images at once.

The block of taps ``v + δ`` and ``v`` is a sum over the pixels that tap ``v`` sees at the outputs:

    Σ_q x[:, q + δ·dilation] x[:, q]ᵀ.

Those pixels are a box, and the boxes of all taps ``v`` differ at their borders only. So along each
axis they are cut into segments that lie in a box as a whole or not at all; the moment of a product
of segments is computed once for all blocks that contain it. Under a 3 × 3 kernel with a pixel of
padding an axis has three segments where ``δ`` is zero, and one elsewhere.

Pixels of many images lie beside each other, images innermost, so that a segment of a line is one
matrix, and a long one where images are small.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise, product
from math import prod
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend import blas
from kfac_engine.backend.numpy_rank_k import scale, share, threads_for
from kfac_engine.backend.numpy_shift import Distance, Means, distances
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

# Pixels of an axis, and the taps that see all of them and their partners.
Segment: TypeAlias = tuple[range, tuple[int, ...]]
Box: TypeAlias = tuple[Segment, ...]
# So many numbers stay in the cache of a core, over all distances.
_CACHED = 1 << 18
# Rows of a block that are summed at a time.
_SUMMED_ROWS = 64


def add_lines(
    x: Array, window: Window, out: Array, alpha: float, beta: float, means: Means
) -> None:
    """Lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches ``z``.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides; at least one.
        window: Of stride one.
        out: ``(taps·channels, same)``; rows may lie apart. What is above the diagonal is lost.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        means: Threads, and memory for at least ``line_numbers``.
    """
    channels, sides = x.shape[1], x.shape[2:]
    count = together(len(x), channels, sides)
    memory = np.empty(count * channels * prod(sides), out.dtype)
    found = [_Blocks(window, *item) for item in boxes_of_all(window, sides).items()]
    threads = threads_for(x.size * channels * len(found) / 2, means.workers)

    def add(blocks: _Blocks, room: Array, last: bool) -> None:
        blocks.add(room, alpha)
        if last:
            blocks.write(out, beta)

    for start in range(0, len(x), count):
        images = x[start : start + count]
        room = memory[: images.size].reshape(*sides[:-1], channels, sides[-1], len(images))
        _fill(room, images, threads, means.workers)
        last = start + count >= len(x)
        share([partial(add, blocks, room, last) for blocks in found], threads, means.workers)


def line_numbers(
    window: Window, images: int, channels: int, sides: tuple[int, ...], threads: int
) -> int:
    """Numbers that must fit the working memory: some images, and moments.

    Args:
        window: Of stride one.
        images: Number of images.
        channels: Of each.
        sides: Of each.
        threads: At work.

    Returns:
        Their number.
    """
    count = together(images, channels, sides)
    boxes = sorted(map(len, boxes_of_all(window, sides).values()))
    # Moments are kept until all images were added; with all of them at once, a distance at a time.
    kept = sum(boxes if count < images else boxes[-threads:])
    return count * channels * prod(sides) + kept * channels**2


@lru_cache(maxsize=64)
def boxes_of_all(window: Window, sides: tuple[int, ...]) -> Mapping[Distance, Sequence[Box]]:
    """Products of segments, one of each axis, for every distance of two taps.

    Args:
        window: Of stride one.
        sides: Of the images.

    Returns:
        The shortest distances first, which have the most pixels.
    """
    steps = sorted(distances(window), key=lambda step: sum(map(abs, step)))
    axes = ([_segments(window, sides, i, s) for i, s in enumerate(step)] for step in steps)
    return {step: list(product(*some)) for step, some in zip(steps, axes, strict=True)}


def together(images: int, channels: int, sides: tuple[int, ...]) -> int:
    """How many images to take at a time: what a cache holds, but lines as long as moments wide."""
    cached = _CACHED // max(1, channels * prod(sides))
    return max(1, min(images, max(cached, -(-channels // sides[-1]))))


class _Blocks:
    """The blocks of all pairs of taps at one distance, and the moments that they are sums of.

    Args:
        window: Of stride one.
        step: The distance.
        boxes: What the pixels of its taps were cut into.
    """

    def __init__(self, window: Window, step: Distance, boxes: Sequence[Box]) -> None:
        self._kernel, self._step, self._boxes = window.kernel, step, boxes
        self._apart = [u * d for u, d in zip(step, window.dilations, strict=True)]
        self._moments: list[Array] = []

    def add(self, lines: Array, alpha: float) -> None:
        """Add the moments of some images, ``(*sides but the last, channels, last side, n)``."""
        channels = lines.shape[-3]
        if not self._moments:
            self._moments = [np.zeros((channels, channels), lines.dtype) for _ in self._boxes]
        for box, moment in zip(self._boxes, self._moments, strict=True):
            _add_box(lines, [pixels for pixels, _ in box], self._apart, moment, alpha)

    def write(self, out: Array, beta: float) -> None:
        """``block ← beta·block + Σ moments``; the moments are given up."""
        kernel, channels = self._kernel, len(out) // prod(self._kernel)
        blocks = out.reshape(*kernel, channels, *kernel, channels)
        for v in product(*map(_taps, self._step, kernel)):
            u = tuple(a + b for a, b in zip(v, self._step, strict=True))
            spot: tuple[int | slice, ...] = (*u, slice(None), *v)
            within = [
                moment
                for box, moment in zip(self._boxes, self._moments, strict=True)
                if all(tap in taps for tap, (_, taps) in zip(v, box, strict=True))
            ]
            _write(blocks[spot], within, beta)
        self._moments = []


def _segments(window: Window, sides: tuple[int, ...], axis: int, step: int) -> list[Segment]:
    """The pixels of an axis that have a partner a step away, by the taps whose boxes hold them."""
    side, apart = sides[axis], step * window.dilations[axis]
    boxes = {}
    for tap in _taps(step, window.kernel[axis]):
        _, pixels = window.seen(axis, tap, sides)
        low, high = max(pixels.start, -apart), min(pixels.stop, side - apart)
        if low < high:
            boxes[tap] = low, high
    cuts = sorted({edge for box in boxes.values() for edge in box})
    segments = []
    for low, high in pairwise(cuts):
        taps = tuple(tap for tap, (start, stop) in boxes.items() if start <= low < stop)
        if taps:
            segments.append((range(low, high), taps))
    return segments


def _taps(step: int, kernel: int) -> range:
    """The taps of an axis from which a step leads to another."""
    return range(max(0, -step), kernel - max(0, step))


def _fill(room: Array, x: Array, threads: int, workers: Workers) -> None:
    """Write images into ``room``, ``(*sides but the last, channels, last side, n)``."""
    lines = np.moveaxis(x, (0, 1), (-1, -3))
    bands = workers.bands(x.shape[1]) if threads > 1 else [slice(None)]
    copies = [partial(np.copyto, room[..., b, :, :], lines[..., b, :, :]) for b in bands]
    share(copies, threads, workers)


def _add_box(
    lines: Array, box: Sequence[range], apart: Sequence[int], out: Array, alpha: float
) -> None:
    """``out ← out + alpha·Σ x[:, q + apart] x[:, q]ᵀ`` over the pixels of a box, line by line."""
    *leading, pixels = box
    *over, along = apart
    for spot in product(*leading):
        here = _segment(lines[spot], pixels, 0)
        if any(apart):
            other = tuple(a + b for a, b in zip(spot, over, strict=True))
            blas.gemm(_segment(lines[other], pixels, along), here, out, alpha=alpha, beta=1.0)
        else:
            blas.syrk(here, out, alpha=alpha, beta=1.0)


def _segment(line: Array, pixels: range, apart: int) -> Array:
    """Some pixels of a line, so far along, of all images: ``(channels, k)``, a view."""
    shifted = line[:, pixels.start + apart : pixels.stop + apart]
    return shifted.reshape(len(line), -1)


def _write(block: Array, moments: Sequence[Array], beta: float) -> None:
    """``block ← beta·block + Σ moments``, in one pass over the block."""
    for start in range(0, len(block), _SUMMED_ROWS):
        rows = slice(start, start + _SUMMED_ROWS)
        scale(block[rows], beta)
        if moments:
            block[rows] += sum((moment[rows] for moment in moments[1:]), moments[0][rows])
