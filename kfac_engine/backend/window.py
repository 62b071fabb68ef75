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
        found = tuple(
            (side + begin + end - (k - 1) * d - 1) // stride + 1
            for side, k, stride, d, begin, end in zip(
                sides,
                self.kernel,
                self.strides,
                self.dilations,
                self.begins,
                self.ends,
                strict=True,
            )
        )
        if min(found, default=1) < 1:
            raise ShapeError(
                f"an image of {sides} pixels is smaller than the window {self}; "
                f"check kernel, dilations and padding."
            )
        return found
