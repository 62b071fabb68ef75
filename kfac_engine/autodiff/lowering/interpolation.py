"""Reads pixels between pixels: shared by the operators that sample images at computed places.

Along each axis a place has a few taps, each with a weight that is a polynomial of how far the place
is past the pixel below it. Over several axes, taps and weights multiply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.pen import Pen


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a value between pixels is put together along one axis.

    Attributes:
        offsets: Taps, counted from the pixel below.
        powers: Coefficients of the taps' weights, by rising powers of the fraction.
    """

    offsets: tuple[int, ...]
    powers: tuple[tuple[float, ...], ...]


def _cubic(a: float) -> Kernel:
    """Cubic convolution (Keys 1981, equation 4, for any a)."""
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
    """The taps of all places along one axis.

    Attributes:
        pixels: Numbers of pixels, int64, ``(*places, taps)``; all of them exist.
        weights: Their weights, ``(*places, taps)``.
        side: Number of pixels, a 0-d int64.
    """

    pixels: str
    weights: str
    side: str


class Axis:
    """One axis of an image.

    Args:
        pen: Writes the nodes.
        image: A value of the graph.
        number: Which of its axes.

    Attributes:
        side: Number of pixels, 0-d int64.
        length: The same in the image's type.
    """

    def __init__(self, pen: Pen, image: str, number: int) -> None:
        self._pen = pen
        self._dtype = pen.facts[image].dtype
        self.side = pen.op("Gather", pen.op("Shape", image), pen.constant(np.array(number)))
        self.length = pen.cast(self.side, self._dtype.name)

    def number(self, value: float | Sequence[float] | Array) -> str:
        """A constant in the image's type."""
        return self._pen.constant(np.asarray(value, self._dtype))

    def last(self) -> str:
        """Where the last pixel is."""
        return self._pen.op("Sub", self.length, self.number(1))

    def clipped(self, places: str) -> str:
        """Places outside moved to the first or last pixel."""
        return self._pen.op("Clip", places, self.number(0), self.last())

    def reflected(self, places: str, *, corners: bool) -> str:
        """Places outside mirrored: at the centre of the outermost pixels, or at their edge."""
        pen = self._pen
        begin = self.number(0 if corners else -0.5)
        # An image of one pixel, mirrored at its centre, has no extent; any other number will do.
        span = pen.op("Max", self.last(), self.number(1)) if corners else self.length
        past = pen.op("Abs", pen.op("Sub", places, begin))
        turns = pen.op("Floor", pen.op("Div", past, span))
        rest = pen.op("Sub", past, pen.op("Mul", turns, span))
        half = pen.op("Mul", turns, self.number(0.5))
        even = pen.op("Equal", half, pen.op("Floor", half))
        there = pen.op("Where", even, rest, pen.op("Sub", span, rest))
        return pen.op("Add", there, begin)

    def inside(self, places: str, margin: float) -> str:
        """Whether places are at most ``margin`` outside."""
        pen = self._pen
        after = pen.op("GreaterOrEqual", places, self.number(-margin))
        limit = pen.op("Add", self.last(), self.number(margin))
        return pen.op("And", after, pen.op("LessOrEqual", places, limit))

    def taps(self, places: str, kernel: Kernel, *, outside: str, corners: bool = False) -> Taps:
        """Taps around places, in the image's type.

        Args:
            places: Any shape.
            kernel: How values are put together.
            outside: What taps outside the image read: "zeros", "border" or "reflection".
            corners: Whether reflection is at the centre of the outermost pixels.

        Returns:
            Pixels and weights, with one axis more than ``places``.
        """
        pen = self._pen
        below = pen.op("Floor", places)
        last = pen.constant([-1])
        fraction = pen.op("Unsqueeze", pen.op("Sub", places, below), last)
        weights = self.number(kernel.powers[-1])
        for power in reversed(kernel.powers[:-1]):
            weights = pen.op("Add", pen.op("Mul", weights, fraction), self.number(power))
        pixels = pen.op("Add", pen.op("Unsqueeze", below, last), self.number(kernel.offsets))
        if outside == "zeros":
            weights = pen.op("Where", self.inside(pixels, 0), weights, self.number(0))
        if outside == "reflection":
            pixels = self.reflected(pixels, corners=corners)
        whole = pen.cast(self.clipped(pixels), "int64")
        return Taps(whole, weights, self.side)


def weighted_taps(pen: Pen, rows: str, first: str, axes: Sequence[Taps]) -> str:
    """The pixels under all taps, times their weights.

    Args:
        pen: Writes the nodes.
        rows: The pixels of all images, ``(images · pixels, channels)``.
        first: Row of the first pixel of the image of each place, int64; broadcasts to the places.
        axes: Taps along each axis, in the order in which ``rows`` counts pixels; their places
            broadcast.

    Returns:
        ``(*places, *taps, channels)``, with as many axes of taps as there are ``axes``.
    """
    pixels, weights = axes[0].pixels, axes[0].weights
    inner = pen.constant([-1])
    for known, axis in enumerate(axes[1:], start=1):
        outer = pen.constant(range(-1 - known, -1))
        before = pen.op("Mul", pen.op("Unsqueeze", pixels, inner), axis.side)
        pixels = pen.op("Add", before, pen.op("Unsqueeze", axis.pixels, outer))
        wide = pen.op("Unsqueeze", weights, inner)
        weights = pen.op("Mul", wide, pen.op("Unsqueeze", axis.weights, outer))
    start = pen.op("Unsqueeze", first, pen.constant(range(-len(axes), 0)))
    values = pen.op("Gather", rows, pen.op("Add", pixels, start), axis=0)
    return pen.op("Mul", values, pen.op("Unsqueeze", weights, inner))


def pixel_rows(pen: Pen, image: str) -> str:
    """``(n, channels, *pixels)`` as ``(n · pixels, channels)``."""
    rank = len(pen.facts[image].shape)
    last = pen.op("Transpose", image, perm=(0, *range(2, rank), 1))
    return pen.op("Flatten", last, axis=rank - 1)


def pixel_count(pen: Pen, image: str) -> str:
    """Number of pixels of one image, 0-d."""
    return pen.op("ReduceProd", pen.op("Shape", image, start=2), keepdims=0)


def first_rows(pen: Pen, image: str, sides: Sequence[int]) -> str:
    """Row of the first pixel of each image, where an image has ``prod(sides)`` parts."""
    zero, one = pen.constant(np.array(0)), pen.constant(np.array(1))
    parts = pen.constant(np.array(prod(sides)))
    count = pen.op("Mul", pen.op("Gather", pen.op("Shape", image), zero), parts)
    rows = pen.op("Mul", pen.op("Range", zero, count, one), pixel_count(pen, image))
    return pen.op("Reshape", rows, pen.constant([-1, *sides]))
