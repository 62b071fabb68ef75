"""Launches products of patches from pairs of half-precision numbers, of several layers at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kfac_engine.kernels.geometry import (
    PAIR_LAYER,
    ROW_LAYER,
    STAGED_LAYER,
    Geometry,
)
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, int32, kernel
from kfac_engine.kernels.moments import TILE, Layer, Pass, assemble, target_structs, uploaded

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


def padded(features: int) -> int:
    """Return the number of features of whole tiles."""
    return int(-(-features // TILE) * TILE)


def add_pair_products(
    device: Device, layers: Sequence[Layer], passes: Sequence[Pass], products: int
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
        assemble(device, tables.targets, parts, part)


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


def _staged(device: Device, layers: Sequence[Layer]) -> _Tables:
    """Find the largest magnitudes of layers, and write images as pairs where these are copied."""
    table, pairs = np.zeros(len(layers), STAGED_LAYER), np.zeros(len(layers), PAIR_LAYER)
    rows, buffers = np.zeros(len(layers), ROW_LAYER), list[Array]()
    peak_blocks = pair_blocks = 0
    for i, layer in enumerate(layers):
        g = layer.copied
        features = padded(int(g.taps["kernel"].prod()) * g.channels)
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
    staged, *others = uploaded(device, (table, pairs, rows, target_structs(device, layers)))
    arguments = staged, int32(len(layers))
    kind = INPUTS[layers[0].x.dtype.name]
    kernel(device, "pair_stage", "find_peaks", INPUT=kind)((peak_blocks,), (BLOCK,), arguments)
    if pair_blocks:
        write = kernel(device, "pair_stage", "write_pairs", INPUT=kind)
        write((pair_blocks,), (BLOCK,), arguments)
    return _Tables(others[0], others[1], others[2], buffers)


def _images_of_piece(geometry: Geometry, blocks: int, device: Device) -> int:
    """Return the number of images of a piece of ``find_peaks``, of ``blocks`` blocks."""
    wanted: int = -(-_BLOCKS_EACH * device.processors // blocks)
    length: int = -(-geometry.count // min(geometry.count, wanted))
    return length
