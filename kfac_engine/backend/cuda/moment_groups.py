"""Computes Gram matrices of patches of several layers at once.

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
from kfac_engine.backend.cuda import recipes
from kfac_engine.backend.cuda.recipes import MOST_POSITIONS, Product, Recipe, Terms, image_geometry
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.kernels.geometry import AXES, JOB, SUM, Geometry, Struct, grid_struct, words
from kfac_engine.kernels.launch import Device
from kfac_engine.kernels.moments import TILE, UNIT_DEPTH, Layer, Pass, Scales, add_unit_products
from kfac_engine.kernels.pairs import DEPTH, ROW_DEPTH, add_pair_products, padded
from kfac_engine.kernels.patches import add_borders
from kfac_engine.kernels.tuned import PATCHES, PIXELS, ROWS, UNITS, Choice

# Least number of positions of a block: with fewer, its start dominates.
_SHORTEST = {"patch_products": 512, "pair_products": 1024, "pair_rows": 1024}
# Largest number of layers of a group: each block searches its layer.
_MOST_LAYERS = 32
_PAIR_BYTES = 4
# Largest memory of the pairs of a layer, which kernels count in 32 bits.
_MOST_BYTES = 2**32 - 1
# Sources of the ways that copy nothing.
_SOURCES = {UNITS: "patch_products", ROWS: "pair_rows"}
# Cost of a copied tile of 64 features at a position, in positions of a product of two tiles: 512
# bytes at 3.6 TB/s take as long as 4 x 4096 multiplications at 100 T/s.
_COPY = 4


class _Moment(NamedTuple):
    """A call of ``MomentGroups.add``."""

    x: Array
    window: Window
    out: Array
    how: Accumulation
    choice: Choice
    bytes: int  # of the images, or of their pairs if those need more

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on."""
        return self.window, self.x.shape, self.choice


@dataclass(frozen=True, slots=True)
class _HostPass:
    """A ``Pass``, as arrays of the host."""

    grids: npt.NDArray[np.void]
    jobs: Mapping[tuple[str, int], npt.NDArray[np.void]]
    sums: npt.NDArray[np.void]
    sources: npt.NDArray[np.int32]
    parts: int


class _Geometries(NamedTuple):
    """The geometries of a ``Layer``."""

    geometry: Geometry
    copied: Geometry | None  # None on FP32 units
    taps: Struct | None


class MomentGroups:
    """Computes Gram matrices of patches on one device, by groups of layers.

    A quarter of ``scratch_bytes`` bounds the images that wait, and their pairs; half bounds the
    partial results. Of one layer alone, the pairs take up to half. ``products`` is the number of
    products of tensor cores for each product of pairs of half-precision numbers: 3 has float32
    accuracy, 1 has 11 bits.
    """

    def __init__(self, device: Device, products: int) -> None:
        self._device = device
        self._products = products
        self._ways: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._plans: dict[tuple[object, ...], tuple[_HostPass, ...]] = {}
        self._groups: dict[tuple[object, ...], tuple[Pass, ...]] = {}
        self._geometries: dict[tuple[object, ...], _Geometries] = {}
        self._waiting: list[_Moment] = []
        self._gathers = False

    def ways(self, x: Array, window: Window, scratch_bytes: int) -> tuple[str, ...]:
        """Return the ways to multiply that fit the scratch memory, the cheapest first."""
        aligned = self._device.address(x) % (4 * x.itemsize) == 0
        key = window, x.shape, x.strides, aligned, scratch_bytes
        if key not in self._ways:
            possible = x.size > 0 and len(window.kernel) <= AXES
            applying = [
                *([ROWS] if aligned and window.is_pointwise and _reads_rows(x) else []),
                PIXELS,
                *([] if window.is_pointwise else [PATCHES]),
            ]
            fitting = [
                way
                for way in applying
                if possible and _image_bytes(way, window, x.shape) <= _most_bytes(scratch_bytes)
            ]
            costs = {way: _cost(way, window, x.shape) for way in fitting}
            self._ways[key] = tuple(sorted(fitting, key=costs.__getitem__))
        return self._ways[key]

    def add(
        self,
        x: Array,
        window: Window,
        out: Array,
        how: Accumulation,
        scratch_bytes: int,
        choice: Choice,
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` over all patches of all images, in place.

        The arguments are as for ``PatchMoments.add``. ``choice`` has one of ``ways``. Inside
        ``gathered``, the matrix is computed later.
        """
        positions = max(prod(window.output_shape(x.shape[2:])), prod(x.shape[2:]))
        most = max(1, MOST_POSITIONS // positions)
        copied = _image_bytes(choice.way, window, x.shape)
        if copied:
            most = max(1, min(most, _most_bytes(scratch_bytes) // copied))
        # The images are held until then, and may be copies of images of the host.
        image_bytes = max(copied, _PAIR_BYTES * prod(x.shape[1:]))
        for start in range(0, len(x), most):
            part = x[start : start + most]
            size = len(part) * image_bytes
            full = 4 * (size + sum(moment.bytes for moment in self._waiting)) > scratch_bytes
            if full or self.awaits(out):
                self.flush(scratch_bytes)
            self._waiting.append(_Moment(part, window, out, how, choice, size))
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
        kinds: dict[tuple[object, ...], list[_Moment]] = {}
        waiting, self._waiting = self._waiting, []
        for moment in waiting:
            kinds.setdefault((moment.x.dtype, moment.choice.way == UNITS), []).append(moment)
        for moments in kinds.values():
            group: list[_Moment] = []
            parts = 0
            for moment in moments:
                added = sum(part.parts for part in self._plan(moment, scratch_bytes))
                full = parts + added > _capacity(scratch_bytes) or len(group) == _MOST_LAYERS
                if group and full:
                    self._compute(group, scratch_bytes)
                    group, parts = [], 0
                group.append(moment)
                parts += added
            self._compute(group, scratch_bytes)

    # -- private ----------------------------------------------------------------------------------

    def _compute(self, group: Sequence[_Moment], scratch_bytes: int) -> None:
        """Compute a group whose partial results fit the scratch memory, or one layer in passes."""
        key = (scratch_bytes, *(moment.key for moment in group))
        if key not in self._groups:
            plans = [self._plan(moment, scratch_bytes) for moment in group]
            host = plans[0] if len(plans) == 1 else (_joined([plan[0] for plan in plans]),)
            self._groups[key] = tuple(self._uploaded(part) for part in host)
        layers = [self._layer(moment) for moment in group]
        if group[0].choice.way == UNITS:
            add_unit_products(self._device, layers, self._groups[key])
        else:
            add_pair_products(self._device, layers, self._groups[key], self._products)
        bordered = zip(group, layers, strict=True)
        borders = [layer for moment, layer in bordered if moment.how.homogeneous]
        if borders:
            add_borders(self._device, borders)

    def _plan(self, moment: _Moment, scratch_bytes: int) -> tuple[_HostPass, ...]:
        key = (scratch_bytes, *moment.key)
        if key not in self._plans:
            way = moment.choice.way
            recipe = _recipe(way, moment.window, moment.x.shape)
            blocks = moment.choice.blocks * self._device.processors
            source = _SOURCES.get(way, "pair_products")
            host = plan(recipe, len(moment.x), blocks, _capacity(scratch_bytes), source)
            self._plans[key] = host
        return self._plans[key]

    def _layer(self, moment: _Moment) -> Layer:
        x, window, how = moment.x, moment.window, moment.how
        scales = Scales(window.taps * x.shape[1], how.alpha, how.beta)
        return Layer(x, moment.out, scales, *self._geometries_of(moment))

    def _geometries_of(self, moment: _Moment) -> _Geometries:
        x, window, way = moment.x, moment.window, moment.choice.way
        key = window, x.shape, x.strides, x.dtype.itemsize, way
        if key not in self._geometries:
            whole = image_geometry(x, window)
            pixels = whole.of_pixels
            self._geometries[key] = {
                UNITS: _Geometries(whole, None, None),
                ROWS: _Geometries(whole, pixels, None),
                PIXELS: _Geometries(whole, pixels, whole.taps),
                PATCHES: _Geometries(whole, whole, pixels.taps),
            }[way]
        return self._geometries[key]

    def _uploaded(self, host: _HostPass) -> Pass:
        upload = self._device.upload
        jobs = {kind: upload(words(table)) for kind, table in host.jobs.items()}
        grids, sums = upload(words(host.grids)), upload(words(host.sums))
        return Pass(grids, jobs, sums, upload(host.sources), host.parts)


def plan(
    recipe: Recipe, images: int, blocks: int, capacity: int, source: str
) -> tuple[_HostPass, ...]:
    """Return the passes of one layer, with arrays of the host.

    Each pass computes different tiles, and has at most ``capacity`` partial results if one tile
    does not need more. The products are divided into ``blocks`` pieces or less. ``source`` is the
    source of the kernel.
    """
    each = -(-recipe.width // TILE)
    terms = (part for terms in recipe.terms.values() for part, _ in terms)
    boxes = _blocks(dict.fromkeys(terms), each, source)
    total = sum(images * recipe.positions(block.grid) for block in boxes)
    steps = {"patch_products": UNIT_DEPTH, "pair_rows": ROW_DEPTH}
    step = steps.get(source, DEPTH * (2 - each % 2))
    length = recipes.piece_length(total, blocks, _SHORTEST[source], step)
    groups = recipes.fitting(recipe, images, length, capacity)
    return tuple(_pass(recipe, images, length, group, source) for group in groups)


class _Block(NamedTuple):
    """The products of up to 2 x 2 tiles of one grid, by their places in the block."""

    grid: int
    rows: tuple[int, int]
    columns: tuple[int, ...]
    products: dict[int, Product]


def _blocks(needed: dict[Product, None], each: int, source: str) -> list[_Block]:
    """Return the blocks of all products, for ``each`` tiles of a tap."""
    if source != "patch_products" and each % 2 == 0:
        squares: dict[tuple[int, int, int], dict[int, Product]] = {}
        for part in needed:
            place = part.row % 2 * 2 + part.column % 2
            squares.setdefault((part.grid, part.row // 2, part.column // 2), {})[place] = part
        return [
            _Block(grid, (2 * r, 2 * r + 1), (2 * c, 2 * c + 1), products)
            for (grid, r, c), products in squares.items()
        ]
    if source != "pair_products":
        return [
            _Block(grid, (row, row), (column,), {0: part})
            for part in needed
            for grid, row, column in [part]
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


def _pass(recipe: Recipe, images: int, length: int, group: Terms, source: str) -> _HostPass:
    rows: list[tuple[object, ...]] = []
    pieces: dict[Product, list[int]] = {}
    count = 0
    needed = dict.fromkeys(part for terms in group.values() for part, _ in terms)
    each = -(-recipe.width // TILE)
    variant = int(recipe.width % TILE == 0) if source == "patch_products" else 2 - each % 2
    for block in _blocks(needed, each, source):
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
    for tile, terms in group.items():
        begin = len(sources)
        for part, minus in terms:
            sources += [~index if minus else index for index in pieces[part]]
        sums.append(recipe.sum_row(tile, begin, len(sources)))
    return _HostPass(
        np.concatenate([grid_struct(*box) for box in recipe.grids]),
        {(source, variant): np.array(rows, JOB)},
        np.array(sums, SUM),
        np.array(sources, np.int32),
        count,
    )


def _joined(passes: Sequence[_HostPass]) -> _HostPass:
    """Return the passes of several layers as one."""
    jobs: dict[tuple[str, int], list[npt.NDArray[np.void]]] = {}
    sums: list[npt.NDArray[np.void]] = []
    sources: list[npt.NDArray[np.int32]] = []
    grids = parts = begin = 0
    for layer, host in enumerate(passes):
        for kind, table in host.jobs.items():
            moved = table.copy()
            moved["layer"] = layer
            moved["grid"] += grids
            moved["parts"][moved["parts"] >= 0] += parts
            jobs.setdefault(kind, []).append(moved)
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
        {kind: np.concatenate(tables) for kind, tables in jobs.items()},
        np.concatenate(sums),
        np.concatenate(sources),
        parts,
    )


def _capacity(scratch_bytes: int) -> int:
    """Return the number of partial results that half of the scratch memory has room for."""
    part_bytes: int = TILE**2 * 4
    return max(1, scratch_bytes // 2 // part_bytes)


def _recipe(way: str, window: Window, shape: tuple[int, ...]) -> Recipe:
    """Return the products of a way."""
    images, channels, *spatial_shape = shape
    sides = tuple(spatial_shape)
    if way != PATCHES:
        return recipes.recipe_for(window, images, channels, sides, padded=way != UNITS)
    outputs = window.output_shape(sides)
    return recipes.direct(pointwise(len(outputs)), window.taps * channels, outputs, padded=True)


def _reads_rows(x: Array) -> bool:
    """Return whether ``pair_rows.cu`` reads images with these strides."""
    image, channel, *steps = (stride // x.itemsize for stride in x.strides)
    pixels = prod(x.shape[2:])
    near = 1
    for side, step in zip(reversed(x.shape[2:]), reversed(steps), strict=True):
        if side > 1 and step != near:
            return False
        near *= side
    aligned = all(size % 4 == 0 for size in (image, channel, pixels))
    small = (x.shape[1] - 1) * channel + pixels < 2**31
    return aligned and small and pixels >= ROW_DEPTH and min(image, channel) > 0


def _cost(way: str, window: Window, shape: tuple[int, ...]) -> float:
    """Return the cost of the products and the copies of a way, in positions of a product."""
    copied = shape[0] * _image_bytes(way, window, shape) // (TILE * _PAIR_BYTES)
    return float(_recipe(way, window, shape).cost(shape[0]) + _COPY * copied)


def _image_bytes(way: str, window: Window, shape: tuple[int, ...]) -> int:
    """Return the memory of the pairs of an image, zero if they are not copied."""
    if way in _SOURCES:
        return 0
    _, channels, *sides = shape
    outputs = window.output_shape(tuple(sides))
    if way == PIXELS:
        return int(_PAIR_BYTES * padded(channels) * prod(sides))
    return int(_PAIR_BYTES * padded(window.taps * channels) * prod(outputs))


def _most_bytes(scratch_bytes: int) -> int:
    """Return the largest memory of the pairs of a layer."""
    return min(scratch_bytes // 2, _MOST_BYTES)
