"""Second moments of patches: the plain form by chunks of patches, and which form to take.

The patch at output position ``o`` is ``z[u, c] = x[c, o·stride + u·dilation − begin]`` over taps
``u`` and channels ``c``, zero where the pixel lies outside the image. Three forms compute
``Σ z zᵀ``:

* one tap: the patches are the pixels, no copy is needed (``numpy_moments``);
* stride one, many channels: from the moments of shifted images (``numpy_shift``);
* all others: patches of a few images, or of a few rows of one, are copied and multiplied by SYRK.
"""

from functools import lru_cache
from math import prod

from kfac_engine._types import Array
from kfac_engine.backend.frame import frame
from kfac_engine.backend.numpy_im2col import patch_matrices, patch_sums
from kfac_engine.backend.numpy_moments import Border, accumulate, check_out, mirror, write_border
from kfac_engine.backend.numpy_shift import add_shifted, distances, gapped_sides
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
    if shift_is_cheaper(window, channels, sides, scratch_bytes // out.itemsize):
        add_shifted(x, window, core, alpha, beta, scratch_bytes)
    else:
        accumulate(patch_matrices(x, window, out.dtype, scratch_bytes), core, alpha, beta)
    if homogeneous:
        write_border(out, Border(patch_sums(x, window, out.dtype), positions), alpha, beta)
    mirror(out)


@lru_cache(maxsize=1024)
def shift_is_cheaper(
    window: Window, channels: int, sides: tuple[int, ...], scratch_numbers: int
) -> bool:
    """Whether to take the form of ``numpy_shift`` rather than copy patches.

    Counts multiplications of both and compares.

    Args:
        window: Geometry.
        channels: Of the images.
        sides: Of the images.
        scratch_numbers: Numbers that fit the working memory.

    Returns:
        Always False for strides or a single tap.
    """
    if window.taps == 1 or set(window.strides) != {1} or channels < _FEWEST_CHANNELS:
        return False
    flat, blocks = prod(gapped_sides(sides, window)), len(distances(window))
    if channels * (flat + channels * blocks) > scratch_numbers:
        return False
    direct = _syrk_cost(window, channels, sides)
    shifted = blocks * channels**2 * flat
    slabs = sum(_syrk_cost(slab.window, channels, sides) for slab in frame(window, sides))
    return shifted + slabs < _MARGIN * direct


def _syrk_cost(window: Window, channels: int, sides: tuple[int, ...]) -> float:
    """Multiplications of one image's patches by SYRK."""
    return 0.5 * (window.taps * channels) ** 2 * prod(window.output_sides(sides))


_FEWEST_CHANNELS = 16
_MARGIN = 0.8
