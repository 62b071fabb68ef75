"""Launches copies of patches, and their sums in the border and diagonal of a Gram matrix."""

from math import prod
from typing import NamedTuple

import numpy as np

from kfac_engine.kernels.geometry import Geometry
from kfac_engine.kernels.launch import (
    BLOCK,
    INPUTS,
    Array,
    Device,
    blocks_for,
    float32,
    int32,
    kernel,
)
from kfac_engine.kernels.moments import Scales

# Number of blocks for each multiprocessor, if there are enough images.
_BLOCKS_EACH = 8
# Least number of images of a piece, because the sums of pieces must be added.
_LEAST_IMAGES = 8


class _Totals(NamedTuple):
    """The sums over images, with the macros of the kernels that read them."""

    sums: Array
    pieces: int
    macros: dict[str, int]


def write_patches(device: Device, x: Array, out: Array, geometry: Geometry) -> None:
    """Copy the patches of ``x`` to ``out``, ``(n, positions, taps·channels)``, contiguous."""
    write = kernel(device, "patches", "patches", INPUT=INPUTS[x.dtype.name])
    blocks = blocks_for(prod(out.shape), device)
    structs = geometry.images, geometry.taps, geometry.grid
    write((blocks,), (BLOCK,), (x, out, *structs))


def add_border(device: Device, x: Array, out: Array, geometry: Geometry, scales: Scales) -> None:
    """Compute the last row and column of ``out ← beta·out + alpha·(Σ z, number of patches)``.

    The images ``x`` have any strides. ``out`` is ``(features + 1, features + 1)`` float32,
    contiguous.

    Source: ``patch_sums.cu``.
    """
    totals = _sum_images(device, x, geometry, squared=False)
    write = kernel(device, "patch_sums", "border_moment", **totals.macros)
    structs = geometry.images, geometry.taps, geometry.grid
    count = float32(geometry.positions * geometry.count)
    arguments = totals.sums, int32(totals.pieces), *structs, count
    write((len(out),), (BLOCK,), (out, *arguments, *scales.arguments))


def add_patch_squares(
    device: Device, x: Array, out: Array, geometry: Geometry, scales: Scales
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z²``, entry by entry (``patch_sums.cu``).

    The images ``x`` have any strides. ``out`` is ``(features,)`` float32, contiguous.
    """
    totals = _sum_images(device, x, geometry, squared=True)
    add = kernel(device, "patch_sums", "add_patches", **totals.macros)
    structs = geometry.images, geometry.taps, geometry.grid
    arguments = totals.sums, int32(totals.pieces), *structs
    add((scales.features,), (BLOCK,), (out, *arguments, *scales.arguments))


def _sum_images(device: Device, x: Array, geometry: Geometry, *, squared: bool) -> _Totals:
    """Return the sums of each pixel of each channel over the images of each piece."""
    across = int(geometry.across)
    macros = {"SQUARED": int(squared), "ACROSS": across, "INPUT": INPUTS[x.dtype.name]}
    blocks = -(-geometry.channels * geometry.pixels // BLOCK)
    wanted = -(-_BLOCKS_EACH * device.processors // blocks)
    length = max(_LEAST_IMAGES, -(-geometry.count // wanted))
    pieces = max(1, -(-geometry.count // length))
    totals = device.empty((pieces, geometry.channels, geometry.pixels), np.float32)
    add = kernel(device, "patch_sums", "sum_images", **macros)
    add((blocks, pieces), (BLOCK,), (x, totals, geometry.images, int32(length)))
    return _Totals(totals, pieces, macros)
