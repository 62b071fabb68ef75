"""Sums over patches: the border of a moment, and the squares on its diagonal; see the source."""

from typing import NamedTuple

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
from kfac_engine.kernels.moments import Scales
from kfac_engine.kernels.variants import INPUTS

# Blocks for each multiprocessor, where there are images enough.
_BLOCKS_EACH = 8
# Fewer images are not worth a piece of their own, which is added up once more.
_LEAST_IMAGES = 8


class _Totals(NamedTuple):
    """Sums over images, and how the kernels that read them are compiled."""

    sums: Array
    pieces: int
    macros: dict[str, int]


def add_border(device: Device, x: Array, out: Array, geometry: Geometry, scales: Scales) -> None:
    """Last row and column of ``out`` ← ``beta`` times them plus ``alpha`` (Σ z, number of patches).

    Source: ``patch_sums.cu``.

    Args:
        device: Where to.
        x: Images of any strides.
        out: ``(features + 1, features + 1)`` float32, contiguous.
        geometry: Of ``x`` and the window.
        scales: Of the sums and of the old values.
    """
    totals = _sum_images(device, x, geometry, squared=False)
    write = kernel(device, "patch_sums", "border_moment", **totals.macros)
    structs = geometry.images, geometry.taps, geometry.grid
    count = float32(geometry.positions * geometry.count)
    given = totals.sums, int32(totals.pieces), *structs, count
    write((len(out),), (BLOCK,), (out, *given, *scales.arguments))


def add_patch_squares(
    device: Device, x: Array, out: Array, geometry: Geometry, scales: Scales
) -> None:
    """``out ← beta·out + alpha·Σ z²``, feature by feature; see ``patch_sums.cu``.

    Args:
        device: Where to.
        x: Images of any strides.
        out: ``(features,)`` float32, contiguous.
        geometry: Of ``x`` and the window.
        scales: Of the squares and of the old values.
    """
    totals = _sum_images(device, x, geometry, squared=True)
    add = kernel(device, "patch_sums", "add_patches", **totals.macros)
    structs = geometry.images, geometry.taps, geometry.grid
    given = totals.sums, int32(totals.pieces), *structs
    add((scales.features,), (BLOCK,), (out, *given, *scales.arguments))


def _sum_images(device: Device, x: Array, geometry: Geometry, *, squared: bool) -> _Totals:
    """Each pixel of each channel summed over the images of each piece."""
    across = int(_across(geometry))
    macros = {"SQUARED": int(squared), "ACROSS": across, "INPUT": INPUTS[x.dtype.name]}
    blocks = -(-geometry.channels * geometry.pixels // BLOCK)
    wanted = -(-_BLOCKS_EACH * device.processors // blocks)
    length = max(_LEAST_IMAGES, -(-geometry.count // wanted))
    pieces = max(1, -(-geometry.count // length))
    totals = device.empty((pieces, geometry.channels, geometry.pixels), np.float32)
    add = kernel(device, "patch_sums", "sum_images", **macros)
    add((blocks, pieces), (BLOCK,), (x, totals, geometry.images, int32(length)))
    return _Totals(totals, pieces, macros)


def _across(geometry: Geometry) -> bool:
    """Whether channels lie closer together in memory than pixels."""
    (images,) = geometry.images
    strides = [
        step
        for step, side in zip(images["pixel_strides"], images["sides"], strict=True)
        if side > 1
    ]
    return all(images["channel_stride"] < step for step in strides)
