"""Selects the tile products, and their positions, that compute Gram matrices of patches.

The lower triangle of ``Σ z zᵀ`` consists of tiles of features. There are two plans:

* *direct*: one product for each tile, over the output positions of the window;
* *shifted*, for strides of one and tiles of one tap. Over the full grid of positions that see a
  pixel, a product depends on the offset of its two taps only, so there are fewer products (13
  instead of 45 for 3 × 3 taps). The products over the ``frame`` around the outputs of the window
  are subtracted.

The cheaper plan is chosen. Products over many positions are divided into pieces, so that a device
has enough blocks, and the pieces are added in a fixed order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import NamedTuple

from kfac_engine._types import Array
from kfac_engine.backend.window import Window
from kfac_engine.kernels.geometry import Geometry, WindowShape, geometry
from kfac_engine.kernels.moments import TILE

# Fixed cost of a product, in positions.
_START = 128
# Largest number of positions of a launch, which kernels count in 32 bits.
MOST_POSITIONS = 2**31 - 2**16


class Product(NamedTuple):
    """The product of two tiles of features over all positions of a grid."""

    grid: int
    row: int
    column: int


Terms = Mapping[tuple[int, int], Sequence[tuple[Product, bool]]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The products of all tiles, before they are divided into pieces."""

    width: int  # number of features that tiles divide: of one tap, or of all taps
    # Boxes of output positions as ``(begins, outputs)``.
    grids: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    terms: Terms  # the products of each tile of the lower triangle, with True for subtraction

    def extent(self, tile: int) -> tuple[int, int]:
        """Return the first feature of a tile, and its number of features."""
        number, place = divmod(tile, -(-self.width // TILE))
        return number * self.width + place * TILE, min(TILE, self.width - place * TILE)

    def sum_row(self, tile: tuple[int, int], begin: int, end: int) -> tuple[int, ...]:
        """Return the entry of the struct ``Sum`` of a tile, of the first layer."""
        (row, rows), (column, columns) = map(self.extent, tile)
        return row, column, rows, columns, begin, end, 0

    def positions(self, grid: int) -> int:
        """Return the number of output positions of one image."""
        return prod(self.grids[grid][1])

    def cost(self, images: int) -> int:
        """Return the cost of a plan: the number of output positions over all products."""
        needed = {part for terms in self.terms.values() for part, _ in terms}
        return sum(images * self.positions(part.grid) + _START for part in needed)


def recipe_for(
    window: Window,
    images: int,
    channels: int,
    spatial_shape: tuple[int, ...],
    *,
    padded: bool = False,
) -> Recipe:
    """Return the cheapest products that compute a Gram matrix of patches.

    If ``padded``, the features of each tap begin at a tile, whatever the number of channels.
    """
    padded |= channels % TILE == 0
    recipes = [direct(window, channels, spatial_shape, padded=padded)]
    if padded and set(window.strides) == {1} and window.taps > 1:
        recipes.append(_shifted(window, channels, spatial_shape))
    return min(recipes, key=lambda part: part.cost(images))


def direct(
    window: Window, channels: int, spatial_shape: tuple[int, ...], *, padded: bool
) -> Recipe:
    """Return one product for each tile, over the outputs of the window."""
    width = channels if padded else window.taps * channels
    count = window.taps * channels // width * -(-width // TILE)
    return Recipe(
        width,
        ((window.begins, window.output_shape(spatial_shape)),),
        {(i, j): [(Product(0, i, j), False)] for i in range(count) for j in range(i + 1)},
    )


def piece_length(total: int, blocks: int, least: int, step: int) -> int:
    """Return the number of positions of a piece, a multiple of ``step``.

    ``total`` positions are divided into at most about ``blocks`` pieces of at least ``least``.
    """
    return -(-max(-(-total // blocks), least) // step) * step


def fitting(recipe: Recipe, images: int, length: int, capacity: int) -> Iterator[Terms]:
    """Yield as many tiles at a time as have ``capacity`` partial results, at least one.

    ``length`` is the number of positions of a piece.
    """
    pieces = [-(-images * recipe.positions(grid) // length) for grid in range(len(recipe.grids))]
    group: dict[tuple[int, int], Sequence[tuple[Product, bool]]] = {}
    needed: set[Product] = set()
    used = 0
    for tile, terms in recipe.terms.items():
        added = {part for part, _ in terms} - needed
        more = sum(pieces[part.grid] for part in added)
        if group and used + more > capacity:
            yield group
            group, needed, used = {}, set(), 0
            added = {part for part, _ in terms}
            more = sum(pieces[part.grid] for part in added)
        group[tile] = terms
        needed |= added
        used += more
    yield group


def image_geometry(x: Array, window: Window) -> Geometry:
    """Return images and window as structs of the kernels."""
    strides = tuple(stride // x.dtype.itemsize for stride in x.strides)
    outputs = window.output_shape(x.shape[2:])
    spatial_shape = WindowShape(
        window.kernel, window.strides, window.dilations, window.begins, outputs
    )
    return geometry(x.shape, strides, spatial_shape)


def _shifted(window: Window, channels: int, spatial_shape: tuple[int, ...]) -> Recipe:
    grids: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    slabs = list(frame(window, spatial_shape))
    for slab in slabs:
        inner = slab.window
        start = list(inner.begins)
        start[slab.axis] += slab.taps.start * window.dilations[slab.axis]
        grids.append((tuple(start), inner.output_shape(spatial_shape)))
    taps = list(product(*map(range, window.kernel)))
    place = {tap: index for index, tap in enumerate(taps)}
    each = -(-channels // TILE)
    terms: dict[tuple[int, int], list[tuple[Product, bool]]] = {}
    boxes: dict[tuple[int, ...], int] = {}
    for i in range(len(taps) * each):
        for j in range(i + 1):
            u, v = taps[i // each], taps[j // each]
            # Of all pairs of taps with this offset, take the pair nearest to the first tap.
            apart = [a - b for a, b in zip(u, v, strict=True)]
            first = place[tuple(max(step, 0) for step in apart)] * each + i % each
            second = place[tuple(max(-step, 0) for step in apart)] * each + j % each
            # Outside this box, one of the two taps sees zeros.
            box = tuple(
                max(0, side - abs(step) * dilation)
                for side, step, dilation in zip(spatial_shape, apart, window.dilations, strict=True)
            )
            if box not in boxes:
                boxes[box] = len(grids)
                grids.append(((0,) * len(box), box))
            terms[i, j] = [(Product(boxes[box], first, second), False)] if prod(box) else []
            terms[i, j] += [
                (Product(number, i, j), True)
                for number, slab in enumerate(slabs)
                if all(slab.taps.start <= tap[slab.axis] < slab.taps.stop for tap in (u, v))
            ]
    return Recipe(channels, tuple(grids), terms)


# -- the full grid and the frame -------------------------------------------------------------------
#
# The *full grid* has every output position whose patch sees a pixel. Over the full grid, the Gram
# matrix of patches depends on the offset of two taps only. The outputs of a layer are the full grid
# minus a *frame*. Positions outside the full grid see only zeros and add nothing.


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of output positions that see the image through the same taps."""

    axis: int  # spatial axis along which the box is outside the outputs of the window
    # Adjacent taps of this axis that see a pixel, combined with all taps of the other axes.
    taps: slice
    window: Window  # window over these positions with these taps


def full_grid(window: Window, spatial_shape: tuple[int, ...]) -> tuple[range, ...]:
    """Return all output positions that see a pixel, a range for each axis, for strides of one."""
    return tuple(
        range(begin - reach, begin + side)
        for begin, reach, side in zip(window.begins, window.reaches, spatial_shape, strict=True)
    )


def frame(window: Window, spatial_shape: tuple[int, ...]) -> Iterator[Slab]:
    """Yield the full grid minus the outputs of the window, as disjoint slabs that see a pixel.

    A slab is outside the outputs along one axis, inside along earlier axes, and covers the full
    grid along later axes. All its positions see the same taps. All strides of the window are one.
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
