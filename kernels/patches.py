"""Launches copies of patches (``patches.cu``)."""

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


def write_patches(device: Device, x: Array, out: Array, geometry: Geometry) -> None:
    """Copy the patches of ``x`` to ``out``, ``(n, positions, taps·channels)``, contiguous."""
    write = kernel(device, "patches", "patches", INPUT=INPUTS[x.dtype.name])
    blocks = blocks_for(prod(out.shape), device)
    structs = geometry.images, geometry.taps, geometry.grid
    write((blocks,), (BLOCK,), (x, out, *structs))
