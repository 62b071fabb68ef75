"""Second moments of patches: the plain form by chunks of patches, and which form to take.

The patch at output position ``o`` is ``z[u, c] = x[c, o·stride + u·dilation − begin]`` over taps
``u`` and channels ``c``, zero where the pixel lies outside the image. Three forms compute
``Σ z zᵀ``:

* one tap: the patches are the pixels, no copy is needed (``numpy_moments``);
* stride one, images not too small: from the moments of shifted images (``numpy_shift``);
* all others: patches of a few images, or of a few rows of one, are copied and multiplied by SYRK.
"""

from functools import lru_cache
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.frame import frame
from kfac_engine.backend.numpy_im2col import patch_matrices
from kfac_engine.backend.numpy_moments import CHUNK_BYTES, Border, check_out, write_border
from kfac_engine.backend.numpy_rank_k import accumulate, parts_for
from kfac_engine.backend.numpy_shift import (
    Means,
    add_shifted,
    distances,
    gapped_sides,
    scratch_numbers,
)
from kfac_engine.backend.patch_sums import patch_sums
from kfac_engine.backend.threads import Workers, blas_alone
from kfac_engine.backend.window import Window


def patch_second_moment(  # noqa: PLR0913 (the primitive's, and what it may take)
    x: Array,
    window: Window,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
    beta: float,
    scratch_bytes: int,
    workers: Workers,
) -> None:
    """Lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches, in place.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides; accumulated in the dtype of ``out``.
        window: Geometry.
        out: ``(taps·channels (+ 1), same)``, C-contiguous; features tap-major.
        homogeneous: Whether each patch ends with an implicit one.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        scratch_bytes: Bound of the working memory, that of all threads together.
        workers: Threads.

    Raises:
        ShapeError: The image does not fit the window, or ``out`` is not of this shape and layout.
    """
    channels, sides = x.shape[1], x.shape[2:]
    d = window.taps * channels
    check_out(out, d + homogeneous)
    positions = len(x) * prod(window.output_sides(sides))
    core = out[:d, :d]
    chunk_bytes = min(CHUNK_BYTES, scratch_bytes)
    room = (scratch_bytes - chunk_bytes) // out.itemsize
    with blas_alone():
        if shift_is_cheaper(window, len(x), channels, sides, room):
            add_shifted(x, window, core, alpha, beta, Means(workers, chunk_bytes, room))
        else:
            parts = np.array_split(x, min(len(x) or 1, parts_for(positions, d, workers, room)))
            some = chunk_bytes // len(parts)
            pieces = [patch_matrices(part, window, out.dtype, some) for part in parts]
            accumulate(pieces, core, alpha, beta, workers)
    if homogeneous:
        write_border(out, Border(patch_sums(x, window, out.dtype, np), positions), alpha, beta)


# What things cost in multiplications of SYRK at full speed: fitted to 36 geometries (1 to 3 axes,
# 8 to 256 channels, images of 2 to 1000 pixels a side) on one core with OpenBLAS' AVX-512 kernels,
# float32, 16 images. The rule chose the faster form in each. Time of the shifted form / the plain:
#
#   channels, image, kernel    measured  estimated |  channels, image, kernel    measured  estimated
#     8     56×56      3×3       0.46      0.48    |    64      7×7       5×5      0.76      0.74
#    16     28×28      3×3       0.91      0.95    |   128      7×7       3×3      0.76      0.81
#    16     14×14      3×3       1.43      1.76    |   256      4×4       3×3      1.02      1.20
#    32     14×14      3×3       0.83      0.87    |    64      1000      3        0.64      0.68
#    64     14×14      3×3       0.63      0.59    |    32      8×8×8     3×3×3    0.90      0.59
#    64      7×7       3×3       1.04      1.16    |    64      30×30     3×3      3.29      2.87
#                                                  |   (the last with 5 pixels cut off all round)
_COPIED_NUMBER = 60
_WRITTEN_NUMBER = 50
_CALL = 300_000
_SLAB = 5_000_000
_THIN = 1.2  # operands with as few rows as there are channels


@lru_cache(maxsize=1024)
def shift_is_cheaper(
    window: Window, images: int, channels: int, sides: tuple[int, ...], room: int
) -> bool:
    """Whether to take the form of ``numpy_shift`` rather than copy patches.

    Args:
        window: Geometry.
        images: Number of images.
        channels: Of each.
        sides: Of each.
        room: How many numbers fit the working memory, copies of patches aside.

    Returns:
        Always False for strides above one, a single tap, or too little memory.
    """
    if window.taps == 1 or set(window.strides) != {1}:
        return False
    if scratch_numbers(window, channels, sides) > room:
        return False
    plain = _plain_cost(window, images, channels, sides)
    return _shifted_cost(window, images, channels, sides) < plain


def _shifted_cost(window: Window, images: int, channels: int, sides: tuple[int, ...]) -> float:
    """Cost of a product for each image and distance, of filling the blocks, and of the frame."""
    pixels, blocks = prod(gapped_sides(sides, window)), len(distances(window))
    products = blocks * (_THIN * channels**2 * pixels + _CALL) + _COPIED_NUMBER * channels * pixels
    filling = _WRITTEN_NUMBER * (window.taps * channels) ** 2
    slabs = [_plain_cost(slab.window, images, channels, sides) for slab in frame(window, sides)]
    return images * products + filling + sum(slabs) + _SLAB * len(slabs)


def _plain_cost(window: Window, images: int, channels: int, sides: tuple[int, ...]) -> int:
    """Cost of copying the patches and multiplying them by SYRK, which does half of a product."""
    features = window.taps * channels
    patches = images * prod(window.output_sides(sides))
    return patches * features * (features // 2 + _COPIED_NUMBER)
