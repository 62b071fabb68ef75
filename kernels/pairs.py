"""Launches products of patches from pairs of half-precision numbers, of several layers at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine.kernels.geometry import PAIR_LAYER, STAGED_LAYER, Geometry, words
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, int32, kernel
from kfac_engine.kernels.moments import TILE, Scales, assemble, target_structs

# Number of positions of a stage of pair_products.cu for each column of tiles, and number of stages.
DEPTH = 16
_STAGES = 3
_ROWS = 2
# Bytes of the struct Shared, without its seats, and of a seat.
_SHARED, _SEAT = 72, 16
# Number of blocks of find_peaks for each multiprocessor, if there are enough images.
_BLOCKS_EACH = 8
_WARPS = 8  # channels of a block of find_peaks


@dataclass(frozen=True, slots=True)
class PairLayer:
    """Images of a layer, and the matrix that receives their moment.

    Attributes:
        x: Images ``(n, channels, *spatial_shape)`` of any strides.
        out: ``(size, size)`` float32, contiguous.
        geometry: Geometry of the images and the window.
        scales: Scales of the moment and of the old values.
    """

    x: Array
    out: Array
    geometry: Geometry
    scales: Scales


@dataclass(frozen=True, slots=True)
class PairPass:
    """The products of several layers, as arrays of the device.

    Attributes:
        grids: Boxes of output positions.
        jobs: The products of the blocks, by their columns of tiles: 1 or 2.
        sums: Range in ``sources`` of each tile of the lower triangles.
        sources: Indices of partial results; ``~index`` is subtracted.
        parts: Number of partial results.
    """

    grids: Array
    jobs: Mapping[int, Array]
    sums: Array
    sources: Array
    parts: int


def add_pair_products(
    device: Device, layers: Sequence[PairLayer], passes: Sequence[PairPass]
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` of layers, without the border.

    Sources: ``pair_stage.cu``, ``pair_products.cu``, ``moment.cu``.

    Args:
        device: Device of the arrays.
        layers: The layers, of one element type; their matrices are different.
        passes: The plan; the passes write disjoint tiles.
    """
    exponents, pairs = _staged(device, layers)
    table = np.zeros(len(layers), PAIR_LAYER)
    for row, layer, exponent, pair in zip(table, layers, exponents, pairs, strict=True):
        (images,), (taps,) = layer.geometry.images, layer.geometry.taps
        row["pairs"], row["exponents"] = device.address(pair), device.address(exponent)
        row["channels"], row["shape"], row["taps"] = images["channels"], images["shape"], taps
    sources = device.upload(words(table))
    structs = target_structs(device, [(layer.out, layer.scales) for layer in layers])
    targets = device.upload(words(structs))
    parts = device.empty((max(part.parts for part in passes), TILE, TILE), np.float32)
    for part in passes:
        for columns, jobs in part.jobs.items():
            shared = shared_bytes(columns)
            multiply = kernel(
                device, "pair_products", "pair_products", shared_bytes=shared, COLUMNS=columns
            )
            arguments = sources, jobs, part.grids, parts
            multiply((len(jobs),), (8 * DEPTH * columns,), arguments, shared_mem=shared)
        assemble(device, "assemble_moments", targets, parts, part.sums, part.sources)


def shared_bytes(columns: int) -> int:
    """Return the dynamic shared memory of a block of ``pair_products``, in bytes."""
    seats = _ROWS + columns
    halves: int = _STAGES * 2 * seats * DEPTH * columns * TILE
    return 2 * halves + _SHARED + _SEAT * seats


def _staged(device: Device, layers: Sequence[PairLayer]) -> tuple[Sequence[Array], Sequence[Array]]:
    """Write the images of layers as pairs; return the exponents and the pairs of each layer."""
    geometries = [layer.geometry for layer in layers]
    lengths = [_images_of_piece(g, device) for g in geometries]
    pieces = [-(-g.count // length) for g, length in zip(geometries, lengths, strict=True)]
    peaks = [
        device.empty((p, g.channels), np.int32) for g, p in zip(geometries, pieces, strict=True)
    ]
    exponents = [device.empty((g.channels,), np.int32) for g in geometries]
    pairs = [device.empty((g.count, g.pixels, 2, g.channels), np.int16) for g in geometries]
    table = np.zeros(len(layers), STAGED_LAYER)
    peak_blocks = pair_blocks = 0
    for i, (row, layer, g) in enumerate(zip(table, layers, geometries, strict=True)):
        row["x"], row["images"] = device.address(layer.x), g.images[0]
        row["peaks"], row["exponents"] = device.address(peaks[i]), device.address(exponents[i])
        row["pairs"] = device.address(pairs[i])
        row["pieces"], row["length"] = pieces[i], lengths[i]
        row["first_peaks"], row["first_pairs"] = peak_blocks, pair_blocks
        peak_blocks += pieces[i] * g.channels // _WARPS
        pair_blocks += g.count * g.channels // TILE * -(-g.pixels // TILE)
    arguments = device.upload(words(table)), int32(len(layers))
    kind = INPUTS[layers[0].x.dtype.name]
    kernel(device, "pair_stage", "find_peaks", INPUT=kind)((peak_blocks,), (BLOCK,), arguments)
    kernel(device, "pair_stage", "write_pairs", INPUT=kind)((pair_blocks,), (BLOCK,), arguments)
    return exponents, pairs


def _images_of_piece(geometry: Geometry, device: Device) -> int:
    """Return the number of images whose largest magnitudes a warp finds."""
    blocks = geometry.channels // _WARPS
    wanted: int = -(-_BLOCKS_EACH * device.processors // blocks)
    length: int = -(-geometry.count // min(geometry.count, wanted))
    return length
