"""Sums patches and their squares without copying the patches.

Images are summed first. Then the pixels under each tap are summed, one axis at a time: the pixels
that a tap sees along an axis do not depend on the other axes.
"""

from collections.abc import Callable, Iterator
from math import prod
from types import ModuleType

from kfac_engine._types import Array, DType
from kfac_engine.backend.channel_groups import scale
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError

# Number of images that are summed in their own precision before the sums are added in float64.
_SUM_IMAGES = 64
# Number of entries of the channels of an image that are summed at a time. It bounds the scratch
# memory by 16 MiB in float64 and 8 MiB in float32.
_SUM_NUMBERS = 1 << 21


def patch_sums(x: Array, window: Window, dtype: DType, xp: ModuleType) -> Array:
    """Return the sum of all patches of all images, ``(taps·channels,)``, tap-major, float64.

    The images are ``(n, channels, *spatial_shape)`` with any strides. Groups of images are summed
    in ``dtype``.
    """
    return _summed(x, window, xp, lambda images: images.sum(axis=0, dtype=dtype))


def row_sums(x: Array, window: Window, dtype: DType, xp: ModuleType) -> Array:
    """Return the sum of the patches of each image, ``(n, taps·channels)``, in ``dtype``.

    The features are in the order of the taps, and of the channels for each tap.
    """
    sums_by_tap: Array = _by_taps(x.astype(dtype, copy=False), window, xp).reshape(len(x), -1)
    return sums_by_tap


def add_patch_squares(
    x: Array, window: Window, out: Array, xp: ModuleType, *, alpha: float, beta: float
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z²`` over all patches, entry by entry, in place.

    ``out`` is ``(taps·channels,)``, contiguous; squares are computed in its element type. A
    ``beta`` of zero overwrites.
    """
    check_feature_vector(x, window, out)

    def squares(images: Array) -> Array:
        images = images.astype(out.dtype, copy=False)
        total: Array = xp.einsum("n...,n...->...", images, images)
        return total

    scale(out, beta)
    out += alpha * _summed(x, window, xp, squares)


def check_feature_vector(x: Array, window: Window, out: Array) -> None:
    """Raise ``ShapeError`` unless ``out`` is contiguous with shape ``(taps·channels,)``."""
    expected = (window.taps * x.shape[1],)
    if out.shape != expected or not out.flags.c_contiguous:
        raise ShapeError(
            f"squares of {x.shape[1]} channels under {window.taps} taps need a contiguous result "
            f"of shape {expected}, got {out.shape} with strides {out.strides}."
        )


def _summed(
    x: Array, window: Window, xp: ModuleType, add_images: Callable[[Array], Array]
) -> Array:
    """Return the sum over all patches of a function of the pixels, ``(taps·channels,)``.

    ``add_images`` returns the sum of the function over the first axis of a part of ``x``,
    ``(n, channels, *spatial_shape)``.
    """
    sums_by_tap = []
    for channels in _channel_groups(x.shape[1:]):
        total = xp.zeros((channels.stop - channels.start, *x.shape[2:]))
        for start in range(0, len(x), _SUM_IMAGES):
            total += add_images(x[start : start + _SUM_IMAGES, channels])
        sums_by_tap.append(_by_taps(total, window, xp))
    joined: Array = xp.concatenate(sums_by_tap, axis=-1).reshape(-1)
    return joined


def _channel_groups(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield groups of channels of an image with at most ``_SUM_NUMBERS`` entries each."""
    count = max(1, _SUM_NUMBERS // max(1, prod(shape[1:])))
    for start in range(0, shape[0], count):
        yield slice(start, min(start + count, shape[0]))


def _by_taps(total: Array, window: Window, xp: ModuleType) -> Array:
    """Return the sum of the pixels under each tap, ``(…, *kernel, channels)``."""
    axes = len(window.kernel)
    spatial_shape, channels = total.shape[total.ndim - axes :], total.ndim - axes - 1
    everywhere = (slice(None),) * (channels + 1)
    for axis, taps in enumerate(window.kernel):
        # The axes before this axis are already axes of taps, at the end.
        seen = (window.seen(axis, tap, spatial_shape)[1] for tap in range(taps))
        sums = [total[(*everywhere, pixels)].sum(axis=channels + 1) for pixels in seen]
        total = xp.stack(sums, axis=-1)
    sums_by_tap: Array = xp.moveaxis(total, channels, -1)
    return sums_by_tap
