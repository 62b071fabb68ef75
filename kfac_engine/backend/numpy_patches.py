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

from kfac_engine._types import Array
from kfac_engine.backend.frame import frame
from kfac_engine.backend.numpy_im2col import patch_matrices, patch_sums
from kfac_engine.backend.numpy_moments import (
    CHUNK_BYTES,
    Border,
    accumulate,
    check_out,
    mirror,
    write_border,
)
from kfac_engine.backend.numpy_shift import add_shifted, distances, gapped_sides, scratch_numbers
from kfac_engine.backend.window import Window


def patch_second_moment(
    x: Array,
    window: Window,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
    beta: float,
    scratch_bytes: int,
) -> None:
    """``out ← beta·out + alpha·Σ z zᵀ`` over all patches of all images, in place.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides; accumulated in the dtype of ``out``.
        window: Geometry.
        out: ``(taps·channels (+ 1), same)``, C-contiguous; features tap-major.
        homogeneous: Whether each patch ends with an implicit one.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        scratch_bytes: Bound of the working memory.

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
    if shift_is_cheaper(window, len(x), channels, sides, room):
        add_shifted(x, window, core, alpha, beta, chunk_bytes)
    else:
        accumulate(patch_matrices(x, window, out.dtype, chunk_bytes), core, alpha, beta)
    if homogeneous:
        write_border(out, Border(patch_sums(x, window, out.dtype), positions), alpha, beta)
    mirror(out)


# What things cost in multiplications of SYRK at full speed: fitted to 36 geometries (1 to 3 axes,
# 8 to 256 channels, images of 2 to 1000 pixels a side) on one core with OpenBLAS' AVX-512 kernels,
# float32. The rule then chose the faster form in each. Time of the shifted form / the plain one:
#
#   channels, image, kernel    measured  estimated |  channels, image, kernel    measured  estimated
#     8     56×56      3×3       0.37      0.42    |    64     7×7       5×5       0.82      0.75
#    16     56×56      3×3       0.36      0.34    |   128     7×7       3×3       0.78      0.79
#    16     28×28      3×3       0.86      0.86    |   256     4×4       3×3       1.21      1.20
#    16     14×14      3×3       1.29      1.41    |    64     1000      3         0.63      0.61
#    32     14×14      3×3       0.73      0.78    |    32     8×8×8     3×3×3     0.73      0.60
#    64     14×14      3×3       0.60      0.57    |    64     30×30     3×3       3.28      3.28
#    64      7×7       3×3       1.00      1.06    |           (its middle 18×18)
_COPIED_NUMBER = 60
_WRITTEN_NUMBER = 50
_CALL = 270_000
_SLAB = 3_000_000


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
    pixels, blocks = prod(gapped_sides(sides, window)), len(distances(window))
    moments = blocks * (channels**2 * pixels + _CALL) + _COPIED_NUMBER * channels * pixels
    filling = _WRITTEN_NUMBER * (window.taps * channels) ** 2
    slabs = sum(
        _SLAB + _plain_cost(slab.window, images, channels, sides) for slab in frame(window, sides)
    )
    return images * moments + filling + slabs < _plain_cost(window, images, channels, sides)


def _plain_cost(window: Window, images: int, channels: int, sides: tuple[int, ...]) -> int:
    """Cost of copying the patches and multiplying them by SYRK, which does half of a product."""
    features = window.taps * channels
    patches = images * prod(window.output_sides(sides))
    return patches * features * (features // 2 + _COPIED_NUMBER)
