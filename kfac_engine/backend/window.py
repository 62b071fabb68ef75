"""Where the patches of a convolution lie: geometry only, no data."""

from dataclasses import dataclass
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

    def output_sides(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Output positions an axis, for an image of ``sides``.

        Returns:
            One number an axis, at least one each.

        Raises:
            ShapeError: The padded image is smaller than the (dilated) kernel.
        """
        found = tuple(self._outputs(axis, side) for axis, side in enumerate(sides))
        if min(found, default=1) < 1:
            raise ShapeError(
                f"an image of {sides} pixels is smaller than the window {self}; "
                f"check kernel, dilations and padding."
            )
        return found

    def seen(self, axis: int, tap: int, side: int) -> tuple[slice, slice]:
        """Which output positions see the image through one tap, and the pixels they see.

        Args:
            axis: Spatial axis, from zero.
            tap: Position in the kernel along it.
            side: Pixels of the image along it.

        Returns:
            Two slices of equal length, possibly empty: of the output positions and of the pixels.
        """
        step, outputs = self.strides[axis], self._outputs(axis, side)
        first = tap * self.dilations[axis] - self.begins[axis]  # the pixel under output zero
        low = max(0, -(first // step))
        high = max(low, min(outputs, (side - 1 - first) // step + 1))
        start = first + low * step
        return slice(low, high), slice(start, start + (high - low) * step, step)

    def _outputs(self, axis: int, side: int) -> int:
        """Output positions along an axis; below one if the image is too small."""
        reach = (self.kernel[axis] - 1) * self.dilations[axis]
        padded = self.begins[axis] + side + self.ends[axis]
        return (padded - reach - 1) // self.strides[axis] + 1
