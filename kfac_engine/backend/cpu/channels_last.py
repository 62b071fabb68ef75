"""Images in channels-last order with zero padding between lines, so that BLAS reads shifted lines.

A *line* runs along the last axis of an image. For each pixel of a line, the buffer stores the
channels of that pixel for every image of a group. A run of pixels of a line is therefore a matrix
``(pixels·group, channels)`` without a copy, and the run shifted by one pixel is the matrix that
begins ``group·channels`` numbers later. Zeros before each line and after the last line represent
the pixels outside the image, so a shifted run may extend beyond its line.

With channels innermost, BLAS loads whole vectors and does not copy its operands: 16 × 16 channels
over 256 positions run at 85 GFLOP/s on one core, and at 60 GFLOP/s with positions innermost.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kfac_engine._types import Array, DType


class ChannelsLastLines:
    """Reusable buffer that stores a group of images with the channels on the last axis.

    Args:
        images: Largest number of images.
        channels: Channels of each image.
        spatial_shape: Shape of each image; the last axis runs along the lines.
        gap: Number of zero pixels before each line and after the last line.
        dtype: Element type of the buffer.

    Attributes:
        group: Largest number of images.
        channels: Channels of each image.
        length: Pixels of a line.
    """

    def __init__(
        self, images: int, channels: int, spatial_shape: tuple[int, ...], gap: int, dtype: DType
    ) -> None:
        self.group, self.channels, self._gap = images, channels, gap
        self.length = spatial_shape[-1]
        self._flat = np.zeros(buffer_numbers(images, channels, spatial_shape, gap), dtype)
        pixel = images * channels
        lines = self._flat[: self._flat.size - gap * pixel]
        with_gaps = lines.reshape(*spatial_shape[:-1], gap + spatial_shape[-1], images, channels)
        self._pixels = with_gaps[..., gap:, :, :]

    def fill(self, x: Array) -> None:
        """Copy images to the buffer, and set its other entries to zero.

        Args:
            x: ``(n, channels, *spatial_shape)``, any strides, ``n ≤ group``.
        """
        # One copy of each image would take half of the time on one thread. On two threads calls of
        # 10 µs take longer, because each call waits for the interpreter.
        self._pixels[..., : len(x), :] = np.moveaxis(x, (0, 1), (-2, -1))
        self._pixels[..., len(x) :, :] = 0.0

    def runs(
        self, lines: Sequence[range], pixels: range, *, shifts: int = 1, apart: int = 1
    ) -> Array:
        """Return a view of runs of pixels, and of the same runs shifted along their lines.

        Args:
            lines: Lines, as a range for each axis but the last.
            pixels: Pixels of the run. It starts at ``-gap`` or later; the run and its shifts end at
                most ``gap`` pixels after the line.
            shifts: Number of runs of each line.
            apart: Number of pixels from one run to the next.

        Returns:
            ``(*lines, shifts, len(pixels)·group, channels)``.
        """
        *strides, pixel, _, number = self._pixels.strides
        start = (self._gap + pixels.start) * pixel
        start += sum(line.start * step for line, step in zip(lines, strides, strict=True))
        shape = (*map(len, lines), shifts, len(pixels) * self.group, self.channels)
        steps = (*strides, apart * pixel, self.channels * number, number)
        return as_strided(self._flat[start // number :], shape, steps)


def buffer_numbers(images: int, channels: int, spatial_shape: tuple[int, ...], gap: int) -> int:
    """Return the number of entries of the buffer of ``ChannelsLastLines``.

    Args:
        images: Largest number of images.
        channels: Channels of each image.
        spatial_shape: Shape of each image.
        gap: Number of zero pixels before each line.

    Returns:
        Number of entries, zeros included.
    """
    return images * channels * (prod(spatial_shape[:-1]) * (gap + spatial_shape[-1]) + gap)
