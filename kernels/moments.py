"""Launches Gram matrices of patches on FP32 units: products of patches, and their sums."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine.kernels.geometry import TARGET, Geometry, Struct
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, float32, int32, kernel

TILE = 64  # size of a tile in the sources
_SUBTILE = 32  # size of the tile of a block of assemble_moment and mirror
_THIN_BLOCK = (_SUBTILE, 8)


@dataclass(frozen=True, slots=True)
class Pass:
    """The products that are computed and summed together, as arrays of the device.

    Attributes:
        aligned: Whether all features of a tile have one tap.
        grids: Boxes of output positions.
        jobs: Products of the blocks.
        sums: Place of each tile of the lower triangle, and its range in ``sources``.
        sources: Indices of partial results; ``~index`` is subtracted.
    """

    aligned: bool
    grids: Array
    jobs: Array
    sums: Array
    sources: Array

    @property
    def part_bytes(self) -> int:
        """The memory of the partial results, in bytes."""
        return len(self.jobs) * TILE**2 * 4


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

    @property
    def arguments(self) -> tuple[np.float32, np.float32]:
        """The two scales as arguments of a kernel."""
        return float32(self.alpha), float32(self.beta)


def add_products(
    device: Device,
    x: Array,
    out: Array,
    geometry: Geometry,
    passes: Sequence[Pass],
    scales: Scales,
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` for rows and columns of features, on FP32 units.

    Sources: ``patch_products.cu``, ``moment.cu``.

    Args:
        device: Device of the arrays.
        x: Images of any strides.
        out: ``(size, size)`` float32, contiguous.
        geometry: Geometry of ``x`` and the window.
        passes: The plan; the passes write disjoint tiles of ``out``.
        scales: Scales of the product and of the old values.
    """
    targets = target_structs(device, [(out, scales)])
    parts = device.empty((max(part.part_bytes for part in passes) // 4,), np.float32)
    for part in passes:
        how = {"ALIGNED": int(part.aligned), "INPUT": INPUTS[x.dtype.name]}
        multiply = kernel(device, "patch_products", "patch_products", **how)
        structs = geometry.images, geometry.taps
        multiply((len(part.jobs),), (BLOCK,), (x, part.jobs, part.grids, parts, *structs))
        assemble(device, "assemble_moment", targets, parts, part.sums, part.sources)


def target_structs(device: Device, targets: Sequence[tuple[Array, Scales]]) -> Struct:
    """Return structs ``Target`` of matrices with their scales."""
    return np.array(
        [(device.address(out), len(out), scales.alpha, scales.beta) for out, scales in targets],
        TARGET,
    )


def assemble(
    device: Device, name: str, targets: Array, parts: Array, sums: Array, sources: Array
) -> None:
    """Compute tiles of matrices from partial results (``moment.cu``).

    Args:
        device: Device of the arrays.
        name: ``assemble_moment`` or ``assemble_moments``.
        targets: A struct ``Target`` on the host, or a table of several on the device.
        parts: Partial results.
        sums: Structs ``Sum``.
        sources: As in ``Pass``.
    """
    launch = kernel(device, "moment", name)
    blocks = len(sums), TILE // _THIN_BLOCK[0] * TILE // _THIN_BLOCK[1]
    launch(blocks, _THIN_BLOCK, (targets, parts, sums, sources))


def mirror(device: Device, out: Array) -> None:
    """Copy the lower triangle of a float32 matrix to its upper triangle (``moment.cu``)."""
    rows = -(-len(out) // _SUBTILE)
    copy = kernel(device, "moment", "mirror")
    copy((rows * (rows + 1) // 2,), _THIN_BLOCK, (out, int32(len(out))))
