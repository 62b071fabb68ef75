"""Patches written out; see ``patches.cu``."""

from math import prod

from kfac_engine.kernels.geometry import Geometry
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, blocks_for, source
from kfac_engine.kernels.variants import options


def write_patches(device: Device, x: Array, found: Array, geometry: Geometry) -> None:
    """Fill ``found``, ``(n, positions, taps·channels)``, contiguous, in the type of ``x``."""
    macros = options(INPUT=INPUTS[x.dtype.name])
    kernel = device.function(source("patches"), "patches", macros)
    blocks = blocks_for(prod(found.shape), device)
    structs = geometry.images, geometry.taps, geometry.grid
    kernel((blocks,), (BLOCK,), (x, found, *structs))
