"""The full grid and the frame of a window of stride one, for Gram matrices of patches on a GPU.

The *full grid* has every output position whose patch sees a pixel. Over the full grid, the Gram
matrix of patches depends on the offset of two taps only. The outputs of a layer are the full grid
minus a *frame*. Positions outside the full grid see only zeros and add nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kfac_engine.backend.window import Window


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of output positions that see the image through the same taps.

    Attributes:
        axis: Spatial axis along which the box is outside the outputs of the window.
        taps: Adjacent taps of this axis that see a pixel, combined with all taps of the other axes.
        window: Window over these positions with these taps.
    """

    axis: int
    taps: slice
    window: Window


def full_grid(window: Window, spatial_shape: tuple[int, ...]) -> tuple[range, ...]:
    """Return all output positions that see a pixel, as a range for each axis.

    Args:
        window: Geometry; all strides are one.
        spatial_shape: Shape of the image.

    Returns:
        A range for each axis, in positions of the window.
    """
    return tuple(
        range(begin - reach, begin + side)
        for begin, reach, side in zip(window.begins, window.reaches, spatial_shape, strict=True)
    )


def frame(window: Window, spatial_shape: tuple[int, ...]) -> Iterator[Slab]:
    """Yield the full grid minus the outputs of the window, as disjoint slabs.

    A slab is outside the outputs along one axis, inside along earlier axes, and covers the full
    grid along later axes. All its positions see the same taps.

    Args:
        window: Geometry; all strides are one.
        spatial_shape: Shape of the image.

    Yields:
        Slabs that see a pixel.
    """
    grid, outputs = full_grid(window, spatial_shape), window.output_shape(spatial_shape)
    inner = [_common(line, range(count)) for line, count in zip(grid, outputs, strict=True)]
    around = window
    for axis, line in enumerate(grid):
        around = around.restricted(axis, spatial_shape, line)
    # Positions below count from the start of the full grid.
    outputs_in_grid = [
        range(inside.start - line.start, inside.stop - line.start)
        for inside, line in zip(inner, grid, strict=True)
    ]
    for axis, (line, inside) in enumerate(zip(grid, outputs_in_grid, strict=True)):
        for outside in (range(inside.start), range(inside.stop, len(line))):
            yield from _slabs(around, axis, spatial_shape, outside)
        if not inside:
            return
        around = around.restricted(axis, spatial_shape, inside)


def _slabs(
    window: Window, axis: int, spatial_shape: tuple[int, ...], outside: range
) -> Iterator[Slab]:
    """Yield slabs of the positions of an axis that see a pixel through the same taps."""
    for (first, stop), group in groupby(
        outside, lambda o: _seeing_taps(window, axis, o, spatial_shape)
    ):
        positions = list(group)
        if first < stop:
            taps, run = slice(first, stop), range(positions[0], positions[-1] + 1)
            yield Slab(axis, taps, window.restricted(axis, spatial_shape, run, taps))


def _seeing_taps(
    window: Window, axis: int, output: int, spatial_shape: tuple[int, ...]
) -> tuple[int, int]:
    """Return the range ``(begin, end)`` of the taps of an axis that see a pixel at ``output``."""
    pixel, step = output - window.begins[axis], window.dilations[axis]
    first = max(0, -(pixel // step))
    return first, max(
        first, min(window.kernel[axis], (spatial_shape[axis] - 1 - pixel) // step + 1)
    )


def _common(a: range, b: range) -> range:
    """Return the intersection of two ranges; for disjoint ranges, an empty one at ``a.start``."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, stop) if start < stop else range(a.start, a.start)
