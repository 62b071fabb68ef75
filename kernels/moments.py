"""Symmetric moments: products of patches, their sum, the border; see the sources named below."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kfac_engine.kernels.geometry import Struct
from kfac_engine.kernels.launch import (
    BLOCK,
    INPUTS,
    Array,
    Device,
    float32,
    int32,
    source,
)
from kfac_engine.kernels.variants import options

_SUBTILE = 32  # what a block of assemble_moment and of mirror does
_THIN_BLOCK = (_SUBTILE, 8)


@dataclass(frozen=True, slots=True)
class Pass:
    """Products that are computed and summed together, on the device.

    Attributes:
        tile: Side of a tile: 64 or 128.
        aligned: Whether all features of a tile have one tap.
        grids: Boxes of output positions.
        jobs: What each block multiplies.
        sums: Which parts make which tile of the lower triangle.
        sources: Indices of parts; ``~index`` is taken off.
    """

    tile: int
    aligned: bool
    grids: Array
    jobs: Array
    sums: Array
    sources: Array

    @property
    def part_bytes(self) -> int:
        """Memory for what the blocks find."""
        return len(self.jobs) * self.tile**2 * 4


def add_products(  # noqa: PLR0913 (all that a launch needs)
    device: Device,
    x: Array,
    out: Array,
    passes: Sequence[Pass],
    images: Struct,
    taps: Struct,
    *,
    features: int,
    split: int,
    alpha: float,
    beta: float,
) -> None:
    """``out ← beta·out + alpha·Σ z zᵀ`` for the first ``features`` rows and columns.

    Sources: ``patch_products.cu``, ``moment.cu``.

    Args:
        device: Where to.
        x: Images of any strides.
        out: ``(side, side)`` float32, contiguous.
        passes: The plan; each pass writes other tiles of ``out``.
        images: Geometry of ``x``.
        taps: Geometry of the kernel.
        features: Side less one if there is a homogeneous coordinate.
        split: TF32 numbers a factor is split into: 3 or 1 for tensor cores, 0 for FP32 units.
        alpha: Scale of the product.
        beta: Scale of the old values; zero overwrites.
    """
    parts = device.empty((max(part.part_bytes for part in passes) // 4,), np.float32)
    for part in passes:
        macros = options(
            TILE=part.tile, SPLIT=split, ALIGNED=int(part.aligned), INPUT=INPUTS[x.dtype.name]
        )
        multiply = device.function(source("patch_products"), "patch_products", macros)
        threads = BLOCK if split == 0 or part.tile == 128 else BLOCK // 2  # THREADS in the source
        multiply((len(part.jobs),), (threads,), (x, part.jobs, part.grids, parts, images, taps))
        assemble = device.function(source("moment"), "assemble_moment", options(TILE=part.tile))
        scalars = int32(len(out)), int32(features), float32(alpha), float32(beta)
        blocks = len(part.sums), (part.tile // _SUBTILE) ** 2
        assemble(blocks, _THIN_BLOCK, (out, parts, part.sums, part.sources, *scalars))


def add_border(  # noqa: PLR0913 (all that a launch needs)
    device: Device,
    x: Array,
    out: Array,
    images: Struct,
    taps: Struct,
    grid: Struct,
    *,
    alpha: float,
    beta: float,
) -> None:
    """Last row and column of ``out`` ← ``beta`` times them plus ``alpha`` (Σ z, number of patches).

    Source: ``borders.cu``.

    Args:
        device: Where to.
        x: Images of any strides.
        out: ``(features + 1, features + 1)`` float32, contiguous.
        images: Geometry of ``x``.
        taps: Geometry of the kernel.
        grid: All output positions.
        alpha: Scale of the sums.
        beta: Scale of the old values; zero overwrites.
    """
    macros = options(INPUT=INPUTS[x.dtype.name])
    pixels, channels = prod(images["sides"].tolist()), int(images["channels"])
    totals = device.empty((channels, pixels), np.float32)
    add = device.function(source("borders"), "sum_images", macros)
    add((-(-pixels // BLOCK), channels), (BLOCK,), (x, totals, images))
    count = prod(grid["outputs"].tolist()) * int(images["images"])
    write = device.function(source("borders"), "border_moment", macros)
    scalars = float32(count), float32(alpha), float32(beta)
    write((len(out),), (BLOCK,), (out, totals, images, taps, grid, *scalars))


def mirror(device: Device, out: Array) -> None:
    """Copy the lower triangle of a contiguous float32 matrix to the upper; see ``moment.cu``."""
    rows = -(-len(out) // _SUBTILE)
    kernel = device.function(source("moment"), "mirror", options(TILE=64))
    kernel((rows * (rows + 1) // 2,), _THIN_BLOCK, (out, int32(len(out))))
