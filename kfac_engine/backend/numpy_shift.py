"""Second moments of patches for stride one, from the moments of shifted images.

Over the full grid of output positions (``frame``), each tap meets every pixel once, so that the
block of taps ``u`` and ``v`` depends on their distance alone:

    Σ_o z_o[u] z_o[v]ᵀ = R[u − v],   R[δ] = Σ_q x[:, q + δ·dilation] x[:, q]ᵀ,   R[−δ] = R[δ]ᵀ.

A kernel of 3 × 3 has 45 such blocks on and under the diagonal but 13 distances. The frame, which
the layer's own outputs lack, is subtracted slab by slab. Both parts are positive semi-definite and
of similar size, so the difference keeps the rounding error of one of them.
"""

from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend import blas
from kfac_engine.backend.frame import Slab, frame
from kfac_engine.backend.numpy_im2col import patch_matrices
from kfac_engine.backend.numpy_moments import scale
from kfac_engine.backend.window import Window

# From one tap to another, one step an axis.
Distance: TypeAlias = tuple[int, ...]


def add_shifted(
    x: Array, window: Window, out: Array, alpha: float, beta: float, chunk_bytes: int
) -> None:
    """Lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches ``z``.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides.
        window: Of stride one.
        out: ``(taps·channels, same)``; rows may lie apart. What is above the diagonal is lost.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        chunk_bytes: Bound of the copies made for the frame; ``scratch_numbers`` come on top.
    """
    moments = _moments(x, window, out.dtype, alpha)
    channels = x.shape[1]
    blocks = out.reshape(*window.kernel, channels, *window.kernel, channels)
    taps = list(product(*map(range, window.kernel)))
    for i, u in enumerate(taps):
        for v in taps[: i + 1]:
            spot: tuple[int | slice, ...] = (*u, slice(None), *v)
            block = blocks[spot]
            scale(block, beta)
            block += moments[tuple(a - b for a, b in zip(u, v, strict=True))]
    for slab in frame(window, x.shape[2:]):
        _subtract(slab, window.kernel, x, out, alpha, chunk_bytes)


def distances(window: Window) -> list[Distance]:
    """All distances from a tap or an earlier one, in row-major order, to a tap."""
    steps = product(*(range(1 - k, k) for k in window.kernel))
    return [step for step in steps if step >= (0,) * len(step)]


def scratch_numbers(window: Window, channels: int, sides: tuple[int, ...]) -> int:
    """Numbers kept while adding: one image with its gaps and a block for each distance."""
    return channels * (prod(gapped_sides(sides, window)) + channels * len(distances(window)))


def gapped_sides(sides: tuple[int, ...], window: Window) -> tuple[int, ...]:
    """Sides of an image that has room behind each axis but the first for the longest shift.

    In such an image, flattened, a shift along any axes is a shift by one number: what leaves an
    axis falls into the gap of zeros behind it (or behind the line before), never on a pixel.

    Args:
        sides: Pixels of the image an axis.
        window: Of stride one.

    Returns:
        Sides of the padded image.
    """
    first, *others = sides
    gaps = window.reaches[1:]
    return first, *(side + gap for side, gap in zip(others, gaps, strict=True))


def _moments(x: Array, window: Window, dtype: DType, alpha: float) -> dict[Distance, Array]:
    """``alpha·R[δ]`` for every distance, ``(channels, channels)`` each."""
    channels, sides = x.shape[1], x.shape[2:]
    gapped = gapped_sides(sides, window)
    room = np.zeros((channels, *gapped), dtype)
    pixels, flat = room[:, *(slice(side) for side in sides)], room.reshape(channels, -1)
    moments = {step: np.zeros((channels, channels), dtype) for step in distances(window)}
    strides = [prod(gapped[axis + 1 :]) for axis in range(len(sides))]
    products = []
    for step, moment in moments.items():
        if _overlap(step, window, sides):
            pixels_apart = [u * d for u, d in zip(step, window.dilations, strict=True)]
            shift = sum(a * b for a, b in zip(pixels_apart, strides, strict=True))
            shifted, still = flat[:, shift:], flat[:, : flat.shape[1] - shift]
            products.append(blas.gemm_call(shifted, still, moment, alpha=alpha, beta=1.0))
    for image in x:
        pixels[...] = image
        for add_product in products:
            add_product()
    return moments


def _overlap(step: Distance, window: Window, sides: tuple[int, ...]) -> bool:
    """Whether an image and itself shifted by ``step`` have a pixel in common."""
    return all(
        abs(u) * dilation < side
        for u, dilation, side in zip(step, window.dilations, sides, strict=True)
    )


def _subtract(
    slab: Slab, kernel: tuple[int, ...], x: Array, out: Array, alpha: float, chunk_bytes: int
) -> None:
    """Take the patches of a slab of the frame off the rows and columns of its taps, in place."""
    # Its features are runs of adjacent ones, one for each combination of taps of the axes before.
    tap = x.shape[1] * prod(kernel[slab.axis + 1 :])
    starts = range(0, len(out), tap * kernel[slab.axis])
    runs = [slice(f + slab.taps.start * tap, f + slab.taps.stop * tap) for f in starts]
    for piece in patch_matrices(x, slab.window, out.dtype, chunk_bytes):
        parts = np.split(piece, len(runs))
        for i, rows in enumerate(runs):
            blas.syrk(parts[i], out[rows, rows], alpha=-alpha, beta=1.0)
            for j, columns in enumerate(runs[:i]):
                blas.gemm(parts[i], parts[j], out[rows, columns], alpha=-alpha, beta=1.0)
