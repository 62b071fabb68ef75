"""Sums over patches, and of their squares, without making one.

Images are summed first; then, one axis at a time, pixels become taps: what a tap sees along an axis
does not depend on the others.
"""

from types import ModuleType

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import scale
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError

# So many images are summed in their own precision before the sums are added up in float64.
_SUM_IMAGES = 64


def patch_sums(x: Array, window: Window, dtype: DType, xp: ModuleType) -> Array:
    """Sum of all patches of all images.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides.
        window: Geometry.
        dtype: In which images are summed, a few at a time.
        xp: The array library.

    Returns:
        ``(taps·channels,)``, tap-major, float64.
    """
    total = xp.zeros(x.shape[1:])
    for start in range(0, len(x), _SUM_IMAGES):
        total += x[start : start + _SUM_IMAGES].sum(axis=0, dtype=dtype)
    return _by_taps(total, window, xp)


def row_sums(x: Array, window: Window, dtype: DType, xp: ModuleType) -> Array:
    """Sum of the patches of each image.

    Args:
        x: As for ``patch_sums``.
        window: Geometry.
        dtype: In which they are summed.
        xp: The array library.

    Returns:
        ``(n, taps·channels)``, tap-major, in ``dtype``.
    """
    return _by_taps(x.astype(dtype, copy=False), window, xp)


def add_patch_squares(
    x: Array, window: Window, out: Array, xp: ModuleType, *, alpha: float, beta: float
) -> None:
    """``out ← beta·out + alpha·Σ z²`` over all patches of all images, feature by feature, in place.

    Args:
        x: As for ``patch_sums``.
        window: Geometry.
        out: ``(taps·channels,)``, contiguous; squares are taken in its dtype.
        xp: The array library.
        alpha: Scale of the new squares.
        beta: Scale of the old ones; zero overwrites.

    Raises:
        ShapeError: ``out`` is not of this shape.
    """
    check_line(x, window, out)
    total = xp.zeros(x.shape[1:])
    for start in range(0, len(x), _SUM_IMAGES):
        part = x[start : start + _SUM_IMAGES].astype(out.dtype, copy=False)
        total += xp.einsum("n...,n...->...", part, part)
    scale(out, beta)
    out += alpha * _by_taps(total, window, xp)


def check_line(x: Array, window: Window, out: Array) -> None:
    """Refuse a result that has not one number for each feature.

    Args:
        x: Images.
        window: Geometry.
        out: To be ``(taps·channels,)`` and contiguous.

    Raises:
        ShapeError: It is not.
    """
    wanted = (window.taps * x.shape[1],)
    if out.shape != wanted or not out.flags.c_contiguous:
        raise ShapeError(
            f"squares of {x.shape[1]} channels under {window.taps} taps need a contiguous result "
            f"of shape {wanted}, got {out.shape} with strides {out.strides}."
        )


def _by_taps(total: Array, window: Window, xp: ModuleType) -> Array:
    """What each tap sees of images ``(…, channels, *sides)``, summed: ``(…, taps·channels)``."""
    axes = len(window.kernel)
    sides, channels = total.shape[total.ndim - axes :], total.ndim - axes - 1
    everywhere = (slice(None),) * (channels + 1)
    for axis, taps in enumerate(window.kernel):
        # The axes before this one have left their place and follow, as taps, behind the last.
        seen = (window.seen(axis, tap, sides)[1] for tap in range(taps))
        sums = [total[(*everywhere, pixels)].sum(axis=channels + 1) for pixels in seen]
        total = xp.stack(sums, axis=-1)
    last = xp.moveaxis(total, channels, -1)
    found: Array = last.reshape(*total.shape[:channels], -1)
    return found
