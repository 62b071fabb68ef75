"""The geometry of the patches of a convolution."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from kfac_engine.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window over ``k`` spatial axes.

    Output position ``o`` and tap ``u`` of an axis see pixel ``o·stride + u·dilation − begin``.
    Pixels outside the image are zero.

    Attributes:
        kernel: Number of taps of each axis.
        strides: Number of pixels between output positions, for each axis.
        dilations: Number of pixels between taps, for each axis.
        begins: Padding before the first pixel, for each axis; a negative padding is a crop.
        ends: Padding after the last pixel, for each axis.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def taps(self) -> int:
        """Number of taps of the kernel."""
        return prod(self.kernel)

    @property
    def reaches(self) -> tuple[int, ...]:
        """Number of pixels from the first tap to the last, for each axis."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def is_pointwise(self) -> bool:
        """Whether each patch is a pixel."""
        unpadded = {*self.begins, *self.ends} <= {0}
        return unpadded and {*self.kernel, *self.strides} <= {1}

    def output_shape(self, spatial_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of output positions of each axis.

        Args:
            spatial_shape: Shape of the image.

        Returns:
            One number for each axis, at least one.

        Raises:
            ShapeError: The padded image is smaller than the dilated kernel, or has another number
                of axes.
        """
        return _output_shape(self, spatial_shape)

    def seen(self, axis: int, tap: int, spatial_shape: tuple[int, ...]) -> tuple[slice, slice]:
        """Return the output positions that see the image through one tap, and the pixels they see.

        Args:
            axis: Spatial axis.
            tap: Position in the kernel along this axis.
            spatial_shape: Shape of the image.

        Returns:
            Slice of output positions and slice of pixels, of equal length; possibly empty.
        """
        return _seen(self, axis, tap, spatial_shape)

    def restricted(
        self, axis: int, spatial_shape: tuple[int, ...], outputs: range, taps: slice | None = None
    ) -> "Window":
        """Return a window with a subset of the outputs and of the taps along one axis.

        Args:
            axis: Spatial axis.
            spatial_shape: Shape of the image.
            outputs: Positions of the new window, in positions of this window; they may be outside
                its output shape.
            taps: Adjacent taps of the new window; all if None.

        Returns:
            A window whose first output position is the first of ``outputs``.
        """
        taps = taps or slice(0, self.kernel[axis])
        stride, dilation = self.strides[axis], self.dilations[axis]
        kernel = taps.stop - taps.start
        begin = self.begins[axis] - outputs.start * stride - taps.start * dilation
        span = (len(outputs) - 1) * stride + (kernel - 1) * dilation + 1
        return Window(
            _with(self.kernel, axis, kernel),
            self.strides,
            self.dilations,
            _with(self.begins, axis, begin),
            _with(self.ends, axis, span - begin - spatial_shape[axis]),
        )

    def split(self, spatial_shape: tuple[int, ...], positions: int) -> Iterator["Window"]:
        """Yield windows over disjoint outputs, with at most ``positions`` positions each.

        Args:
            spatial_shape: Shape of the image.
            positions: Bound, at least one.

        Yields:
            Disjoint windows of equal size, except the last of each axis. Leading axes are split
            first.
        """
        outputs = self.output_shape(spatial_shape)
        lengths = []
        for axis, count in enumerate(outputs):
            lengths.append(min(count, max(1, positions // prod(outputs[axis + 1 :]))))
        cuts = [
            [range(start, min(start + length, count)) for start in range(0, count, length)]
            for count, length in zip(outputs, lengths, strict=True)
        ]
        for ranges in product(*cuts):
            window = self
            for axis, outputs_of_axis in enumerate(ranges):
                window = window.restricted(axis, spatial_shape, outputs_of_axis)
            yield window


def pointwise(axes: int) -> Window:
    """Return the window whose patches are single pixels."""
    ones, zeros = (1,) * axes, (0,) * axes
    return Window(ones, ones, ones, zeros, zeros)


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


# Geometry is computed for each tap of each layer in every step. In small networks that would take
# as long as the arithmetic.
_CACHE_SIZE = 4096


@lru_cache(_CACHE_SIZE)
def _output_shape(window: Window, spatial_shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(spatial_shape) != len(window.kernel):
        raise ShapeError(
            f"an image of {spatial_shape} pixels has another number of axes than the window "
            f"{window}."
        )
    shape = tuple(
        (begin + size + end - reach - 1) // stride + 1
        for begin, size, end, reach, stride in zip(
            window.begins, spatial_shape, window.ends, window.reaches, window.strides, strict=True
        )
    )
    if min(shape, default=1) < 1:
        raise ShapeError(
            f"an image of {spatial_shape} pixels is smaller than the window {window}; "
            f"check kernel, dilations and padding."
        )
    return shape


@lru_cache(_CACHE_SIZE)
def _seen(
    window: Window, axis: int, tap: int, spatial_shape: tuple[int, ...]
) -> tuple[slice, slice]:
    step = window.strides[axis]
    first = tap * window.dilations[axis] - window.begins[axis]  # pixel at output position 0
    low = max(0, -(first // step))
    stop = min(
        window.output_shape(spatial_shape)[axis], (spatial_shape[axis] - 1 - first) // step + 1
    )
    high = max(low, stop)
    pixel = first + low * step
    return slice(low, high), slice(pixel, pixel + (high - low) * step, step)
