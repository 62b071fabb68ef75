"""Plans the products of patches that compute a Gram matrix on a GPU, from the geometry.

The lower triangle of ``Σ z zᵀ`` consists of tiles of features. There are two plans:

* *direct*: one product for each tile, over the output positions of the window;
* *shifted*, for strides of one and channels that are a multiple of the tile. Over the full grid of
  positions that see a pixel, a product depends on the offset of its two taps only, so there are
  fewer products (13 instead of 45 for 3 × 3 taps). The products over the ``frame`` around the
  outputs of the window are subtracted.

The cheaper plan is chosen. Products over many positions are divided into pieces, so that a device
has enough blocks, and the pieces are added in a fixed order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from math import prod
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.window import Window
from kfac_engine.kernels.geometry import JOB, SUM, grid_struct
from kfac_engine.kernels.moments import TILE

# Least number of positions of a block. With fewer positions, the start of the block dominates.
_SHORTEST = 512
# Number of blocks for each multiprocessor, so that the last wave is short.
_BLOCKS_EACH = 12
# Fixed cost of a product, in positions.
_START = 128
_DEPTH = 16  # positions that a block of patch_products.cu loads at a time


class Product(NamedTuple):
    """The product of two tiles of features over all positions of a grid."""

    grid: int
    row: int
    column: int


Terms = Mapping[tuple[int, int], Sequence[tuple[Product, bool]]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The products of all tiles, before they are divided into pieces.

    Attributes:
        aligned: Whether the number of channels is a multiple of the tile size.
        grids: Boxes of output positions as ``(begins, outputs)``.
        terms: The products of each tile of the lower triangle, with True for subtraction.
    """

    aligned: bool
    grids: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    terms: Terms

    def positions(self, grid: int) -> int:
        """Return the number of output positions of one image."""
        return prod(self.grids[grid][1])

    def cost(self, images: int) -> int:
        """Return the cost of a plan: the number of output positions over all products."""
        needed = {part for terms in self.terms.values() for part, _ in terms}
        return sum(images * self.positions(part.grid) + _START for part in needed)


@dataclass(frozen=True, slots=True)
class HostPass:
    """A pass of the kernels (``kernels.moments.Pass``) as host arrays."""

    aligned: bool
    grids: Array
    jobs: Array
    sums: Array
    sources: Array


@lru_cache(maxsize=256)
def plan(
    window: Window,
    images: int,
    channels: int,
    spatial_shape: tuple[int, ...],
    processors: int,
    scratch_bytes: int,
) -> tuple[HostPass, ...]:
    """Return the passes that compute a Gram matrix of patches; each computes different tiles of it.

    ``processors`` is the number of multiprocessors of the device. ``scratch_bytes`` bounds the
    partial results of a pass.
    """
    ways = [_direct, _shifted] if _can_shift(window, channels) else [_direct]
    recipes = [way(window, channels, spatial_shape) for way in ways]
    recipe = min(recipes, key=lambda part: part.cost(images))
    length = _length(recipe, images, processors)
    capacity = max(1, scratch_bytes // (TILE**2 * 4))
    return tuple(_passes(recipe, images, length, capacity))


def _direct(window: Window, channels: int, spatial_shape: tuple[int, ...]) -> Recipe:
    count = -(-window.taps * channels // TILE)
    return Recipe(
        channels % TILE == 0,
        ((window.begins, window.output_shape(spatial_shape)),),
        {(i, j): [(Product(0, i, j), False)] for i in range(count) for j in range(i + 1)},
    )


def _can_shift(window: Window, channels: int) -> bool:
    return set(window.strides) == {1} and window.taps > 1 and channels % TILE == 0


def _shifted(window: Window, channels: int, spatial_shape: tuple[int, ...]) -> Recipe:
    lines = full_grid(window, spatial_shape)
    begins = tuple(begin - line.start for begin, line in zip(window.begins, lines, strict=True))
    grids = [(begins, tuple(map(len, lines)))]
    slabs = list(frame(window, spatial_shape))
    for slab in slabs:
        inner = slab.window
        start = list(inner.begins)
        start[slab.axis] += slab.taps.start * window.dilations[slab.axis]
        grids.append((tuple(start), inner.output_shape(spatial_shape)))
    taps = list(product(*map(range, window.kernel)))
    place = {tap: index for index, tap in enumerate(taps)}
    each = channels // TILE
    terms: dict[tuple[int, int], list[tuple[Product, bool]]] = {}
    for i in range(len(taps) * each):
        for j in range(i + 1):
            u, v = taps[i // each], taps[j // each]
            # Of all pairs of taps with this offset, take the pair nearest to the first tap.
            apart = [a - b for a, b in zip(u, v, strict=True)]
            first = place[tuple(max(step, 0) for step in apart)] * each + i % each
            second = place[tuple(max(-step, 0) for step in apart)] * each + j % each
            terms[i, j] = [(Product(0, first, second), False)]
            terms[i, j] += [
                (Product(1 + number, i, j), True)
                for number, slab in enumerate(slabs)
                if all(slab.taps.start <= tap[slab.axis] < slab.taps.stop for tap in (u, v))
            ]
    return Recipe(True, tuple(grids), terms)


def _length(recipe: Recipe, images: int, processors: int) -> int:
    """Return the number of positions of a piece, so that the pieces occupy all multiprocessors."""
    needed = {part for terms in recipe.terms.values() for part, _ in terms}
    total = sum(images * recipe.positions(part.grid) for part in needed)
    even = -(-total // (processors * _BLOCKS_EACH))
    return -(-max(even, _SHORTEST) // _DEPTH) * _DEPTH


def _passes(recipe: Recipe, images: int, length: int, capacity: int) -> Iterator[HostPass]:
    """Yield passes over as many tiles as fit the scratch memory, at least one each."""
    pieces = [-(-images * recipe.positions(grid) // length) for grid in range(len(recipe.grids))]
    group: dict[tuple[int, int], Sequence[tuple[Product, bool]]] = {}
    needed: set[Product] = set()
    used = 0
    for tile, terms in recipe.terms.items():
        added = {part for part, _ in terms} - needed
        more = sum(pieces[part.grid] for part in added)
        if group and used + more > capacity:
            yield _pass(recipe, images, length, group)
            group, needed, used = {}, set(), 0
            added = {part for part, _ in terms}
            more = sum(pieces[part.grid] for part in added)
        group[tile] = terms
        needed |= added
        used += more
    yield _pass(recipe, images, length, group)


def _pass(recipe: Recipe, images: int, length: int, group: Terms) -> HostPass:
    jobs: list[tuple[int, int, int, int, int]] = []
    pieces: dict[Product, range] = {}
    sums: list[tuple[int, int, int, int]] = []
    sources: list[int] = []
    for (row, column), terms in group.items():
        begin = len(sources)
        for part, minus in terms:
            if part not in pieces:
                stop = images * recipe.positions(part.grid)
                cuts = range(0, stop, length)
                pieces[part] = range(len(jobs), len(jobs) + len(cuts))
                jobs += [(*part, cut, min(cut + length, stop)) for cut in cuts]
            sources += [~index if minus else index for index in pieces[part]]
        sums.append((row, column, begin, len(sources)))
    grids = np.concatenate([grid_struct(*box) for box in recipe.grids])
    return HostPass(
        recipe.aligned,
        grids,
        np.array(jobs, JOB),
        np.array(sums, SUM),
        np.array(sources, np.int32),
    )


# -- the full grid and the frame -------------------------------------------------------------------
#
# The *full grid* has every output position whose patch sees a pixel. Over the full grid, the Gram
# matrix of patches depends on the offset of two taps only. The outputs of a layer are the full grid
# minus a *frame*. Positions outside the full grid see only zeros and add nothing.


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
