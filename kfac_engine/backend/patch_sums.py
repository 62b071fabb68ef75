"""Sums of patches and of their squares, without copies of patches.

Images are summed first. Then pixels become taps, one axis at a time: the pixels that a tap sees
along an axis do not depend on the other axes.
"""

from types import ModuleType

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import scale
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError

# Images that are summed in their own precision before the sums are added in float64.
_SUM_IMAGES = 64


def patch_sums(x: Array, window: Window, dtype: DType, xp: ModuleType) -> Array:
    """Return the sum of all patches of all images.

    Args:
        x: Images, ``(n, channels, *spatial_shape)``, any strides.
        window: Geometry.
        dtype: Element type in which groups of images are summed.
        xp: The array library.

    Returns:
        ``(taps·channels,)``, tap-major, float64.
    """
    total = xp.zeros(x.shape[1:])
    for start in range(0, len(x), _SUM_IMAGES):
        total += x[start : start + _SUM_IMAGES].sum(axis=0, dtype=dtype)
    return _by_taps(total, window, xp)


def row_sums(x: Array, window: Window, dtype: DType, xp: ModuleType) -> Array:
    """Return the sum of the patches of each image.

    Args:
        x: As for ``patch_sums``.
        window: Geometry.
        dtype: Element type of the sums.
        xp: The array library.

    Returns:
        ``(n, taps·channels)``, tap-major, in ``dtype``.
    """
    return _by_taps(x.astype(dtype, copy=False), window, xp)


def add_patch_squares(
    x: Array, window: Window, out: Array, xp: ModuleType, *, alpha: float, beta: float
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z²`` over all patches, entry by entry, in place.

    Args:
        x: As for ``patch_sums``.
        window: Geometry.
        out: ``(taps·channels,)``, contiguous; squares are computed in its element type.
        xp: The array library.
        alpha: Scale of the new squares.
        beta: Scale of the old ones; zero overwrites.

    Raises:
        ShapeError: ``out`` has another shape.
    """
    check_feature_vector(x, window, out)
    total = xp.zeros(x.shape[1:])
    for start in range(0, len(x), _SUM_IMAGES):
        part = x[start : start + _SUM_IMAGES].astype(out.dtype, copy=False)
        total += xp.einsum("n...,n...->...", part, part)
    scale(out, beta)
    out += alpha * _by_taps(total, window, xp)


def check_feature_vector(x: Array, window: Window, out: Array) -> None:
    """Check that an array has one contiguous entry for each feature of a patch.

    Args:
        x: Images.
        window: Geometry.
        out: The array.

    Raises:
        ShapeError: ``out`` is not ``(taps·channels,)`` or not contiguous.
    """
    expected = (window.taps * x.shape[1],)
    if out.shape != expected or not out.flags.c_contiguous:
        raise ShapeError(
            f"squares of {x.shape[1]} channels under {window.taps} taps need a contiguous result "
            f"of shape {expected}, got {out.shape} with strides {out.strides}."
        )


def _by_taps(total: Array, window: Window, xp: ModuleType) -> Array:
    """Sum what each tap sees of images: ``(…, channels, *shape)`` to ``(…, taps·channels)``."""
    axes = len(window.kernel)
    spatial_shape, channels = total.shape[total.ndim - axes :], total.ndim - axes - 1
    everywhere = (slice(None),) * (channels + 1)
    for axis, taps in enumerate(window.kernel):
        # The axes before this one have left their place and follow, as taps, behind the last.
        seen = (window.seen(axis, tap, spatial_shape)[1] for tap in range(taps))
        sums = [total[(*everywhere, pixels)].sum(axis=channels + 1) for pixels in seen]
        total = xp.stack(sums, axis=-1)
    last = xp.moveaxis(total, channels, -1)
    sums_by_tap: Array = last.reshape(*total.shape[:channels], -1)
    return sums_by_tap
