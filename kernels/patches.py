"""Patches written out; see ``patches.cu``."""

from math import prod

from kfac_engine.kernels.geometry import Geometry
from kfac_engine.kernels.launch import (
    BLOCK,
    Array,
    Device,
    blocks_for,
    kernel,
)
from kfac_engine.kernels.variants import INPUTS


def write_patches(device: Device, x: Array, found: Array, geometry: Geometry) -> None:
    """Fill ``found``, ``(n, positions, taps·channels)``, contiguous, in the type of ``x``."""
    write = kernel(device, "patches", "patches", INPUT=INPUTS[x.dtype.name])
    blocks = blocks_for(prod(found.shape), device)
    structs = geometry.images, geometry.taps, geometry.grid
    write((blocks,), (BLOCK,), (x, found, *structs))
