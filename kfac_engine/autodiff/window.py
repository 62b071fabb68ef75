"""Sliding windows of Conv and the pools, whose padding may depend on the size of the image."""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine.backend.window import Window


@dataclass(frozen=True, slots=True)
class SlidingWindow(Window):
    """A window over the spatial axes, which come after batch and channels.

    Attributes:
        same: "SAME_UPPER" or "SAME_LOWER" where the padding depends on the size of the image, which
            is known at run time only (``begins`` and ``ends`` are then zero); else "".
        ceil_mode: Whether the last window may extend beyond the padding.
    """

    same: str = ""
    ceil_mode: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """The spatial axes of the image."""
        return tuple(range(2, 2 + len(self.kernel)))

    @property
    def unit_strides(self) -> bool:
        """Whether all strides are 1."""
        return set(self.strides) <= {1}

    @property
    def padded(self) -> bool:
        """Whether a window may cover padding."""
        return any(self.begins + self.ends) or bool(self.same) or self.ceil_mode

    def resolved(self, image: Sequence[int], outputs: Sequence[int]) -> Window:
        """The window with explicit padding on an image of known shape.

        Args:
            image: Pixels of each spatial axis.
            outputs: Output positions of each spatial axis.

        Returns:
            The window whose padding yields these output positions.
        """
        needed = [
            (count - 1) * stride + reach + 1
            for count, stride, reach in zip(outputs, self.strides, self.reaches, strict=True)
        ]
        begins = self.begins
        if self.same:
            totals = [max(0, need - size) for need, size in zip(needed, image, strict=True)]
            odd = 0 if self.same == "SAME_UPPER" else 1  # whether the odd pixel comes first
            begins = tuple((total + odd) // 2 for total in totals)
        ends = (
            need - begin - size for need, begin, size in zip(needed, begins, image, strict=True)
        )
        return Window(self.kernel, self.strides, self.dilations, begins, tuple(ends))
