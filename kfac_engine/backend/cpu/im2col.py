"""Patches of images, copied ("im2col"): all of them, or chunk by chunk as operands of BLAS."""

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.gram import matrices
from kfac_engine.backend.window import Window


def patches(x: Array, window: Window) -> Array:
    """All patches of all images, tap-major: entry ``[n, o, u·channels + c]`` is what ``u`` sees.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides.
        window: Geometry.

    Returns:
        ``(n, positions, taps·channels)``, in the dtype of ``x``; a new array.

    Raises:
        ShapeError: The image does not fit the window.
    """
    n, channels, *_ = x.shape
    outputs = window.output_shape(x.shape[2:])
    found = np.zeros((n, *outputs, *window.kernel, channels), x.dtype)
    _fill(np.moveaxis(found, -1, 1), x, window)
    return found.reshape(n, prod(outputs), window.taps * channels)


def patch_matrices(x: Array, window: Window, dtype: DType, chunk_bytes: int) -> Iterator[Array]:
    """The patches as matrices for SYRK; the same memory is filled again and again.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides.
        window: Geometry.
        dtype: Wanted; float32 or float64.
        chunk_bytes: Bound of the copies, if one patch fits.

    Yields:
        ``(taps·channels, k)``; together every patch that sees anything.
    """
    sides = x.shape[2:]
    if window.taps == 1:
        pixels = [window.seen(axis, 0, sides)[1] for axis in range(len(sides))]
        yield from matrices(np.moveaxis(x[:, :, *pixels], 1, -1), dtype, chunk_bytes)
        return
    room = max(1, chunk_bytes // (window.taps * x.shape[1] * dtype.itemsize))
    for part in window.split(sides, room):
        step = max(1, room // prod(part.output_shape(sides)))
        for start in range(0, len(x), step):
            images = x[start : start + step]
            # Only the last chunk may be smaller; the padding's zeros are never written over.
            if start == 0 or len(images) < step:
                canvas, matrix = _canvas(images, part, dtype)
            _fill(canvas, images, part)
            yield matrix


def _canvas(images: Array, window: Window, dtype: DType) -> tuple[Array, Array]:
    """Zeroed memory for patches, seen as ``_fill`` wants it and as a matrix ``(features, k)``.

    Channels are innermost where they are in the images, so that copies run along both.

    Returns:
        ``(n, channels, *outputs, *kernel)`` and ``(features, n·positions)`` of the same memory.
    """
    n, channels, *sides = images.shape
    outputs = window.output_shape(tuple(sides))
    features = window.taps * channels
    if abs(images.strides[1]) < min(map(abs, images.strides[2:])):
        room = np.zeros((n, *outputs, *window.kernel, channels), dtype)
        return np.moveaxis(room, -1, 1), room.reshape(-1, features).T
    room = np.zeros((*window.kernel, channels, n, *outputs), dtype)
    axes = len(sides)
    canvas = np.moveaxis(room, range(axes), range(-axes, 0)).swapaxes(0, 1)
    return canvas, room.reshape(features, -1)


def _fill(canvas: Array, x: Array, window: Window) -> None:
    """Write what each tap sees into ``canvas``, ``(n, channels, *outputs, *kernel)``."""
    sides = x.shape[2:]
    for tap in product(*map(range, window.kernel)):
        seen = [window.seen(axis, u, sides) for axis, u in enumerate(tap)]
        here: list[slice | int] = [outputs for outputs, _ in seen]
        canvas[:, :, *here, *tap] = x[:, :, *(pixels for _, pixels in seen)]
