"""Decomposes a patch Gram matrix with stride one into products of shifted lines.

A patch Gram matrix has one block for each pair of kernel taps ``u`` and ``v``. With the *offset*
``δ = u − v`` and the dilation ``d``, the block is

    block[u, v] = Σ_q x[:, q + δ·d] x[:, q]ᵀ,

where ``q`` runs over the pixels that tap ``v`` sees at the outputs and that have a partner
``q + δ·d`` in the image. These pixels form a box. The boxes of all ``v`` with the same offset
differ at the borders of the image only, so most of the sum is the same for all of them.

Each axis is cut into *segments*: every box contains a whole segment or no part of it. Along all
axes but the last, a box is a sum of segments. Along the last axis, where lines run in memory, a box
is the whole line minus the segments outside the box. Lines therefore remain long, and one product
covers all offsets along a line.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, TypeAlias

from kfac_engine.backend.window import Window

# The difference of two taps, with one number for each axis.
Offset: TypeAlias = tuple[int, ...]
# Several taps of one axis, or one tap with a number for each axis.
Taps: TypeAlias = tuple[int, ...]
# A range of pixels of an axis, and the taps whose boxes contain it.
Segment: TypeAlias = tuple[range, Taps]


class LineProduct(NamedTuple):
    """The products ``Σ x[:, q + δ·d] x[:, q]ᵀ`` of lines, for some offsets along the line."""

    leading: Offset  # offset along all axes but the last
    alongs: range  # offsets along the last axis
    lines: tuple[range, ...]  # pixels ``q`` along all axes but the last
    pixels: range  # pixels ``q`` along the last axis; partners beyond the line are zero
    # For each axis but the last, the taps ``v`` whose block has this term.
    leading_taps: tuple[Taps, ...]
    # For each offset of ``alongs``, the taps ``v`` of the last axis whose block has this term.
    taps: tuple[Taps, ...]
    sign: int  # 1, or −1 for a segment outside the boxes of these taps
    dilations: tuple[int, ...]  # pixels from one tap to the next, for each axis

    @property
    def pairs(self) -> int:
        """Number of pairs of pixels that are multiplied, for one image."""
        return prod(map(len, (*self.lines, self.pixels, self.alongs)))

    @property
    def partners(self) -> range:
        """The pixels that ``pixels`` are multiplied by at the first offset, along the last axis."""
        shift = self.alongs.start * self.dilations[-1]
        return range(self.pixels.start + shift, self.pixels.stop + shift)

    def counts(self, v: Taps, along: int) -> bool:
        """Return whether the block of tap ``v`` and this offset along the line has this term."""
        if along not in self.alongs:
            return False
        counting = (*self.leading_taps, self.taps[along - self.alongs.start])
        return all(tap in taps for tap, taps in zip(v, counting, strict=True))


class OffsetBlock(NamedTuple):
    """A block of a patch Gram matrix as a sum of products."""

    u: Taps  # tap of the rows
    v: Taps  # tap of the columns
    # Index of a line product, index of the offset in its ``alongs``, and sign.
    terms: tuple[tuple[int, int, int], ...]


class OffsetGroup(NamedTuple):
    """A group of offsets; their line products are computed together and summed up to blocks."""

    window: Window
    products: tuple[LineProduct, ...]
    blocks: tuple[OffsetBlock, ...]

    @property
    def matrices(self) -> int:
        """Number of channel matrices that the products compute."""
        return sum(len(product.alongs) for product in self.products)


def kernel_offsets(window: Window) -> list[Offset]:
    """Return the offsets of all pairs of taps ``u ≥ v`` in row-major order, each offset once."""
    offsets = product(*(range(1 - k, k) for k in window.kernel))
    return [offset for offset in offsets if offset >= (0,) * len(offset)]


def first_taps(offset: int, kernel: int) -> range:
    """Return the taps ``v`` of an axis for which ``v + offset`` is a tap, too."""
    return range(max(0, -offset), kernel - max(0, offset))


@lru_cache(maxsize=256)
def line_products(
    window: Window, spatial_shape: tuple[int, ...], *, joined: bool
) -> tuple[OffsetGroup, ...]:
    """Return the products whose sums are the blocks of a patch Gram matrix; all strides are one.

    They yield all blocks on and below the diagonal. If ``joined``, all offsets along a line
    are one product, and a group has the offsets with equal leading offset. Otherwise each offset is
    a group. The most expensive group is first.
    """
    groups = []
    for leading in dict.fromkeys(offset[:-1] for offset in kernel_offsets(window)):
        kernel = window.kernel[-1]
        alongs = range(1 - kernel if any(leading) else 0, kernel)
        for together in [alongs] if joined else [range(s, s + 1) for s in alongs]:
            products = tuple(_products(window, spatial_shape, leading, together))
            blocks = tuple(_blocks(window, leading, together, products))
            groups.append(OffsetGroup(window, products, blocks))
    return tuple(sorted(groups, key=lambda group: -sum(part.pairs for part in group.products)))


def border_strips(groups: Sequence[OffsetGroup]) -> list[range]:
    """Return disjoint strips of the last axis that contain all negative terms with their partners.

    One strip contains each negative segment together with its partners.
    """
    products = (part for group in groups for part in group.products if part.sign < 0)
    spans = sorted(
        (min(part.pixels.start, part.partners.start), max(part.pixels.stop, part.partners.stop))
        for part in products
    )
    strips: list[range] = []
    for start, stop in spans:
        if strips and start < strips[-1].stop:
            strips[-1] = range(strips[-1].start, max(stop, strips[-1].stop))
        else:
            strips.append(range(start, stop))
    return strips


def _blocks(
    window: Window, leading: Offset, alongs: range, products: Sequence[LineProduct]
) -> Iterator[OffsetBlock]:
    """Yield the blocks of the offsets ``leading`` and ``alongs``, as sums of products."""
    for along in alongs:
        offset = (*leading, along)
        for v in product(*map(first_taps, offset, window.kernel)):
            u = tuple(a + b for a, b in zip(v, offset, strict=True))
            terms = [
                (i, along - part.alongs.start, part.sign)
                for i, part in enumerate(products)
                if part.counts(v, along)
            ]
            yield OffsetBlock(u, v, tuple(terms))


def _products(
    window: Window, spatial_shape: tuple[int, ...], leading: Offset, alongs: range
) -> Iterator[LineProduct]:
    """Yield the products of whole lines, and the products of the segments to subtract."""
    last = len(spatial_shape) - 1
    cuts = {s: _segments(window, spatial_shape, last, s) for s in alongs}
    seeing = {s: sorted({tap for _, taps in cuts[s] for tap in taps}) for s in alongs}
    seen = [s for s in alongs if seeing[s]]
    if not seen:
        return
    whole, pixels = range(min(seen), max(seen) + 1), range(spatial_shape[last])
    if len(whole) == 1:  # pixels without a partner add nothing
        pixels = range(cuts[seen[0]][0][0].start, cuts[seen[0]][-1][0].stop)
    boxes = [_segments(window, spatial_shape, axis, step) for axis, step in enumerate(leading)]
    for box in product(*boxes):
        if not all(taps for _, taps in box):
            continue
        lines, leading_taps = tuple(pixels for pixels, _ in box), tuple(taps for _, taps in box)
        taps = tuple(tuple(seeing[s]) for s in whole)
        yield LineProduct(leading, whole, lines, pixels, leading_taps, taps, 1, window.dilations)
        for s in seen:
            for segment, inside in cuts[s]:
                outside = tuple(tap for tap in seeing[s] if tap not in inside)
                if outside:
                    one = range(s, s + 1)
                    counting = leading_taps, (outside,)
                    yield LineProduct(leading, one, lines, segment, *counting, -1, window.dilations)


def _segments(
    window: Window, spatial_shape: tuple[int, ...], axis: int, offset: int
) -> list[Segment]:
    """Return the pixels of an axis that have a partner, cut at the borders of all boxes."""
    size, apart = spatial_shape[axis], offset * window.dilations[axis]
    first, stop = max(0, -apart), min(size, size - apart)
    boxes = {}
    for tap in first_taps(offset, window.kernel[axis]):
        _, pixels = window.seen(axis, tap, spatial_shape)
        low, high = max(pixels.start, first), min(pixels.stop, stop)
        if low < high:
            boxes[tap] = low, high
    cuts = sorted({first, stop, *(edge for box in boxes.values() for edge in box)})
    return [
        (range(low, high), tuple(tap for tap, (a, b) in boxes.items() if a <= low < b))
        for low, high in pairwise(cuts)
        if first <= low < high <= stop
    ]
