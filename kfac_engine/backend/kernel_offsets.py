"""Which pixels two taps of a window see together, for stride one: geometry only.

The block of taps ``v + δ`` and ``v`` of a second moment is a sum over the pixels ``q`` that tap
``v`` sees at the outputs, those whose partner exists:

    Σ_q x[:, q + δ·dilation] x[:, q]ᵀ.

Such pixels are a box, and the boxes of all taps ``v`` differ at their borders only. So along each
axis they are cut into segments that lie in a box as a whole or not at all. Along the axes but the
last, a box is a sum of segments. Along the last, where lines run, it is the whole line less the
segments outside: lines stay long, and all distances along them can be multiplied at once.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, TypeAlias

from kfac_engine.backend.window import Window

# From one tap to another, one step an axis.
Distance: TypeAlias = tuple[int, ...]
# Some taps of an axis.
Taps: TypeAlias = tuple[int, ...]
# Pixels of an axis, and the taps whose boxes hold them.
Segment: TypeAlias = tuple[range, Taps]


class LineProduct(NamedTuple):
    """Products of lines with lines that lie a distance from them, or several.

    Attributes:
        leading: Steps between taps along the axes but the last.
        alongs: Steps along the last axis, one or several.
        lines: Pixels of the axes but the last.
        pixels: Of each line; beyond its ends partners are zero.
        leading_taps: Of the axes but the last, the ``v`` that count it.
        taps: Of the last axis, for each of its steps.
        sign: One, or minus one for a segment that lies outside the boxes of these taps.
        apart: Pixels from one tap to the next, an axis.
    """

    leading: Distance
    alongs: range
    lines: tuple[range, ...]
    pixels: range
    leading_taps: tuple[Taps, ...]
    taps: tuple[Taps, ...]
    sign: int
    apart: Distance

    @property
    def pairs(self) -> int:
        """Of pixels, of one image."""
        return prod(map(len, (*self.lines, self.pixels, self.alongs)))

    @property
    def partners(self) -> range:
        """Where the pixels of a line meet it, at the first distance."""
        shift = self.alongs.start * self.apart[-1]
        return range(self.pixels.start + shift, self.pixels.stop + shift)

    def counts(self, v: Taps, along: int) -> bool:
        """Whether the block of the tap ``v`` and the one that lies so far along has it."""
        if along not in self.alongs:
            return False
        seeing = (*self.leading_taps, self.taps[along - self.alongs.start])
        return all(tap in taps for tap, taps in zip(v, seeing, strict=True))


class Block(NamedTuple):
    """A block of a second moment.

    Attributes:
        u: Tap of its rows.
        v: Tap of its columns.
        terms: What it is the sum of: index of a product, of a step along lines, and the sign.
    """

    u: Taps
    v: Taps
    terms: tuple[tuple[int, int, int], ...]


class Group(NamedTuple):
    """Some distances: their blocks, and all products that these are sums of."""

    window: Window
    parts: tuple[LineProduct, ...]
    blocks: tuple[Block, ...]

    @property
    def moments(self) -> int:
        """How many moments the products give."""
        return sum(len(part.alongs) for part in self.parts)


def distances(window: Window) -> list[Distance]:
    """All distances from a tap or an earlier one, in row-major order, to a tap."""
    steps = product(*(range(1 - k, k) for k in window.kernel))
    return [step for step in steps if step >= (0,) * len(step)]


def starts(step: int, kernel: int) -> range:
    """The taps of an axis from which a step leads to another."""
    return range(max(0, -step), kernel - max(0, step))


@lru_cache(maxsize=256)
def line_products(window: Window, sides: tuple[int, ...], *, joined: bool) -> tuple[Group, ...]:
    """What the blocks of a second moment are sums of.

    Args:
        window: Of stride one.
        sides: Of the images.
        joined: Whether all steps along a line are one product.

    Returns:
        Distances of equal leading steps together if joined, else each alone; those whose products
        take longest come first. Together they have every block on and under the diagonal.
    """
    found = []
    for leading in dict.fromkeys(step[:-1] for step in distances(window)):
        kernel = window.kernel[-1]
        alongs = range(1 - kernel if any(leading) else 0, kernel)
        for own in [alongs] if joined else [range(s, s + 1) for s in alongs]:
            parts = tuple(_parts(window, sides, leading, own))
            found.append(Group(window, parts, tuple(_blocks(window, leading, own, parts))))
    return tuple(sorted(found, key=lambda group: -sum(part.pairs for part in group.parts)))


def borders(groups: Sequence[Group]) -> list[range]:
    """Strips of pixels along the lines that hold all segments to take off, and their partners.

    Args:
        groups: Some of those of ``line_products``.

    Returns:
        Disjoint ranges; each segment lies in one of them together with its partners.
    """
    parts = (part for group in groups for part in group.parts if part.sign < 0)
    spans = sorted(
        (min(part.pixels.start, part.partners.start), max(part.pixels.stop, part.partners.stop))
        for part in parts
    )
    found: list[range] = []
    for start, stop in spans:
        if found and start < found[-1].stop:
            found[-1] = range(found[-1].start, max(stop, found[-1].stop))
        else:
            found.append(range(start, stop))
    return found


def _blocks(
    window: Window, leading: Distance, alongs: range, parts: Sequence[LineProduct]
) -> Iterator[Block]:
    for along in alongs:
        step = (*leading, along)
        for v in product(*map(starts, step, window.kernel)):
            u = tuple(a + b for a, b in zip(v, step, strict=True))
            terms = [
                (i, along - part.alongs.start, part.sign)
                for i, part in enumerate(parts)
                if part.counts(v, along)
            ]
            yield Block(u, v, tuple(terms))


def _parts(
    window: Window, sides: tuple[int, ...], leading: Distance, alongs: range
) -> Iterator[LineProduct]:
    """Whole lines, for some steps along them, and segments to take off again."""
    last = len(sides) - 1
    cuts = {s: _segments(window, sides, last, s) for s in alongs}
    seeing = {s: sorted({tap for _, taps in cuts[s] for tap in taps}) for s in alongs}
    some = [s for s in alongs if seeing[s]]
    if not some:
        return
    whole, pixels = range(min(some), max(some) + 1), range(sides[last])
    if len(whole) == 1:  # no need to multiply pixels without a partner
        pixels = range(cuts[some[0]][0][0].start, cuts[some[0]][-1][0].stop)
    boxes = [_segments(window, sides, axis, step) for axis, step in enumerate(leading)]
    for box in product(*boxes):
        if not all(taps for _, taps in box):
            continue
        lines, leading_taps = tuple(pixels for pixels, _ in box), tuple(taps for _, taps in box)
        taps = tuple(tuple(seeing[s]) for s in whole)
        yield LineProduct(leading, whole, lines, pixels, leading_taps, taps, 1, window.dilations)
        for s in some:
            for segment, inside in cuts[s]:
                outside = tuple(tap for tap in seeing[s] if tap not in inside)
                if outside:
                    one = range(s, s + 1)
                    seen = leading_taps, (outside,)
                    yield LineProduct(leading, one, lines, segment, *seen, -1, window.dilations)


def _segments(window: Window, sides: tuple[int, ...], axis: int, step: int) -> list[Segment]:
    """All pixels of an axis that have a partner a step away, by the taps whose boxes hold them."""
    side, apart = sides[axis], step * window.dilations[axis]
    first, stop = max(0, -apart), min(side, side - apart)
    boxes = {}
    for tap in starts(step, window.kernel[axis]):
        _, pixels = window.seen(axis, tap, sides)
        low, high = max(pixels.start, first), min(pixels.stop, stop)
        if low < high:
            boxes[tap] = low, high
    cuts = sorted({first, stop, *(edge for box in boxes.values() for edge in box)})
    return [
        (range(low, high), tuple(tap for tap, (a, b) in boxes.items() if a <= low < b))
        for low, high in pairwise(cuts)
        if first <= low < high <= stop
    ]
