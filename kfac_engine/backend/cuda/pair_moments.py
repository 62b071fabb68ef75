"""Computes Gram matrices of patches of several layers on tensor cores (``pair_products.cu``).

The layers of a group share their launches. A call to the device takes as much of the host as the
products of a small layer take of the device, and small layers fill the device together.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.channel_groups import Accumulation
from kfac_engine.backend.cuda.recipes import (
    MOST_POSITIONS,
    Product,
    Recipe,
    Terms,
    fitting,
    image_geometry,
    piece_length,
    recipe_for,
)
from kfac_engine.backend.window import Window
from kfac_engine.kernels.geometry import AXES, PAIR_JOB, SUM, Geometry, grid_struct, words
from kfac_engine.kernels.launch import Device
from kfac_engine.kernels.moments import TILE, Scales
from kfac_engine.kernels.pairs import DEPTH, PairLayer, PairPass, add_pair_products
from kfac_engine.kernels.patches import add_border

# Least number of positions of a block.
_SHORTEST = 1024
# Largest number of layers of a group: each block searches its layer.
_MOST_LAYERS = 32
_PAIR_BYTES = 4


class _Moment(NamedTuple):
    """A call of ``PairMoments.add``."""

    x: Array
    window: Window
    out: Array
    how: Accumulation
    blocks: int  # of each multiprocessor

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on."""
        return self.window, self.x.shape, self.blocks


@dataclass(frozen=True, slots=True)
class _HostPass:
    """A ``PairPass`` of one layer, as arrays of the host."""

    grids: npt.NDArray[np.void]
    jobs: Mapping[int, npt.NDArray[np.void]]
    sums: npt.NDArray[np.void]
    sources: npt.NDArray[np.int32]
    parts: int


class PairMoments:
    """Computes Gram matrices of patches on one device by pairs of half-precision numbers.

    A quarter of ``scratch_bytes`` bounds the images that wait, and so their pairs; half bounds the
    partial results. Of one layer alone, the pairs take up to half.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._plans: dict[tuple[object, ...], tuple[_HostPass, ...]] = {}
        self._groups: dict[tuple[object, ...], tuple[PairPass, ...]] = {}
        self._geometries: dict[tuple[object, ...], Geometry] = {}
        self._waiting: list[_Moment] = []
        self._gathers = False

    def takes(self, x: Array, window: Window, scratch_bytes: int) -> bool:
        """Return whether the kernels support images and a window."""
        image = prod(x.shape[1:])
        aligned = x.shape[1] % TILE == 0 and image > 0 and len(window.kernel) <= AXES
        return aligned and _PAIR_BYTES * image <= scratch_bytes // 2

    def add(
        self,
        x: Array,
        window: Window,
        out: Array,
        how: Accumulation,
        scratch_bytes: int,
        blocks: int,
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` over all patches of all images, in place.

        The arguments are as for ``PatchMoments.add``. ``blocks`` is the number of blocks for each
        multiprocessor. Inside ``gathered``, the matrix is computed
        later.
        """
        positions = prod(window.output_shape(x.shape[2:]))
        image_bytes = _PAIR_BYTES * prod(x.shape[1:])
        most = max(1, min(MOST_POSITIONS // max(1, positions), scratch_bytes // 2 // image_bytes))
        for start in range(0, len(x), most):
            part = x[start : start + most]
            # The images are held until then, and may be copies of images of the host.
            entries = sum(moment.x.size for moment in self._waiting) + part.size
            full = 4 * _PAIR_BYTES * entries > scratch_bytes
            if full or self.awaits(out):
                self.flush(scratch_bytes)
            self._waiting.append(_Moment(part, window, out, how, blocks))
            how = how.of_others
        if not self._gathers:
            self.flush(scratch_bytes)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which ``add`` waits for ``flush``; its caller calls it at the end."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False

    def awaits(self, out: Array) -> bool:
        """Return whether a matrix waits for ``flush``."""
        if not self._waiting:
            return False
        address = self._device.address(out)
        return any(self._device.address(moment.out) == address for moment in self._waiting)

    def forget(self) -> None:
        """Drop what waits, after an error."""
        self._waiting.clear()

    def flush(self, scratch_bytes: int) -> None:
        """Compute all matrices that wait."""
        group: list[_Moment] = []
        parts = 0
        waiting, self._waiting = self._waiting, []
        for moment in waiting:
            added = sum(part.parts for part in self._plan(moment, scratch_bytes))
            full = parts + added > _capacity(scratch_bytes) or len(group) == _MOST_LAYERS
            if group and (full or moment.x.dtype != group[0].x.dtype):
                self._compute(group, scratch_bytes)
                group, parts = [], 0
            group.append(moment)
            parts += added
        if group:
            self._compute(group, scratch_bytes)

    # -- private ----------------------------------------------------------------------------------

    def _compute(self, group: Sequence[_Moment], scratch_bytes: int) -> None:
        """Compute a group whose partial results fit the scratch memory, or one layer in passes."""
        key = (scratch_bytes, *(moment.key for moment in group))
        if key not in self._groups:
            plans = [self._plan(moment, scratch_bytes) for moment in group]
            host = plans[0] if len(plans) == 1 else (_joined([plan[0] for plan in plans]),)
            self._groups[key] = tuple(self._uploaded(part) for part in host)
        layers = []
        for x, window, out, how, _ in group:
            scales = Scales(window.taps * x.shape[1], how.alpha, how.beta)
            layers.append(PairLayer(x, out, self._geometry(x, window), scales))
        add_pair_products(self._device, layers, self._groups[key])
        for moment, layer in zip(group, layers, strict=True):
            if moment.how.homogeneous:
                add_border(self._device, layer.x, layer.out, layer.geometry, layer.scales)

    def _plan(self, moment: _Moment, scratch_bytes: int) -> tuple[_HostPass, ...]:
        key = (scratch_bytes, *moment.key)
        if key not in self._plans:
            images, channels, *spatial_shape = moment.x.shape
            recipe = recipe_for(moment.window, images, channels, tuple(spatial_shape))
            blocks = moment.blocks * self._device.processors
            host = plan(recipe, images, channels, blocks, _capacity(scratch_bytes))
            self._plans[key] = host
        return self._plans[key]

    def _geometry(self, x: Array, window: Window) -> Geometry:
        key = window, x.shape, x.strides, x.dtype.itemsize
        if key not in self._geometries:
            self._geometries[key] = image_geometry(x, window)
        return self._geometries[key]

    def _uploaded(self, host: _HostPass) -> PairPass:
        upload = self._device.upload
        jobs = {columns: upload(words(table)) for columns, table in host.jobs.items()}
        grids, sums = upload(words(host.grids)), upload(words(host.sums))
        return PairPass(grids, jobs, sums, upload(host.sources), host.parts)


def plan(
    recipe: Recipe, images: int, channels: int, blocks: int, capacity: int
) -> tuple[_HostPass, ...]:
    """Return the passes of one layer, with arrays of the host.

    Each pass computes different tiles, and has at most ``capacity`` partial results if one tile
    does not need more. The products are divided into ``blocks`` pieces or less.
    """
    each = channels // TILE
    terms = (part for terms in recipe.terms.values() for part, _ in terms)
    boxes = _blocks(dict.fromkeys(terms), each)
    total = sum(images * recipe.positions(block.grid) for block in boxes)
    step = DEPTH * (2 if each % 2 == 0 else 1)
    length = piece_length(total, blocks, _SHORTEST, step)
    groups = fitting(recipe, images, length, capacity)
    return tuple(_pass(recipe, images, each, length, group) for group in groups)


class _Block(NamedTuple):
    """The products of up to 2 x 2 tiles of one grid, by their places in the block."""

    grid: int
    rows: tuple[int, int]
    columns: tuple[int, ...]
    products: dict[int, Product]


def _blocks(needed: dict[Product, None], each: int) -> list[_Block]:
    """Return the blocks of all products, for ``each`` tiles of a tap."""
    if each % 2 == 0:
        squares: dict[tuple[int, int, int], dict[int, Product]] = {}
        for part in needed:
            place = part.row % 2 * 2 + part.column % 2
            squares.setdefault((part.grid, part.row // 2, part.column // 2), {})[place] = part
        return [
            _Block(grid, (2 * r, 2 * r + 1), (2 * c, 2 * c + 1), products)
            for (grid, r, c), products in squares.items()
        ]
    # Two rows with one column.
    stacks: dict[tuple[int, int], list[Product]] = {}
    for part in needed:
        stacks.setdefault((part.grid, part.column), []).append(part)
    return [
        _Block(grid, (pair[0].row, pair[-1].row), (column,), dict(enumerate(pair)))
        for (grid, column), parts in stacks.items()
        for pair in (parts[i : i + 2] for i in range(0, len(parts), 2))
    ]


def _pass(recipe: Recipe, images: int, each: int, length: int, group: Terms) -> _HostPass:
    rows: list[tuple[object, ...]] = []
    pieces: dict[Product, list[int]] = {}
    count = 0
    needed = dict.fromkeys(part for terms in group.values() for part, _ in terms)
    for block in _blocks(needed, each):
        stop = images * recipe.positions(block.grid)
        tiles = (*block.rows, *block.columns, *block.columns)[:4]
        for cut in range(0, stop, length):
            parts = [-1] * 4
            for place, part in block.products.items():
                pieces.setdefault(part, []).append(count)
                parts[place] = count
                count += 1
            rows.append((0, block.grid, cut, min(cut + length, stop), tiles, parts))
    sums: list[tuple[int, ...]] = []
    sources: list[int] = []
    for (row, column), terms in group.items():
        begin = len(sources)
        for part, minus in terms:
            sources += [~index if minus else index for index in pieces[part]]
        sums.append((row, column, begin, len(sources), 0))
    return _HostPass(
        np.concatenate([grid_struct(*box) for box in recipe.grids]),
        {2 if each % 2 == 0 else 1: np.array(rows, PAIR_JOB)},
        np.array(sums, SUM),
        np.array(sources, np.int32),
        count,
    )


def _joined(passes: Sequence[_HostPass]) -> _HostPass:
    """Return the passes of several layers as one."""
    jobs: dict[int, list[npt.NDArray[np.void]]] = {}
    sums: list[npt.NDArray[np.void]] = []
    sources: list[npt.NDArray[np.int32]] = []
    grids = parts = begin = 0
    for layer, host in enumerate(passes):
        for columns, table in host.jobs.items():
            moved = table.copy()
            moved["layer"] = layer
            moved["grid"] += grids
            moved["parts"][moved["parts"] >= 0] += parts
            jobs.setdefault(columns, []).append(moved)
        tiles = host.sums.copy()
        tiles["layer"] = layer
        tiles["begin"] += begin
        tiles["end"] += begin
        sums.append(tiles)
        shift = np.int32(parts)
        sources.append(np.where(host.sources < 0, host.sources - shift, host.sources + shift))
        grids, parts = grids + len(host.grids), parts + host.parts
        begin += len(host.sources)
    return _HostPass(
        np.concatenate([host.grids for host in passes]),
        {columns: np.concatenate(tables) for columns, tables in jobs.items()},
        np.concatenate(sums),
        np.concatenate(sources),
        parts,
    )


def _capacity(scratch_bytes: int) -> int:
    """Return the number of partial results that half of the scratch memory has room for."""
    part_bytes: int = TILE**2 * 4
    return max(1, scratch_bytes // 2 // part_bytes)
