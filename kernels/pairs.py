"""Launches products of patches from pairs of half-precision numbers, of several layers at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kfac_engine.kernels.geometry import (
    PAIR_LAYER,
    ROW_LAYER,
    STAGED_LAYER,
    Geometry,
    Struct,
    words,
)
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, int32, kernel
from kfac_engine.kernels.moments import TILE, Scales, assemble, target_structs

# Number of positions of a stage of pair_products.cu for each column of tiles, and number of stages.
DEPTH = 16
_STAGES = 3
_ROWS = 2
# Number of positions of a stage of pair_rows.cu, which has two stages.
ROW_DEPTH = 32
# Bytes of the struct Shared, without its seats, and of a seat.
_SHARED, _SEAT = 72, 16
# Number of blocks of find_peaks for each multiprocessor, if there are enough images.
_BLOCKS_EACH = 8
_WARPS, _LANES = 8, 32  # channels of a block of find_peaks: of each warp, or of each lane


@dataclass(frozen=True, slots=True)
class PairLayer:
    """Images of a layer, and the matrix that receives their moment.

    Attributes:
        x: Images ``(n, channels, *spatial_shape)`` of any strides.
        out: ``(size, size)`` float32, contiguous.
        geometry: Geometry of the images and the window.
        copied: Geometry of what is copied as pairs, the pixels of the images or their patches; or
            of the pixels if ``pair_rows.cu`` reads the images.
        taps: Taps that see the pairs; None if nothing is copied.
        scales: Scales of the moment and of the old values.
    """

    x: Array
    out: Array
    geometry: Geometry
    copied: Geometry
    taps: Struct | None
    scales: Scales

    @property
    def features(self) -> int:
        """Number of features of a copied position, with those of the padding."""
        taps = int(self.copied.taps["kernel"].prod())
        return padded(taps * self.copied.channels)


@dataclass(frozen=True, slots=True)
class PairPass:
    """The products of several layers, as arrays of the device.

    Attributes:
        grids: Boxes of output positions.
        jobs: The products of the blocks, by the source of their kernel and their columns of tiles.
        sums: Place of each tile of the lower triangles, and its range in ``sources``.
        sources: Indices of partial results; ``~index`` is subtracted.
        parts: Number of partial results.
    """

    grids: Array
    jobs: Mapping[tuple[str, int], Array]
    sums: Array
    sources: Array
    parts: int


def padded(features: int) -> int:
    """Return the number of features of whole tiles."""
    return int(-(-features // TILE) * TILE)


def add_pair_products(
    device: Device, layers: Sequence[PairLayer], passes: Sequence[PairPass], products: int
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` of layers, without the border.

    Sources: ``pair_stage.cu``, ``pair_products.cu``, ``pair_rows.cu``, ``moment.cu``.

    Args:
        device: Device of the arrays.
        layers: The layers, of one element type; their matrices are different.
        passes: The plan; the passes write disjoint tiles.
        products: Number of products of tensor cores for each product, 3 or 1.
    """
    tables = _staged(device, layers)
    parts = device.empty((max(part.parts for part in passes), TILE, TILE), np.float32)
    kind = INPUTS[layers[0].x.dtype.name]
    for part in passes:
        for (source, columns), jobs in part.jobs.items():
            shared, threads = shared_bytes(source, columns, products), 8 * DEPTH * columns
            arguments: tuple[Array, ...] = (tables.pairs, jobs, part.grids, parts)
            macros = {"COLUMNS": columns, "PRODUCTS": products}
            if source == "pair_rows":
                arguments = tables.rows, jobs, parts
                macros = {"SIDE": columns, "PRODUCTS": products, "INPUT": kind}
            multiply = kernel(device, source, source, shared_bytes=shared, **macros)
            multiply((len(jobs),), (threads,), arguments, shared_mem=shared)
        assemble(device, "assemble_moments", tables.targets, parts, part.sums, part.sources)


def shared_bytes(source: str, columns: int, products: int) -> int:
    """Return the dynamic shared memory of a block of ``pair_products`` or ``pair_rows``."""
    numbers = 2 if products == 3 else 1
    if source == "pair_rows":
        features = 2 * columns * TILE
        return int(2 * (2 * numbers * features * ROW_DEPTH) + 8 * features)
    seats = _ROWS + columns
    halves: int = _STAGES * numbers * seats * DEPTH * columns * TILE
    return 2 * halves + _SHARED + _SEAT * seats


class _Tables(NamedTuple):
    """Structs of the layers on the device, and arrays that they have addresses of."""

    pairs: Array
    rows: Array
    targets: Array
    buffers: Sequence[Array]


def _staged(device: Device, layers: Sequence[PairLayer]) -> _Tables:
    """Find the largest magnitudes of layers, and write images as pairs where these are copied."""
    table, pairs = np.zeros(len(layers), STAGED_LAYER), np.zeros(len(layers), PAIR_LAYER)
    rows, buffers = np.zeros(len(layers), ROW_LAYER), list[Array]()
    peak_blocks = pair_blocks = 0
    for i, layer in enumerate(layers):
        g, features = layer.copied, layer.features
        across = -(-g.channels // (_LANES if g.across else _WARPS))
        length = _images_of_piece(g, across, device)
        pieces, positions = -(-g.count // length), g.count * g.positions
        if layer.taps is None:
            positions = 0
        peaks = device.empty((pieces, g.channels), np.int32)
        exponents = device.empty((features,), np.int32)
        copies = device.empty((positions, 2, features), np.int16)
        buffers += peaks, exponents, copies
        x, *addresses = map(device.address, (layer.x, peaks, exponents, copies))
        blocks = peak_blocks, pair_blocks
        sizes = features, g.across, pieces, length
        table[i] = x, *addresses, g.images[0], g.taps[0], g.grid[0], *sizes, *blocks
        if layer.taps is None:
            images = g.images[0]
            strides = images["image_stride"], images["channel_stride"]
            rows[i] = x, addresses[0], *strides, g.pixels, g.channels, pieces
        else:
            pairs[i] = addresses[2], addresses[1], features, g.grid["outputs"][0], layer.taps[0]
        peak_blocks += pieces * across
        pair_blocks += -(-positions // TILE) * (features // TILE)
    targets = target_structs(device, [(layer.out, layer.scales) for layer in layers])
    staged, *others = _uploaded(device, (table, pairs, rows, targets))
    arguments = staged, int32(len(layers))
    kind = INPUTS[layers[0].x.dtype.name]
    kernel(device, "pair_stage", "find_peaks", INPUT=kind)((peak_blocks,), (BLOCK,), arguments)
    if pair_blocks:
        write = kernel(device, "pair_stage", "write_pairs", INPUT=kind)
        write((pair_blocks,), (BLOCK,), arguments)
    return _Tables(others[0], others[1], others[2], buffers)


def _uploaded(device: Device, tables: Sequence[Struct]) -> list[Array]:
    """Return tables on the device, after one upload; structs begin at multiples of eight bytes."""
    flat = [words(structs).reshape(-1) for structs in tables]
    whole, ends = device.upload(np.concatenate(flat)), np.cumsum([len(each) for each in flat])
    return [whole[end - len(each) : end] for end, each in zip(ends, flat, strict=True)]


def _images_of_piece(geometry: Geometry, blocks: int, device: Device) -> int:
    """Return the number of images of a piece of ``find_peaks``, of ``blocks`` blocks."""
    wanted: int = -(-_BLOCKS_EACH * device.processors // blocks)
    length: int = -(-geometry.count // min(geometry.count, wanted))
    return length
