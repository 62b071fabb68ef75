"""Second moments of patches for stride one, from the moments of shifted images.

Over the full grid of output positions (``frame``), each tap meets every pixel once, so that the
block of taps ``u`` and ``v`` depends on their distance alone:

    Σ_o z_o[u] z_o[v]ᵀ = R[u − v],   R[δ] = Σ_q x[:, q + δ·dilation] x[:, q]ᵀ,   R[−δ] = R[δ]ᵀ.

A kernel of 3 × 3 has 45 such blocks on and under the diagonal but 13 distances. The frame, which
the layer's own outputs lack, is subtracted slab by slab. Both parts are positive semi-definite and
of similar size, so the difference keeps the rounding error of one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend import blas
from kfac_engine.backend.frame import Slab, frame
from kfac_engine.backend.numpy_im2col import patch_matrices
from kfac_engine.backend.numpy_rank_k import accumulate, scale, share, threads_for
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

# From one tap to another, one step an axis.
Distance: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Means:
    """What may be taken to add moments.

    Attributes:
        workers: Threads.
        chunk_bytes: Bound of the copies of patches.
        numbers: Bound of all other working memory, of all threads together.
    """

    workers: Workers
    chunk_bytes: int
    numbers: int


def add_shifted(
    x: Array, window: Window, out: Array, alpha: float, beta: float, means: Means
) -> None:
    """Lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches ``z``.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides.
        window: Of stride one.
        out: ``(taps·channels, same)``; rows may lie apart. What is above the diagonal is lost.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        means: Threads, and memory for at least ``scratch_numbers``.
    """
    moments = _moments(x, window, out.dtype, alpha, means)
    _write_blocks(moments, window.kernel, x.shape[1], out, beta, means.workers)
    for slab in frame(window, x.shape[2:]):
        _subtract(slab, window.kernel, x, out, alpha, means)


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


def _moments(
    x: Array, window: Window, dtype: DType, alpha: float, means: Means
) -> Mapping[Distance, Array]:
    """``alpha·R[δ]`` for every distance, ``(channels, channels)`` each."""
    # Threads share the images, each with blocks of its own; where there are too few images or too
    # little memory, the distances.
    channels, sides = x.shape[1], x.shape[2:]
    steps = [step for step in distances(window) if _overlap(step, window, sides)]
    threads = threads_for(x.size * channels * len(steps), means.workers)
    image, needed = channels * prod(gapped_sides(sides, window)), len(steps) * channels**2
    parts = max(1, min(len(x), threads, means.numbers // (image + needed)))
    shared = max(1, min(threads, (means.numbers - needed) // image)) if parts == 1 else 1
    found = [np.zeros((len(steps), channels, channels), dtype) for _ in range(parts)]
    tasks = []
    for images, blocks in zip(np.array_split(x, parts), found, strict=True):
        moments = list(zip(steps, blocks, strict=True))
        tasks += [
            partial(_add_images, images, window, moments[start::shared], alpha)
            for start in range(min(shared, len(steps)))
        ]
    means.workers.run(tasks)
    for blocks in found[1:]:
        found[0] += blocks
    return dict(zip(steps, found[0], strict=True))


def _add_images(
    x: Array, window: Window, moments: Sequence[tuple[Distance, Array]], alpha: float
) -> None:
    """Add ``alpha·R[δ]`` of some images for some distances."""
    channels, sides = x.shape[1], x.shape[2:]
    gapped = gapped_sides(sides, window)
    room = np.zeros((channels, *gapped), moments[0][1].dtype)
    pixels, flat = room[:, *(slice(side) for side in sides)], room.reshape(channels, -1)
    strides = [prod(gapped[axis + 1 :]) for axis in range(len(sides))]
    products = []
    for step, moment in moments:
        pixels_apart = [u * d for u, d in zip(step, window.dilations, strict=True)]
        shift = sum(a * b for a, b in zip(pixels_apart, strides, strict=True))
        shifted, still = flat[:, shift:], flat[:, : flat.shape[1] - shift]
        products.append(blas.gemm_call(shifted, still, moment, alpha=alpha, beta=1.0))
    for image in x:
        pixels[...] = image
        for add_product in products:
            add_product()


def _write_blocks(
    moments: Mapping[Distance, Array],
    kernel: tuple[int, ...],
    channels: int,
    out: Array,
    beta: float,
    workers: Workers,
) -> None:
    """``out ← beta·out + R[u − v]`` in the blocks of taps ``u`` and those before it, ``v``."""
    blocks = out.reshape(*kernel, channels, *kernel, channels)
    taps = list(product(*map(range, kernel)))

    def write_row(i: int) -> None:
        for v in taps[: i + 1]:
            spot: tuple[int | slice, ...] = (*taps[i], slice(None), *v)
            block = blocks[spot]
            scale(block, beta)
            moment = moments.get(tuple(a - b for a, b in zip(taps[i], v, strict=True)))
            if moment is not None:
                block += moment

    workers.run([partial(write_row, i) for i in reversed(range(len(taps)))])


def _overlap(step: Distance, window: Window, sides: tuple[int, ...]) -> bool:
    """Whether an image and itself shifted by ``step`` have a pixel in common."""
    return all(
        abs(u) * dilation < side
        for u, dilation, side in zip(step, window.dilations, sides, strict=True)
    )


def _subtract(
    slab: Slab, kernel: tuple[int, ...], x: Array, out: Array, alpha: float, means: Means
) -> None:
    """Take the patches of a slab of the frame off the rows and columns of its taps, in place."""
    # Its features are runs of adjacent ones, one for each combination of taps of the axes before.
    tap = x.shape[1] * prod(kernel[slab.axis + 1 :])
    starts = range(0, len(out), tap * kernel[slab.axis])
    runs = [slice(f + slab.taps.start * tap, f + slab.taps.stop * tap) for f in starts]
    for piece in patch_matrices(x, slab.window, out.dtype, means.chunk_bytes):
        if len(runs) == 1:
            accumulate([[piece]], out[runs[0], runs[0]], -alpha, 1.0, means.workers)
            continue
        parts = np.split(piece, len(runs))
        pairs = [(i, j) for i in range(len(runs)) for j in range(i + 1)]
        tasks = [
            partial(_add_pair, parts[i], parts[j], out[runs[i], runs[j]], -alpha) for i, j in pairs
        ]
        threads = threads_for(piece.size * len(piece) / 2, means.workers)
        share(tasks, threads, means.workers)


def _add_pair(x: Array, y: Array, out: Array, alpha: float) -> None:
    """``out ← out + alpha·x yᵀ``, half of it where both are the same."""
    if x is y:
        blas.syrk(x, out, alpha=alpha, beta=1.0)
    else:
        blas.gemm(x, y, out, alpha=alpha, beta=1.0)
