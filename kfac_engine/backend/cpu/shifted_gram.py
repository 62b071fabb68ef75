"""Second moments of patches for stride one, from products of lines with lines.

The block of taps ``v + δ`` and ``v`` sums ``x[:, q + δ·dilation] x[:, q]ᵀ`` over pixels ``q``, of
which most are the same for all ``v``. So a 3 × 3 kernel takes products of whole lines for 13
distances instead of the 45 blocks on and under the diagonal, and of a few pixels at the border,
where blocks of a distance differ (``kernel_offsets``). Lines of several images lie beside each
other, channels innermost (``channels_last``).

With few channels, lines are multiplied in batches, a small matrix for each, and these are summed:
such products BLAS takes from where they lie, and Python makes few calls. With many, BLAS adds line
after line to the moment.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from math import prod
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.cpu.channels_last import PixelLines, room_numbers
from kfac_engine.backend.cpu.syrk import scale, share, threads_for
from kfac_engine.backend.kernel_offsets import Group, LineProduct, borders, line_products
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

# Channels up to which lines are multiplied in batches: 32 images of 28 × 28 pixels take so many
# milliseconds on two threads, in batches and line by line: 32 and 44 with 96 channels, 62 and 57
# with 128.
FEW_CHANNELS = 96
# Numbers of a line that stay in the first cache while their partners pass.
_LINE = 5 << 10
# Numbers of images that are worth a round of calls; the most of a round with many channels.
_ROUND = 1 << 16
_MOST = 1 << 21
# Small products, and numbers at the border of images, at a time.
_BATCH = 1 << 17

# Multiplications in the time that Python takes to prepare a product.
_PREPARED = 3_000_000
# Rows of a block that are written at a time.
_WRITTEN_ROWS = 64

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Means:
    """What may be taken to add moments.

    Attributes:
        workers: Threads.
        chunk_bytes: Bound of the copies of patches.
        numbers: Bound of all other working memory, of all threads together.
    """

    workers: Workers
    chunk_bytes: int
    numbers: int


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
    n, channels, *_ = x.shape
    groups = _groups(window, channels, x.shape[2:])
    products = [part for group in groups for part in group.parts]
    work = n * channels**2 * sum(part.pairs for part in products)
    threads = threads_for(work, means.workers)
    if together(n, channels, x.shape[2:]) == n:
        lines = PixelLines(n, channels, x.shape[2:], window.reaches[-1], out.dtype)
        lines.fill(x)
        tasks = [partial(_add_group, group, lines, out, alpha, beta) for group in groups]
        share(tasks, threads, means.workers)
        return
    # Threads share the images, each with moments of its own and all products to prepare; or the
    # distances.
    each = line_numbers(window, n, channels, x.shape[2:], 1)
    worth = work // (_PREPARED * max(1, len(products)))
    parts = max(1, min(threads, means.numbers // each, worth))
    kept = channels**2 * sum(group.moments for group in groups)
    fits = kept + threads * (each - kept) <= means.numbers
    lots = threads if parts == 1 and fits else 1
    found = [[_Sums(group, channels, out.dtype) for group in groups] for _ in range(parts)]
    tasks = [
        partial(_add_images, images, sums[i::lots])
        for images, sums in zip(np.array_split(x, parts), found, strict=True)
        for i in range(min(lots, len(groups)))
    ]
    share(tasks, len(tasks), means.workers)
    tasks = [partial(_write, some, out, alpha, beta) for some in zip(*found, strict=True)]
    share(tasks, threads, means.workers)


def line_numbers(
    window: Window, images: int, channels: int, sides: tuple[int, ...], threads: int
) -> int:
    """Numbers that must fit the working memory.

    Args:
        window: Of stride one.
        images: Number of images.
        channels: Of each.
        sides: Of each.
        threads: At work, where all images are taken at once.

    Returns:
        Their number.
    """
    count, image = together(images, channels, sides), channels * prod(sides)
    room = room_numbers(count, channels, sides, window.reaches[-1])
    moments = sorted(group.moments for group in _groups(window, channels, sides))
    # Runs at the border are joined by copies, of a line of all images at least.
    batch = max(_batch_numbers(window, channels), _BATCH, 2 * count * channels * sides[-1])
    if count < images:
        return max(room, image, _BATCH) + batch + sum(moments) * channels**2
    return room + sum(batch + some * channels**2 for some in moments[-threads:])


def together(images: int, channels: int, sides: tuple[int, ...]) -> int:
    """How many images to take at a time.

    Args:
        images: Their number.
        channels: Of each.
        sides: Of each.

    Returns:
        As many as make lines long enough, in rounds of about equal size.
    """
    line, image = channels * sides[-1], channels * prod(sides)
    if channels <= FEW_CHANNELS:
        count = max(_LINE // line, _ROUND // image)
    else:
        # Four times as long as wide: then little time goes to reading and writing the moment.
        count = min(4 * channels // sides[-1], _MOST // image)
    return -(-images // -(-images // max(1, min(images, count))))


def _groups(window: Window, channels: int, sides: tuple[int, ...]) -> tuple[Group, ...]:
    return line_products(window, sides, joined=channels <= FEW_CHANNELS)


class _Sums:
    """The moments of a group of distances, added up over images.

    Args:
        group: Its products.
        channels: Of an image.
        dtype: Of the moments.

    Attributes:
        moments: For each product ``(alongs, channels, channels)``.
    """

    def __init__(self, group: Group, channels: int, dtype: DType) -> None:
        self.group, self.dtype = group, dtype
        self._whole = [part for part in group.parts if part.sign > 0]
        alongs = len(self._whole[0].alongs) if self._whole else 0
        self._of_lines = np.zeros((len(self._whole), alongs, channels, channels), dtype)
        of_lines = iter(self._of_lines)
        self.moments = [
            next(of_lines) if part.sign > 0 else np.zeros((1, channels, channels), dtype)
            for part in group.parts
        ]

    def whole(self, lines: PixelLines, batch: Array) -> Iterator[Call]:
        """What adds the products of whole lines, again and again, of what ``lines`` then hold.

        Args:
            lines: Images.
            batch: Working memory, for a line at least.
        """
        if not self._whole:
            return
        channels = self._of_lines.shape[-1]
        if channels > FEW_CHANNELS:
            for part, moment in zip(self._whole, self._of_lines, strict=True):
                yield partial(blas.gemm_sum, *_runs(lines, part, 0, part.lines), moment[0])
            return
        part, width = self._whole[0], self._of_lines[0].size
        hull = [_hull(some) for some in zip(*(part.lines for part in self._whole), strict=True)]
        for box in _cut(hull, max(1, batch.size // width)):
            there, here = _runs(lines, part, 0, box)
            found = batch[: prod(map(len, box)) * width].reshape(-1, width)
            products = found.reshape(*there.shape[:-2], channels, channels)
            yield partial(np.matmul, there.swapaxes(-1, -2), here, out=products)
            # Which of the lines count for which part: a product of few rows is their sum.
            counted = np.array([_within(box, other.lines) for other in self._whole], found.dtype)
            sums = self._of_lines.reshape(-1, width)
            yield blas.gemm_call(counted, found.T, sums, alpha=1.0, beta=1.0)

    def outside(self, lines: PixelLines, strip: range) -> Iterator[Call]:
        """The same for segments that lie in a strip of the lines, which is what ``lines`` hold."""
        for part, moment in zip(self.group.parts, self.moments, strict=True):
            if part.sign < 0 and part.pixels.start in strip:
                size = len(part.pixels) * lines.group * moment.shape[-1]
                for box in _cut(part.lines, max(1, _BATCH // (2 * size))):
                    yield partial(_join, *_runs(lines, part, strip.start, box), moment[0])


def _add_group(group: Group, lines: PixelLines, out: Array, alpha: float, beta: float) -> None:
    """Write the blocks of some distances, all images being there."""
    sums = _Sums(group, lines.channels, out.dtype)
    batch = np.empty(_batch_numbers(group.window, lines.channels), out.dtype)
    for call in chain(sums.whole(lines, batch), sums.outside(lines, range(lines.length))):
        call()
    _write([sums], out, alpha, beta)


def _add_images(x: Array, sums: Sequence[_Sums]) -> None:
    """Add the moments of images, some at a time: of whole lines, then of strips at the border."""
    n, channels, *leading, side = x.shape
    window, dtype = sums[0].group.window, sums[0].dtype
    count = together(n, channels, (*leading, side))
    lines = PixelLines(count, channels, (*leading, side), window.reaches[-1], dtype)
    batch = np.empty(_batch_numbers(window, channels), dtype)
    _add_rounds(x, lines, [call for some in sums for call in some.whole(lines, batch)])
    del lines
    for strip in borders([some.group for some in sums]):
        count = max(1, min(n, _BATCH // (channels * prod(leading) * len(strip))))
        edge = PixelLines(count, channels, (*leading, len(strip)), 0, dtype)
        calls = [call for some in sums for call in some.outside(edge, strip)]
        _add_rounds(x[..., strip.start : strip.stop], edge, calls)


def _add_rounds(x: Array, lines: PixelLines, calls: Sequence[Call]) -> None:
    """Fill the lines with images until all were there, and do all calls each time."""
    for start in range(0, len(x), lines.group):
        lines.fill(x[start : start + lines.group])
        for call in calls:
            call()


def _runs(
    lines: PixelLines, part: LineProduct, origin: int, box: Sequence[range]
) -> tuple[Array, Array]:
    """What some lines of a product meet, and the lines, ``(*box, alongs or 1, k, channels)``."""
    steps = (step * d for step, d in zip(part.leading, part.apart[:-1], strict=True))
    others = [range(some.start + s, some.stop + s) for some, s in zip(box, steps, strict=True)]
    pixels, partners = (
        range(run.start - origin, run.stop - origin) for run in (part.pixels, part.partners)
    )
    there = lines.runs(others, partners, shifts=len(part.alongs), apart=part.apart[-1])
    return there, lines.runs(box, pixels)


def _join(there: Array, here: Array, moment: Array) -> None:
    """Add ``Σ thereᵀ here`` by one product, of runs so short that they are better joined."""
    rows, columns = (some.reshape(-1, some.shape[-1]) for some in (there, here))
    moment += rows.T @ columns


def _hull(some: Sequence[range]) -> range:
    return range(min(one.start for one in some), max(one.stop for one in some))


def _within(box: Sequence[range], lines: Sequence[range]) -> list[bool]:
    """Which lines of a box are among some others, in row-major order."""
    return [all(i in some for i, some in zip(spot, lines, strict=True)) for spot in product(*box)]


def _batch_numbers(window: Window, channels: int) -> int:
    """Small products of lines at a time: of one line at least, with all distances along it."""
    few = channels <= FEW_CHANNELS
    return max(_BATCH, (2 * window.kernel[-1] - 1) * channels**2) if few else 0


def _cut(lines: Sequence[range], count: int) -> Iterator[tuple[range, ...]]:
    """Boxes that share the lines, with at most so many each; leading axes are cut first."""
    lengths = [
        min(len(some), max(1, count // prod(map(len, lines[axis + 1 :]))))
        for axis, some in enumerate(lines)
    ]
    return product(
        *(
            [some[start : start + length] for start in range(0, len(some), length)]
            for some, length in zip(lines, lengths, strict=True)
        )
    )


def _write(sums: Sequence[_Sums], out: Array, alpha: float, beta: float) -> None:
    """``block ← beta·block + alpha·Σ terms`` in the blocks of a group.

    Args:
        sums: Of all parts of the images; the first takes up the others.
        out: All blocks.
        alpha: Scale of the terms.
        beta: Scale of the old blocks.
    """
    first, *others = sums
    for some in others:
        for mine, theirs in zip(first.moments, some.moments, strict=True):
            mine += theirs
    kernel = first.group.window.kernel
    channels = len(out) // prod(kernel)
    blocks = out.reshape(*kernel, channels, *kernel, channels)
    for u, v, terms in first.group.blocks:
        spot: tuple[int | slice, ...] = (*u, slice(None), *v)
        moments = [(first.moments[i][along], sign * alpha) for i, along, sign in terms]
        for start in range(0, channels, _WRITTEN_ROWS):
            rows = slice(start, start + _WRITTEN_ROWS)
            block = blocks[spot][rows]
            scale(block, beta)
            for moment, factor in moments:
                block += moment[rows] if factor == 1.0 else factor * moment[rows]
