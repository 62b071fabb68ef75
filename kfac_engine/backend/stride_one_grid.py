"""The full grid of a window of stride one, and the frame around its own outputs.

Over the *full grid*, every output position whose patch can see a pixel, the second moment of
patches depends on the distance of two taps alone. A layer's own outputs are the full grid less a
*frame*; positions outside the full grid see nothing and count for nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kfac_engine.backend.window import Window


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of output positions that see the image through some of the taps only.

    Attributes:
        axis: Spatial axis along which the box lies outside the window's own outputs.
        taps: Adjacent taps of this axis that see anything; of the other axes all count.
        window: The positions, with these taps.
    """

    axis: int
    taps: slice
    window: Window


def full_grid(window: Window, spatial_shape: tuple[int, ...]) -> tuple[range, ...]:
    """All output positions that could see a pixel, own or not.

    Args:
        window: Of stride one.
        spatial_shape: Pixels of the image an axis.

    Returns:
        A range an axis, counted as the window counts.
    """
    return tuple(
        range(begin - reach, begin + side)
        for begin, reach, side in zip(window.begins, window.reaches, spatial_shape, strict=True)
    )


def frame(window: Window, spatial_shape: tuple[int, ...]) -> Iterator[Slab]:
    """The full grid less the window's own outputs, as disjoint slabs.

    A slab lies outside the own outputs along one axis, inside along the axes before it, anywhere in
    the full grid along those after it. It is as thick as all its positions see the same taps.

    Args:
        window: Of stride one.
        spatial_shape: Pixels of the image an axis.

    Yields:
        Slabs that see something.
    """
    grid, outputs = full_grid(window, spatial_shape), window.output_shape(spatial_shape)
    own = [_common(line, range(count)) for line, count in zip(grid, outputs, strict=True)]
    around = window
    for axis, line in enumerate(grid):
        around = around.restricted(axis, spatial_shape, line)
    # From here on positions are counted from the start of the full grid.
    kept = [
        range(mine.start - line.start, mine.stop - line.start)
        for mine, line in zip(own, grid, strict=True)
    ]
    for axis, (line, mine) in enumerate(zip(grid, kept, strict=True)):
        for outside in (range(mine.start), range(mine.stop, len(line))):
            yield from _slabs(around, axis, spatial_shape, outside)
        if not mine:
            return
        around = around.restricted(axis, spatial_shape, mine)


def _slabs(
    window: Window, axis: int, spatial_shape: tuple[int, ...], outside: range
) -> Iterator[Slab]:
    """Some positions of one axis, grouped by the taps of that axis that see a pixel from there."""
    for (first, stop), group in groupby(outside, lambda o: _sight(window, axis, o, spatial_shape)):
        positions = list(group)
        if first < stop:
            taps, run = slice(first, stop), range(positions[0], positions[-1] + 1)
            yield Slab(axis, taps, window.restricted(axis, spatial_shape, run, taps))


def _sight(
    window: Window, axis: int, output: int, spatial_shape: tuple[int, ...]
) -> tuple[int, int]:
    """First tap of an axis that sees a pixel from ``output``, and the one after the last."""
    pixel, step = output - window.begins[axis], window.dilations[axis]
    first = max(0, -(pixel // step))
    return first, max(
        first, min(window.kernel[axis], (spatial_shape[axis] - 1 - pixel) // step + 1)
    )


def _common(a: range, b: range) -> range:
    """Numbers in both of two ranges of step one; empty at the start of ``a`` if there are none."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, stop) if start < stop else range(a.start, a.start)
