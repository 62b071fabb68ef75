"""Describes the geometry of the patches of convolutions and pools."""

from collections.abc import Iterable, Iterator, Sequence
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
    """

    kernel: tuple[int, ...]  # number of taps of each axis
    strides: tuple[int, ...]  # number of pixels between output positions, for each axis
    dilations: tuple[int, ...]  # number of pixels between taps, for each axis
    # Padding before the first pixel, for each axis; a negative padding is a crop.
    begins: tuple[int, ...]
    ends: tuple[int, ...]  # padding after the last pixel, for each axis

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
        """Return the number of output positions of each axis, at least one.

        ``ShapeError`` is raised if the padded image is smaller than the dilated kernel, or has
        another number of axes.
        """
        return _output_shape(self, spatial_shape)

    def seen(self, axis: int, tap: int, spatial_shape: tuple[int, ...]) -> tuple[slice, slice]:
        """Return the output positions that see the image through one tap, and the pixels they see.

        ``tap`` is a position in the kernel along ``axis``. The two slices have equal length,
        possibly zero.
        """
        return _seen(self, axis, tap, spatial_shape)

    def restricted(
        self, axis: int, spatial_shape: tuple[int, ...], outputs: range, taps: slice | None = None
    ) -> "Window":
        """Return a window with a subset of the outputs and of the taps along one axis.

        The first output position of the new window is the first of ``outputs``. These are positions
        of this window, and may be outside its output shape. ``taps`` are adjacent; None means all.
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

        They have equal size, except the last of each axis. Leading axes are split first.
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


@dataclass(frozen=True, slots=True)
class SlidingWindow(Window):
    """A window over the spatial axes, which come after batch and channels."""

    # ``"SAME_UPPER"`` or ``"SAME_LOWER"`` if the padding depends on the size of the image
    # (``begins`` and ``ends`` are then zero); else ``""``.
    same: str = ""
    ceil_mode: bool = False  # whether the last window may extend beyond the padding

    @property
    def axes(self) -> tuple[int, ...]:
        """The indices of the spatial axes of the image."""
        return tuple(range(2, 2 + len(self.kernel)))

    @property
    def unit_strides(self) -> bool:
        """Whether all strides are 1."""
        return set(self.strides) <= {1}

    @property
    def padded(self) -> bool:
        """Whether a window may cover padding."""
        return any(self.begins + self.ends) or bool(self.same) or self.ceil_mode

    def resolved(self, spatial_shape: Sequence[int]) -> Window:
        """Return the window with explicit padding for images of a known shape.

        With ``same``, a stride ``s`` over ``p`` pixels has ``ceil(p / s)`` output positions, and
        the padding is the least for which these windows are inside the padded image.
        """
        begins, ends = self.begins, self.ends
        if self.same:
            axes = zip(spatial_shape, self.strides, self.reaches, strict=True)
            begins, ends = split_padding(
                (max(0, (pixels - 1) // stride * stride + reach + 1 - pixels)
                 for pixels, stride, reach in axes),
                self.same,
            )  # fmt: skip
        return Window(self.kernel, self.strides, self.dilations, begins, ends)


def split_padding(totals: Iterable[int], same: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before the first and after the last pixel of each axis.

    ``totals`` are the padding pixels of each axis. ``"SAME_UPPER"`` puts the odd pixel at the end,
    ``"SAME_LOWER"`` at the beginning.
    """
    sizes = tuple(totals)
    smaller = tuple(size // 2 for size in sizes)
    larger = tuple(size - half for size, half in zip(sizes, smaller, strict=True))
    return (smaller, larger) if same == "SAME_UPPER" else (larger, smaller)
