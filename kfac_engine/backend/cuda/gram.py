"""Gram matrices and squared gradients of patches and of groups of channels, by CUDA kernels.

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
from itertools import groupby, pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.channel_groups import Accumulation, check_group_shape
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.geometry import (
    AXES,
    JOB,
    SUM,
    Geometry,
    WindowShape,
    geometry,
    grid_struct,
    words,
)
from kfac_engine.kernels.groups import Groups, add_group_moments, add_squares
from kfac_engine.kernels.launch import Device
from kfac_engine.kernels.moments import TILE, Pass, Scales, add_products
from kfac_engine.kernels.patches import add_border, add_patch_squares

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
    """The products of all tiles, before they are divided into pieces."""

    aligned: bool  # whether the number of channels is a multiple of the tile size
    # Boxes of output positions as ``(begins, outputs)``.
    grids: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    terms: Terms  # the products of each tile of the lower triangle, with True for subtraction

    def positions(self, grid: int) -> int:
        """Return the number of output positions of one image."""
        return prod(self.grids[grid][1])

    def cost(self, images: int) -> int:
        """Return the cost of a plan: the number of output positions over all products."""
        needed = {part for terms in self.terms.values() for part, _ in terms}
        return sum(images * self.positions(part.grid) + _START for part in needed)


def plan(
    window: Window,
    images: int,
    channels: int,
    spatial_shape: tuple[int, ...],
    processors: int,
    scratch_bytes: int,
) -> tuple[Pass, ...]:
    """Return the passes that compute a Gram matrix of patches, with arrays of the host.

    Each pass computes different tiles.
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
    grids: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
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
    return Recipe(True, tuple(grids), terms)


def _length(recipe: Recipe, images: int, processors: int) -> int:
    """Return the number of positions of a piece, so that the pieces occupy all multiprocessors."""
    needed = {part for terms in recipe.terms.values() for part, _ in terms}
    total = sum(images * recipe.positions(part.grid) for part in needed)
    even = -(-total // (processors * _BLOCKS_EACH))
    return -(-max(even, _SHORTEST) // _DEPTH) * _DEPTH


def _passes(recipe: Recipe, images: int, length: int, capacity: int) -> Iterator[Pass]:
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


def _pass(recipe: Recipe, images: int, length: int, group: Terms) -> Pass:
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
    return Pass(
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


# Largest number of positions of a launch, which kernels count in 32 bits.
MOST_POSITIONS = 2**31 - 2**16


class PatchMoments:
    """Computes Gram matrices of patches on one device, with one plan for each geometry.

    ``scratch_bytes`` bounds the partial results of one pass, and may be changed. ``split`` is the
    number of TF32 products for each float32 product on tensor cores: 3 has float32 accuracy, 1 does
    not, 0 uses FP32 units.
    """

    def __init__(self, device: Device, scratch_bytes: int, split: int) -> None:
        self._device = device
        self.scratch_bytes = scratch_bytes
        self._split = split
        self._plans: dict[tuple[object, ...], tuple[Pass, ...]] = {}
        self._geometries: dict[tuple[object, ...], Geometry] = {}

    def add(self, x: Array, window: Window, out: Array, how: Accumulation) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` over all patches of all images, in place.

        ``x`` is ``(n, channels, *spatial_shape)`` with any strides, float32, float16 or bfloat16.
        ``out`` is ``(d, d)`` with ``d = taps·channels (+ 1)``, C-contiguous float32; features are
        tap-major.
        """
        features = window.taps * x.shape[1]
        if out.shape != (features + how.homogeneous,) * 2:
            raise ShapeError(
                f"a Gram matrix of {features} features{' and a bias' if how.homogeneous else ''} "
                f"does not fit a matrix of shape {out.shape}."
            )
        outputs = window.output_shape(x.shape[2:])
        most = max(1, MOST_POSITIONS // prod(outputs))
        for start in range(0, len(x), most):
            self._add(x[start : start + most], window, out, how)
            how = how.of_others

    def _add(self, x: Array, window: Window, out: Array, how: Accumulation) -> None:
        passes = self._passes(window, len(x), x.shape[1], x.shape[2:])
        geometry = self.geometry(x, window)
        scales = Scales(window.taps * x.shape[1], how.alpha, how.beta)
        add_products(self._device, x, out, geometry, passes, scales, self._split)
        if how.homogeneous:
            add_border(self._device, x, out, geometry, scales)

    def add_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z²`` over all patches, entry by entry, in place.

        The arguments are as for ``add``, but ``out`` is ``(taps·channels,)``.
        """
        scales = Scales(len(out), alpha, beta)
        add_patch_squares(self._device, x, out, self.geometry(x, window), scales)

    def geometry(self, x: Array, window: Window) -> Geometry:
        """Return images and window as structs of the kernels."""
        key = window, x.shape, x.strides, x.dtype.itemsize
        if key not in self._geometries:
            self._geometries[key] = image_geometry(x, window)
        return self._geometries[key]

    def _passes(
        self, window: Window, images: int, channels: int, spatial_shape: tuple[int, ...]
    ) -> tuple[Pass, ...]:
        key = window, images, channels, spatial_shape, self.scratch_bytes
        if key not in self._plans:
            host = plan(*key[:4], self._device.processors, self.scratch_bytes)
            self._plans[key] = tuple(self._uploaded(item) for item in host)
        return self._plans[key]

    def _uploaded(self, host: Pass) -> Pass:
        upload = self._device.upload
        structs = (upload(words(array)) for array in (host.grids, host.jobs, host.sums))
        return Pass(host.aligned, *structs, upload(host.sources))


def image_geometry(x: Array, window: Window) -> Geometry:
    """Return images and window as structs of the kernels."""
    strides = tuple(stride // x.dtype.itemsize for stride in x.strides)
    outputs = window.output_shape(x.shape[2:])
    spatial_shape = WindowShape(
        window.kernel, window.strides, window.dilations, window.begins, outputs
    )
    return geometry(x.shape, strides, spatial_shape)


class GroupProducts:
    """Computes Gram matrices and squared gradients of groups of channels on one device.

    ``scratch_bytes`` bounds the partial results of one product, and may be changed.
    """

    def __init__(self, device: Device, scratch_bytes: int) -> None:
        self._device = device
        self.scratch_bytes = scratch_bytes

    def add_moments(self, x: Array, window: Window, out: Array, how: Accumulation) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` for each group, in place.

        ``x`` is ``(n, channels, *spatial_shape)`` with any strides, float32, float16 or bfloat16.
        ``out`` is ``(groups, d, d)``, C-contiguous float32.
        """
        rows = check_group_shape(x, window, out, out.shape[2], homogeneous=how.homogeneous)
        positions = prod(window.output_shape(x.shape[2:]))
        most = max(1, MOST_POSITIONS // positions)
        for start in range(0, len(x), most):
            part = x[start : start + most]
            groups = self._groups(out, rows, rows, how)
            add_group_moments(self._device, part, out, image_geometry(part, window), groups)
            how = how.of_others

    def add_squares(
        self, x: Array, window: Window, ds: Array, out: Array, how: Accumulation
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, in place.

        ``x`` is as for ``add_moments``; ``ds`` is ``(n, outputs, *output_shape)``, of the same
        type. ``out`` is ``(groups, d, outputs / groups)``, C-contiguous float32.
        """
        outputs = window.output_shape(x.shape[2:])
        if len(ds) != len(x) or prod(ds.shape[2:]) != prod(outputs):
            raise ShapeError(
                f"gradients of shape {ds.shape} do not fit {len(x)} images with {outputs} outputs."
            )
        ds = ds.reshape(*ds.shape[:2], *outputs)
        columns = ds.shape[1] // len(out)
        rows = check_group_shape(x, window, out, columns, homogeneous=how.homogeneous)
        groups = self._groups(out, rows, columns, how)
        add_squares(self._device, x, ds, out, image_geometry(x, window), groups)

    def _groups(self, out: Array, rows: int, columns: int, how: Accumulation) -> Groups:
        scales = how.homogeneous, how.alpha, how.beta
        return Groups(len(out), rows, columns, *scales, self.scratch_bytes)


def as_entry_images(x: Array, axes: tuple[int, ...]) -> Array | None:
    """Return a view ``(n, entries, *summed_shape)`` of data; None if there is no such view."""
    entry_axes = [axis for axis in range(1, x.ndim) if axis not in axes]
    summed = [axis for axis in axes if x.shape[axis] > 1]
    long_axes = [axis for axis in entry_axes if x.shape[axis] > 1]
    merges = all(x.strides[a] == x.strides[b] * x.shape[b] for a, b in pairwise(long_axes))
    if len(summed) > AXES or not merges:
        return None
    entries = prod(x.shape[axis] for axis in entry_axes)
    spatial_shape = [x.shape[axis] for axis in summed]
    placed = x.transpose(0, *entry_axes, *summed, *(axis for axis in axes if x.shape[axis] == 1))
    view: Array = placed.reshape(len(x), entries, *spatial_shape)
    return view


def merge_axes(x: Array, window: Window) -> tuple[Array, Window]:
    """Return images with as few axes as kernels need, with pixels merged into one axis."""
    if not window.is_pointwise or x.ndim <= 2 + AXES:
        return x, window
    return x.reshape(*x.shape[:2], -1), pointwise(1)
