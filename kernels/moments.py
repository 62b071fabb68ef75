"""Symmetric moments: products of patches, and their sum; see the sources named below."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine.kernels.geometry import Geometry
from kfac_engine.kernels.launch import (
    BLOCK,
    Array,
    Device,
    float32,
    int32,
    kernel,
)
from kfac_engine.kernels.variants import INPUTS

TILE = 64  # side of a tile, in the sources
_SUBTILE = 32  # what a block of assemble_moment and of mirror does
_THIN_BLOCK = (_SUBTILE, 8)


@dataclass(frozen=True, slots=True)
class Pass:
    """Products that are computed and summed together, on the device.

    Attributes:
        aligned: Whether all features of a tile have one tap.
        grids: Boxes of output positions.
        jobs: What each block multiplies.
        sums: Which parts make which tile of the lower triangle.
        sources: Indices of parts; ``~index`` is taken off.
    """

    aligned: bool
    grids: Array
    jobs: Array
    sums: Array
    sources: Array

    @property
    def part_bytes(self) -> int:
        """Memory for what the blocks find."""
        return len(self.jobs) * TILE**2 * 4


@dataclass(frozen=True, slots=True)
class Scales:
    """How a moment joins the old one.

    Attributes:
        features: Side of the moment, without the homogeneous coordinate.
        alpha: Scale of the new moment.
        beta: Scale of the old values; zero overwrites.
    """

    features: int
    alpha: float
    beta: float

    @property
    def arguments(self) -> tuple[np.float32, np.float32]:
        """As kernels take them."""
        return float32(self.alpha), float32(self.beta)


def add_products(
    device: Device,
    x: Array,
    out: Array,
    geometry: Geometry,
    passes: Sequence[Pass],
    scales: Scales,
    split: int,
) -> None:
    """``out ← beta·out + alpha·Σ z zᵀ`` for the first ``features`` rows and columns.

    Sources: ``patch_products.cu``, ``moment.cu``.

    Args:
        device: Where to.
        x: Images of any strides.
        out: ``(side, side)`` float32, contiguous.
        geometry: Of ``x`` and the window.
        passes: The plan; each pass writes other tiles of ``out``.
        scales: Of the product and of the old values.
        split: TF32 numbers a factor is split into: 3 or 1 for tensor cores, 0 for FP32 units.
    """
    parts = device.empty((max(part.part_bytes for part in passes) // 4,), np.float32)
    for part in passes:
        how = {"SPLIT": split, "ALIGNED": int(part.aligned), "INPUT": INPUTS[x.dtype.name]}
        multiply = kernel(device, "patch_products", "patch_products", **how)
        threads = BLOCK if split == 0 else BLOCK // 2  # THREADS in the source
        structs = geometry.images, geometry.taps
        multiply((len(part.jobs),), (threads,), (x, part.jobs, part.grids, parts, *structs))
        assemble = kernel(device, "moment", "assemble_moment")
        scalars = int32(len(out)), int32(scales.features), *scales.arguments
        blocks = len(part.sums), (TILE // _SUBTILE) ** 2
        assemble(blocks, _THIN_BLOCK, (out, parts, part.sums, part.sources, *scalars))


def mirror(device: Device, out: Array) -> None:
    """Copy the lower triangle of a contiguous float32 matrix to the upper; see ``moment.cu``."""
    rows = -(-len(out) // _SUBTILE)
    copy = kernel(device, "moment", "mirror")
    copy((rows * (rows + 1) // 2,), _THIN_BLOCK, (out, int32(len(out))))
