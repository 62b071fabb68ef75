"""Copies of patches ("im2col"): all patches at once, or chunks as operands of BLAS."""

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.gram import matrices
from kfac_engine.backend.window import Window


def patches(x: Array, window: Window) -> Array:
    """Return all patches; entry ``[n, o, u·channels + c]`` is channel ``c`` under tap ``u``.

    Args:
        x: Images, ``(n, channels, *spatial_shape)``, any strides.
        window: Geometry.

    Returns:
        ``(n, positions, taps·channels)``, in the dtype of ``x``; a new array.

    Raises:
        ShapeError: The image does not fit the window.
    """
    n, channels, *_ = x.shape
    outputs = window.output_shape(x.shape[2:])
    result = np.zeros((n, *outputs, *window.kernel, channels), x.dtype)
    _fill(np.moveaxis(result, -1, 1), x, window)
    return result.reshape(n, prod(outputs), window.taps * channels)


def patch_matrices(x: Array, window: Window, dtype: DType, chunk_bytes: int) -> Iterator[Array]:
    """Yield patches as matrices for SYRK; the matrices share one buffer.

    Args:
        x: Images, ``(n, channels, *spatial_shape)``, any strides.
        window: Geometry.
        dtype: Element type of the matrices; float32 or float64.
        chunk_bytes: Bound of a copy; exceeded if one patch is larger.

    Yields:
        Matrices ``(taps·channels, k)`` that together contain all patches that see a pixel.
    """
    spatial_shape = x.shape[2:]
    if window.taps == 1:
        pixels = [window.seen(axis, 0, spatial_shape)[1] for axis in range(len(spatial_shape))]
        yield from matrices(np.moveaxis(x[:, :, *pixels], 1, -1), dtype, chunk_bytes)
        return
    positions = max(1, chunk_bytes // (window.taps * x.shape[1] * dtype.itemsize))
    for part in window.split(spatial_shape, positions):
        step = max(1, positions // prod(part.output_shape(spatial_shape)))
        for start in range(0, len(x), step):
            images = x[start : start + step]
            # Only the last chunk can be smaller. The zeros of the padding are reused.
            if start == 0 or len(images) < step:
                canvas, matrix = _canvas(images, part, dtype)
            _fill(canvas, images, part)
            yield matrix


def _canvas(images: Array, window: Window, dtype: DType) -> tuple[Array, Array]:
    """Allocate zeros for patches, as an array for ``_fill`` and as a matrix.

    Channels are innermost if they are innermost in the images, so that copies read and write in
    order.

    Returns:
        ``(n, channels, *outputs, *kernel)`` and ``(features, n·positions)``, views of one memory.
    """
    n, channels, *spatial_shape = images.shape
    outputs = window.output_shape(tuple(spatial_shape))
    features = window.taps * channels
    if abs(images.strides[1]) < min(map(abs, images.strides[2:])):
        memory = np.zeros((n, *outputs, *window.kernel, channels), dtype)
        return np.moveaxis(memory, -1, 1), memory.reshape(-1, features).T
    memory = np.zeros((*window.kernel, channels, n, *outputs), dtype)
    axes = len(spatial_shape)
    canvas = np.moveaxis(memory, range(axes), range(-axes, 0)).swapaxes(0, 1)
    return canvas, memory.reshape(features, -1)


def _fill(canvas: Array, x: Array, window: Window) -> None:
    """Copy the pixels of each tap to ``canvas``, ``(n, channels, *outputs, *kernel)``."""
    spatial_shape = x.shape[2:]
    for tap in product(*map(range, window.kernel)):
        seen = [window.seen(axis, u, spatial_shape) for axis, u in enumerate(tap)]
        index: list[slice | int] = [outputs for outputs, _ in seen]
        canvas[:, :, *index, *tap] = x[:, :, *(pixels for _, pixels in seen)]
