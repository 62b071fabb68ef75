"""Interpolates images at computed positions, for the operators that sample images.

Along each axis, a position has a few taps. The weight of a tap is a polynomial of the distance from
the position to the pixel below it. For several axes, the weights are multiplied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import LoweringBuilder


@dataclass(frozen=True, slots=True)
class Kernel:
    """An interpolation kernel along one axis.

    Attributes:
        offsets: Offsets of the taps from the pixel below the position.
        powers: Coefficients of the weight of each tap, by ascending powers of the distance.
    """

    offsets: tuple[int, ...]
    powers: tuple[tuple[float, ...], ...]


def _cubic(a: float) -> Kernel:
    """Return the kernel of cubic convolution (Keys 1981, equation 4, for any a)."""
    return Kernel(
        (-1, 0, 1, 2),
        (
            (0, 1, 0, 0),
            (a, 0, -a, 0),
            (-2 * a, -(a + 3), 2 * a + 3, a),
            (a, a + 2, -(a + 2), -a),
        ),
    )


KERNELS: Mapping[str, Kernel] = {
    "nearest": Kernel((0,), ((1,),)),
    "linear": Kernel((0, 1), ((1, 0), (-1, 1))),
    "cubic": _cubic(-0.75),
}


@dataclass(frozen=True, slots=True)
class Taps:
    """The taps of all positions along one axis, with their weights.

    Attributes:
        pixels: Indices of existing pixels, int64, ``(*places, taps)``.
        weights: Weights of the pixels, ``(*places, taps)``.
        side: Number of pixels, a 0-d int64.
    """

    pixels: str
    weights: str
    side: str


class Axis:
    """An axis of an image.

    Args:
        b: Writes the nodes.
        image: A value of the graph.
        number: Index of the axis.

    Attributes:
        side: Number of pixels, 0-d int64.
        length: Number of pixels in the element type of the image.
    """

    def __init__(self, b: LoweringBuilder, image: str, number: int) -> None:
        self._builder = b
        self._dtype = b.facts[image].dtype
        self.side = b.op("Gather", b.op("Shape", image), b.constant(np.array(number)))
        self.length = b.cast(self.side, self._dtype.name)

    def number(self, value: float | Sequence[float] | Array) -> str:
        """Add a constant in the element type of the image; return its name."""
        return self._builder.constant(np.asarray(value, self._dtype))

    def last(self) -> str:
        """Write the position of the last pixel."""
        return self._builder.op("Sub", self.length, self.number(1))

    def clipped(self, places: str) -> str:
        """Write positions, clipped to the first and last pixel."""
        return self._builder.op("Clip", places, self.number(0), self.last())

    def reflected(self, places: str, *, corners: bool) -> str:
        """Write positions, reflected at the centers of the outermost pixels or at their edges."""
        b = self._builder
        begin = self.number(0 if corners else -0.5)
        # An image of one pixel has no extent between centers, so any positive number is correct.
        span = b.op("Max", self.last(), self.number(1)) if corners else self.length
        past = b.op("Abs", b.op("Sub", places, begin))
        turns = b.op("Floor", b.op("Div", past, span))
        rest = b.op("Sub", past, b.op("Mul", turns, span))
        half = b.op("Mul", turns, self.number(0.5))
        even = b.op("Equal", half, b.op("Floor", half))
        there = b.op("Where", even, rest, b.op("Sub", span, rest))
        return b.op("Add", there, begin)

    def inside(self, places: str, margin: float) -> str:
        """Write whether positions are at most ``margin`` outside of the image."""
        b = self._builder
        after = b.op("GreaterOrEqual", places, self.number(-margin))
        limit = b.op("Add", self.last(), self.number(margin))
        return b.op("And", after, b.op("LessOrEqual", places, limit))

    def taps(self, places: str, kernel: Kernel, *, outside: str, corners: bool = False) -> Taps:
        """Write the taps around positions of any shape, in the element type of the image.

        Pixels and weights have one more axis, the last. Taps outside the image are "zeros",
        "border" or "reflection". With ``corners``, reflection is at the centers of the outermost
        pixels.
        """
        b = self._builder
        below = b.op("Floor", places)
        last = b.constant([-1])
        fraction = b.op("Unsqueeze", b.op("Sub", places, below), last)
        weights = self.number(kernel.powers[-1])
        for power in reversed(kernel.powers[:-1]):
            weights = b.op("Add", b.op("Mul", weights, fraction), self.number(power))
        pixels = b.op("Add", b.op("Unsqueeze", below, last), self.number(kernel.offsets))
        if outside == "zeros":
            weights = b.op("Where", self.inside(pixels, 0), weights, self.number(0))
        if outside == "reflection":
            pixels = self.reflected(pixels, corners=corners)
        whole = b.cast(self.clipped(pixels), "int64")
        return Taps(whole, weights, self.side)


def weighted_taps(b: LoweringBuilder, rows: str, first: str, axes: Sequence[Taps]) -> str:
    """Write the pixel at each tap times the weight of the tap.

    Args:
        b: Writes the nodes.
        rows: The pixels of all images, ``(images · pixels, channels)``.
        first: Row of the first pixel of the image of each position, int64; broadcasts to the
            positions.
        axes: Taps along each axis, in the order of the pixels in ``rows``; their positions
            broadcast.

    Returns:
        ``(*places, *taps, channels)``, with as many axes of taps as there are ``axes``.
    """
    pixels, weights = axes[0].pixels, axes[0].weights
    inner = b.constant([-1])
    for known, axis in enumerate(axes[1:], start=1):
        outer = b.constant(range(-1 - known, -1))
        before = b.op("Mul", b.op("Unsqueeze", pixels, inner), axis.side)
        pixels = b.op("Add", before, b.op("Unsqueeze", axis.pixels, outer))
        wide = b.op("Unsqueeze", weights, inner)
        weights = b.op("Mul", wide, b.op("Unsqueeze", axis.weights, outer))
    start = b.op("Unsqueeze", first, b.constant(range(-len(axes), 0)))
    values = b.op("Gather", rows, b.op("Add", pixels, start), axis=0)
    return b.op("Mul", values, b.op("Unsqueeze", weights, inner))


def pixel_rows(b: LoweringBuilder, image: str) -> str:
    """Write an image ``(n, channels, *pixels)`` as rows ``(n · pixels, channels)``."""
    rank = len(b.facts[image].shape)
    last = b.op("Transpose", image, perm=(0, *range(2, rank), 1))
    return b.op("Flatten", last, axis=rank - 1)


def pixel_count(b: LoweringBuilder, image: str) -> str:
    """Write the number of pixels of an image, 0-d."""
    return b.op("ReduceProd", b.op("Shape", image, start=2), keepdims=0)


def first_rows(b: LoweringBuilder, image: str, shape: Sequence[int]) -> str:
    """Write the row at which each image begins, reshaped to ``shape``."""
    zero, one = b.constant(np.array(0)), b.constant(np.array(1))
    parts = b.constant(np.array(prod(shape)))
    count = b.op("Mul", b.op("Gather", b.op("Shape", image), zero), parts)
    rows = b.op("Mul", b.op("Range", zero, count, one), pixel_count(b, image))
    return b.op("Reshape", rows, b.constant([-1, *shape]))
