"""Sliding windows of convolutions and pools, whose padding may depend on the size of the image."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kfac_engine.backend.window import Window


@dataclass(frozen=True, slots=True)
class SlidingWindow(Window):
    """A window over the spatial axes, which come after batch and channels.

    Attributes:
        same: ``"SAME_UPPER"`` or ``"SAME_LOWER"`` if the padding depends on the size of the image
            (``begins`` and ``ends`` are then zero); else ``""``.
        ceil_mode: Whether the last window may extend beyond the padding.
    """

    same: str = ""
    ceil_mode: bool = False

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

        Args:
            spatial_shape: Pixels of each spatial axis.

        Returns:
            A window whose padding does not depend on the image.
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
    """Return the padding of each axis, divided between its two ends.

    Args:
        totals: Number of padding pixels of each axis.
        same: ``"SAME_UPPER"`` puts the odd pixel at the end, ``"SAME_LOWER"`` at the beginning.

    Returns:
        Padding before the first pixel and after the last pixel of each axis.
    """
    sizes = tuple(totals)
    smaller = tuple(size // 2 for size in sizes)
    larger = tuple(size - half for size, half in zip(sizes, smaller, strict=True))
    return (smaller, larger) if same == "SAME_UPPER" else (larger, smaller)
