"""Where the patches of a convolution lie: geometry only, no data."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from kfac_engine.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window over ``k`` spatial axes.

    Output position ``o`` and tap ``u`` of an axis see pixel ``o·stride + u·dilation − begin``;
    pixels outside the image are zero.

    Attributes:
        kernel: Taps an axis.
        strides: Step between output positions, an axis.
        dilations: Step between taps, an axis.
        begins: Padding before the first pixel, an axis (may be negative: a crop).
        ends: Padding after the last pixel, an axis.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def taps(self) -> int:
        """Number of taps: the product of the kernel's sides."""
        return prod(self.kernel)

    @property
    def reaches(self) -> tuple[int, ...]:
        """Pixels from the first tap to the last, an axis."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def is_pointwise(self) -> bool:
        """Whether every pixel is a patch of its own."""
        still = {*self.begins, *self.ends} <= {0}
        return still and {*self.kernel, *self.strides} <= {1}

    def output_shape(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Output positions an axis, for an image of ``sides``.

        Args:
            sides: Pixels an axis.

        Returns:
            One number an axis, at least one each.

        Raises:
            ShapeError: The padded image is smaller than the (dilated) kernel, or has another number
                of axes.
        """
        return _output_sides(self, sides)

    def seen(self, axis: int, tap: int, sides: tuple[int, ...]) -> tuple[slice, slice]:
        """Which output positions see the image through one tap, and the pixels they see.

        Args:
            axis: Spatial axis.
            tap: Position in the kernel along it.
            sides: Pixels of the image an axis.

        Returns:
            Two slices of equal length, possibly empty: of the output positions and of the pixels.
        """
        return _seen(self, axis, tap, sides)

    def restricted(
        self, axis: int, sides: tuple[int, ...], outputs: range, taps: slice | None = None
    ) -> "Window":
        """The window that has some of the outputs and some of the taps along one axis.

        Args:
            axis: Spatial axis.
            sides: Pixels of the image an axis.
            outputs: Positions to keep, counted as this window counts them; they may lie outside its
                own, on the same grid.
            taps: Adjacent taps to keep; all if left out.

        Returns:
            A window whose output zero is the first of ``outputs``.
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
            _with(self.ends, axis, span - begin - sides[axis]),
        )

    def split(self, sides: tuple[int, ...], positions: int) -> Iterator["Window"]:
        """Windows that share the outputs, with at most so many positions each.

        Args:
            sides: Pixels of the image an axis.
            positions: Bound, at least one.

        Yields:
            Windows of equal size but for the last of each axis; leading axes are cut first.
        """
        outputs = self.output_shape(sides)
        lengths = []
        for axis, count in enumerate(outputs):
            lengths.append(min(count, max(1, positions // prod(outputs[axis + 1 :]))))
        cuts = [
            [range(start, min(start + length, count)) for start in range(0, count, length)]
            for count, length in zip(outputs, lengths, strict=True)
        ]
        for part in product(*cuts):
            window = self
            for axis, kept in enumerate(part):
                window = window.restricted(axis, sides, kept)
            yield window


def pointwise(axes: int) -> Window:
    """The window whose patches are single pixels."""
    ones, zeros = (1,) * axes, (0,) * axes
    return Window(ones, ones, ones, zeros, zeros)


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


# Steps ask the same of every batch, for each tap of each layer: in small networks that takes as
# long as the arithmetic.
_REMEMBERED = 4096


@lru_cache(_REMEMBERED)
def _output_sides(window: Window, sides: tuple[int, ...]) -> tuple[int, ...]:
    if len(sides) != len(window.kernel):
        raise ShapeError(f"an image of {sides} pixels has not the axes of the window {window}.")
    found = tuple(
        (begin + side + end - reach - 1) // stride + 1
        for begin, side, end, reach, stride in zip(
            window.begins, sides, window.ends, window.reaches, window.strides, strict=True
        )
    )
    if min(found, default=1) < 1:
        raise ShapeError(
            f"an image of {sides} pixels is smaller than the window {window}; "
            f"check kernel, dilations and padding."
        )
    return found


@lru_cache(_REMEMBERED)
def _seen(window: Window, axis: int, tap: int, sides: tuple[int, ...]) -> tuple[slice, slice]:
    step = window.strides[axis]
    first = tap * window.dilations[axis] - window.begins[axis]  # the pixel under output zero
    low = max(0, -(first // step))
    stop = min(window.output_shape(sides)[axis], (sides[axis] - 1 - first) // step + 1)
    high = max(low, stop)
    pixel = first + low * step
    return slice(low, high), slice(pixel, pixel + (high - low) * step, step)
