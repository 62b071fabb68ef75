"""Launches Gram matrices of patches on FP32 units: products of patches, and their sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine.kernels.geometry import TARGET, UNIT_LAYER, Geometry, Struct, words
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, int32, kernel

TILE = 64  # size of a tile in the sources
UNIT_DEPTH = 16  # positions that a block of patch_products.cu loads at a time
_SUBTILE = 32  # size of the tile of a block of assemble_moments and mirror
_THIN_BLOCK = (_SUBTILE, 8)


@dataclass(frozen=True, slots=True)
class Pass:
    """The products of several layers that are computed and summed together.

    The arrays are those of the device.

    Attributes:
        grids: Boxes of output positions.
        jobs: The products of the blocks, by the source of their kernel and its variant: for
            ``patch_products`` whether all features of a tile have one tap, else the number of
            columns of tiles.
        sums: Place of each tile of the lower triangles, and its range in ``sources``.
        sources: Indices of partial results; ``~index`` is subtracted.
        parts: Number of partial results.
    """

    grids: Array
    jobs: Mapping[tuple[str, int], Array]
    sums: Array
    sources: Array
    parts: int


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of an accumulation ``out ← beta·out + alpha·new``.

    Attributes:
        features: Size of the Gram matrix, without the homogeneous coordinate.
        alpha: Scale of the new matrix.
        beta: Scale of the old values; zero overwrites.
    """

    features: int
    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class Layer:
    """Images of a layer, and what receives their moment.

    Attributes:
        x: Images ``(n, channels, *spatial_shape)`` of any strides.
        out: ``(size, size)`` float32, or ``(features,)`` of a diagonal; contiguous.
        scales: Scales of the moment and of the old values.
        geometry: Geometry of the images and the window.
        copied: Geometry of what is copied as pairs, the pixels of the images or their patches; or
            of the pixels if ``pair_rows.cu`` reads the images. None on FP32 units.
        taps: Taps that see the pairs; None if nothing is copied.
    """

    x: Array
    out: Array
    scales: Scales
    geometry: Geometry
    copied: Geometry | None = None
    taps: Struct | None = None


def add_unit_products(device: Device, layers: Sequence[Layer], passes: Sequence[Pass]) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` of layers, without the border, on FP32 units.

    Sources: ``patch_products.cu``, ``moment.cu``.

    Args:
        device: Device of the arrays.
        layers: The layers, of one element type; their matrices are different.
        passes: The plan; the passes write disjoint tiles.
    """
    geometries = [(layer, layer.geometry) for layer in layers]
    rows = [(device.address(layer.x), g.images[0], g.taps[0]) for layer, g in geometries]
    table, targets = uploaded(device, (np.array(rows, UNIT_LAYER), target_structs(device, layers)))
    parts = device.empty((max(part.parts for part in passes), TILE, TILE), np.float32)
    kind = INPUTS[layers[0].x.dtype.name]
    for part in passes:
        for (source, aligned), jobs in part.jobs.items():
            multiply = kernel(device, source, source, ALIGNED=aligned, INPUT=kind)
            multiply((len(jobs),), (BLOCK,), (table, jobs, part.grids, parts))
        assemble(device, targets, parts, part)


def target_structs(device: Device, layers: Sequence[Layer]) -> Struct:
    """Return structs ``Target`` of the matrices of layers, with their scales."""
    rows = [
        (device.address(layer.out), len(layer.out), layer.scales.alpha, layer.scales.beta)
        for layer in layers
    ]
    return np.array(rows, TARGET)


def uploaded(device: Device, tables: Sequence[Struct]) -> list[Array]:
    """Return tables on the device, after one upload; structs begin at multiples of eight bytes."""
    flat = [words(structs).reshape(-1) for structs in tables]
    whole, ends = device.upload(np.concatenate(flat)), np.cumsum([len(each) for each in flat])
    return [whole[end - len(each) : end] for end, each in zip(ends, flat, strict=True)]


def assemble(device: Device, targets: Array, parts: Array, part: Pass) -> None:
    """Compute tiles of matrices from partial results (``moment.cu``).

    Args:
        device: Device of the arrays.
        targets: Structs ``Target``.
        parts: Partial results.
        part: The pass that they are of.
    """
    launch = kernel(device, "moment", "assemble_moments")
    blocks = len(part.sums), TILE // _THIN_BLOCK[0] * TILE // _THIN_BLOCK[1]
    launch(blocks, _THIN_BLOCK, (targets, parts, part.sums, part.sources))


def mirror(device: Device, out: Array) -> None:
    """Copy the lower triangle of a float32 matrix to its upper triangle (``moment.cu``)."""
    rows = -(-len(out) // _SUBTILE)
    copy = kernel(device, "moment", "mirror")
    copy((rows * (rows + 1) // 2,), _THIN_BLOCK, (out, int32(len(out))))
