"""Launches copies of patches, and their sums in the border and diagonal of a Gram matrix."""

from collections.abc import Sequence
from math import prod

import numpy as np

from kfac_engine.kernels.geometry import SUMMED_LAYER, Geometry, words
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, blocks_for, int32, kernel
from kfac_engine.kernels.moments import Layer

# Number of blocks for each multiprocessor, if there are enough images.
_BLOCKS_EACH = 8
# Least number of images of a piece, because the sums of pieces must be added.
_LEAST_IMAGES = 8


def write_patches(device: Device, x: Array, out: Array, geometry: Geometry) -> None:
    """Copy the patches of ``x`` to ``out``, ``(n, positions, taps·channels)``, contiguous."""
    write = kernel(device, "patches", "patches", INPUT=INPUTS[x.dtype.name])
    blocks = blocks_for(prod(out.shape), device)
    structs = geometry.images, geometry.taps, geometry.grid
    write((blocks,), (BLOCK,), (x, out, *structs))


def add_borders(device: Device, layers: Sequence[Layer]) -> None:
    """Compute the last rows and columns of ``out ← beta·out + alpha·(Σ z, number of patches)``.

    The layers have one element type, and different matrices.

    Source: ``patch_sums.cu``.
    """
    _add_sums(device, layers, squared=False)


def add_patch_squares(device: Device, layer: Layer) -> None:
    """Compute ``out ← beta·out + alpha·Σ z²``, entry by entry (``patch_sums.cu``)."""
    _add_sums(device, [layer], squared=True)


def _add_sums(device: Device, layers: Sequence[Layer], *, squared: bool) -> None:
    """Add the pixels of each channel over the images of each piece, then the pixels of each tap."""
    table = np.zeros(len(layers), SUMMED_LAYER)
    first_totals = first_features = 0
    buffers = []
    for i, layer in enumerate(layers):
        g, scales = layer.geometry, layer.scales
        blocks = -(-g.channels * g.pixels // BLOCK)
        wanted = -(-_BLOCKS_EACH * device.processors // blocks)
        length = max(_LEAST_IMAGES, -(-g.count // wanted))
        pieces = max(1, -(-g.count // length))
        buffers.append(device.empty((pieces, g.channels, g.pixels), np.float32))
        addresses = map(device.address, (layer.x, buffers[-1], layer.out))
        sizes = scales.features, g.across, pieces, length, first_totals, first_features
        count = g.positions * g.count
        structs = g.images[0], g.taps[0], g.grid[0]
        table[i] = *addresses, *structs, *sizes, count, scales.alpha, scales.beta
        first_totals += pieces * blocks
        first_features += scales.features + (not squared)
    macros = {"SQUARED": int(squared), "INPUT": INPUTS[layers[0].x.dtype.name]}
    arguments = device.upload(words(table)), int32(len(layers))
    for name, blocks in (("sum_images", first_totals), ("add_sums", first_features)):
        kernel(device, "patch_sums", name, **macros)((blocks,), (BLOCK,), arguments)
