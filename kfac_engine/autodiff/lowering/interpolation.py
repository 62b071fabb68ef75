"""Reads pixels between pixels: shared by the operators that sample images at computed places.

Along each axis a place has a few taps, each with a weight that is a polynomial of how far the place
is past the pixel below it. Over several axes, taps and weights multiply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import LoweringBuilder


@dataclass(frozen=True, slots=True)
class Kernel:
    """Interpolation kernel along one axis.

    Attributes:
        offsets: Taps, counted from the pixel below.
        powers: Coefficients of the taps' weights, by rising powers of the fraction.
    """

    offsets: tuple[int, ...]
    powers: tuple[tuple[float, ...], ...]


def _cubic(a: float) -> Kernel:
    """Return the weights of cubic convolution (Keys 1981, equation 4, for any a)."""
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
    """Pixels and weights of all positions along one axis.

    Attributes:
        pixels: Numbers of pixels, int64, ``(*places, taps)``; all of them exist.
        weights: Their weights, ``(*places, taps)``.
        side: Number of pixels, a 0-d int64.
    """

    pixels: str
    weights: str
    side: str


class Axis:
    """Axis of an image.

    Args:
        b: Writes the nodes.
        image: A value of the graph.
        number: Which of its axes.

    Attributes:
        side: Number of pixels, 0-d int64.
        length: The same in the image's type.
    """

    def __init__(self, b: LoweringBuilder, image: str, number: int) -> None:
        self._builder = b
        self._dtype = b.facts[image].dtype
        self.side = b.op("Gather", b.op("Shape", image), b.constant(np.array(number)))
        self.length = b.cast(self.side, self._dtype.name)

    def number(self, value: float | Sequence[float] | Array) -> str:
        """Add a constant in the element type of the image."""
        return self._builder.constant(np.asarray(value, self._dtype))

    def last(self) -> str:
        """Return the position of the last pixel."""
        return self._builder.op("Sub", self.length, self.number(1))

    def clipped(self, places: str) -> str:
        """Clip positions to the first and last pixel."""
        return self._builder.op("Clip", places, self.number(0), self.last())

    def reflected(self, places: str, *, corners: bool) -> str:
        """Reflect positions at the centers of the outermost pixels, or at their edges."""
        b = self._builder
        begin = self.number(0 if corners else -0.5)
        # An image of one pixel, mirrored at its centre, has no extent; any other number will do.
        span = b.op("Max", self.last(), self.number(1)) if corners else self.length
        past = b.op("Abs", b.op("Sub", places, begin))
        turns = b.op("Floor", b.op("Div", past, span))
        rest = b.op("Sub", past, b.op("Mul", turns, span))
        half = b.op("Mul", turns, self.number(0.5))
        even = b.op("Equal", half, b.op("Floor", half))
        there = b.op("Where", even, rest, b.op("Sub", span, rest))
        return b.op("Add", there, begin)

    def inside(self, places: str, margin: float) -> str:
        """Check whether positions are at most ``margin`` outside of the image."""
        b = self._builder
        after = b.op("GreaterOrEqual", places, self.number(-margin))
        limit = b.op("Add", self.last(), self.number(margin))
        return b.op("And", after, b.op("LessOrEqual", places, limit))

    def taps(self, places: str, kernel: Kernel, *, outside: str, corners: bool = False) -> Taps:
        """Return the taps around positions, in the element type of the image.

        Args:
            places: Any shape.
            kernel: How values are put together.
            outside: What taps outside the image read: "zeros", "border" or "reflection".
            corners: Whether reflection is at the centre of the outermost pixels.

        Returns:
            Pixels and weights, with one axis more than ``places``.
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
    """Multiply the pixels of all taps by their weights.

    Args:
        b: Writes the nodes.
        rows: The pixels of all images, ``(images · pixels, channels)``.
        first: Row of the first pixel of the image of each place, int64; broadcasts to the places.
        axes: Taps along each axis, in the order in which ``rows`` counts pixels; their places
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
    """Reshape ``(n, channels, *pixels)`` to ``(n · pixels, channels)``."""
    rank = len(b.facts[image].shape)
    last = b.op("Transpose", image, perm=(0, *range(2, rank), 1))
    return b.op("Flatten", last, axis=rank - 1)


def pixel_count(b: LoweringBuilder, image: str) -> str:
    """Return the number of pixels of an image, 0-d."""
    return b.op("ReduceProd", b.op("Shape", image, start=2), keepdims=0)


def first_rows(b: LoweringBuilder, image: str, shape: Sequence[int]) -> str:
    """Return the row of the first pixel of each image; an image has ``prod(shape)`` parts."""
    zero, one = b.constant(np.array(0)), b.constant(np.array(1))
    parts = b.constant(np.array(prod(shape)))
    count = b.op("Mul", b.op("Gather", b.op("Shape", image), zero), parts)
    rows = b.op("Mul", b.op("Range", zero, count, one), pixel_count(b, image))
    return b.op("Reshape", rows, b.constant([-1, *shape]))
