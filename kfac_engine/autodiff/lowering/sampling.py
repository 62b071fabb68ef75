"""Writes operators that sample images at computed positions, as weighted sums of gathered pixels.

Positions may depend on parameters. Only the weights of the sum have a derivative with respect to
them.

Along each axis, a position has a few taps. The weight of a tap is a polynomial of the distance from
the position to the pixel below it. For several axes, the weights are multiplied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer, integers, number, text
from kfac_engine.graph.structure import Node

# -- GridSample ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """An interpolation kernel along one axis."""

    offsets: tuple[int, ...]  # offsets of the taps from the pixel below the position
    # Coefficients of the weight of each tap, by ascending powers of the distance.
    powers: tuple[tuple[float, ...], ...]


def _cubic(a: float) -> Kernel:
    """Return the kernel of cubic convolution (Keys 1981, equation 4, for any a)."""
    return Kernel(
        (-1, 0, 1, 2),
        ((0, 1, 0, 0), (a, 0, -a, 0), (-2 * a, -(a + 3), 2 * a + 3, a), (a, a + 2, -(a + 2), -a)),
    )


KERNELS: Mapping[str, Kernel] = {
    "nearest": Kernel((0,), ((1,),)),
    "linear": Kernel((0, 1), ((1, 0), (-1, 1))),
    "cubic": _cubic(-0.75),
}


@dataclass(frozen=True, slots=True)
class Taps:
    """The taps of all positions along one axis, with their weights."""

    pixels: str  # indices of existing pixels, int64, ``(*places, taps)``
    weights: str  # weights of the pixels, ``(*places, taps)``
    side: str  # number of pixels, a 0-d int64


class Axis:
    """An axis of an image, a value of the graph.

    ``side`` is its number of pixels, 0-d int64, and ``length`` the same in the element type of the
    image.
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
    """Write the pixel at each tap times the weight of the tap, ``(*places, *taps, channels)``.

    ``rows`` are the pixels of all images, ``(images · pixels, channels)``. ``first`` is the row of
    the first pixel of the image of each position, int64, and broadcasts to the positions, as do the
    taps along each axis. ``axes`` are in the order of the pixels in ``rows``.
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


# Names of modes in operator set 16, mapped to the names in set 20.
_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@lowering("GridSample")
def grid_sample(b: LoweringBuilder, node: Node) -> None:
    """Write samples of images of any rank at the positions of a grid, from −1 to 1."""
    image = node.inputs[0]
    spatial = len(b.facts[image].shape) - 2
    taps = [_grid_taps(b, node, axis) for axis in range(spatial)]
    values = weighted_taps(b, pixel_rows(b, image), first_rows(b, image, (1,) * spatial), taps)
    # Sum (n, *places, taps, channels) over the taps, and move the channels to the front.
    sums = b.op("ReduceSum", values, b.constant(range(-1 - spatial, -1)), keepdims=0)
    back = (0, 1 + spatial, *range(1, 1 + spatial))
    b.op("Transpose", sums, perm=back, result=node.outputs[0])


def _grid_taps(b: LoweringBuilder, node: Node, axis: int) -> Taps:
    """Write the interpolation taps of one spatial axis; a grid has the last axis first."""
    image, grid = node.inputs
    spatial = len(b.facts[image].shape) - 2
    mode = text(node, "mode", "bilinear")
    mode = _MODES.get(mode, mode)
    padding, corners = text(node, "padding_mode", "zeros"), bool(integer(node, "align_corners", 0))
    line = Axis(b, image, 2 + axis)
    place = b.op("Gather", grid, b.constant(np.array(spatial - 1 - axis)), axis=-1)
    half = b.op("Mul", b.op("Add", place, line.number(1)), line.number(0.5))
    if corners:
        place = b.op("Mul", half, line.last())
    else:
        place = b.op("Sub", b.op("Mul", half, line.length), line.number(0.5))
    # A cubic kernel reads beyond the border, until all its taps read the pixel at the border.
    if padding == "border" and mode != "cubic":
        place = line.clipped(place)
    if padding == "reflection":
        place = line.reflected(place, corners=corners)
    if mode == "nearest":
        place = b.op("Round", place)
    return line.taps(place, KERNELS[mode], outside=padding, corners=corners)


# -- AffineGrid ------------------------------------------------------------------------------------


@lowering("AffineGrid")
def affine_grid(b: LoweringBuilder, node: Node) -> None:
    """Write the product of homogeneous pixel positions and each matrix, the last axis first."""
    matrices, size = node.inputs
    spatial = b.facts[matrices].shape[1]
    spatial_shape = b.op("Slice", size, b.constant([2]), b.constant([2 + spatial]))
    columns = [_even_places(b, node, axis, spatial_shape) for axis in reversed(range(spatial))]
    ones = b.op("Expand", b.constant(np.ones(1), b.facts[matrices].dtype.name), spatial_shape)
    last = b.constant([-1])
    places = b.op("Concat", *(b.op("Unsqueeze", c, last) for c in (*columns, ones)), axis=-1)
    rows = b.op("Reshape", places, b.constant([-1, spatial + 1]))
    moved = b.op("MatMul", rows, b.op("Transpose", matrices, perm=(0, 2, 1)))
    shape = b.op("Concat", last, spatial_shape, b.constant([spatial]), axis=0)
    b.op("Reshape", moved, shape, result=node.outputs[0])


def _even_places(b: LoweringBuilder, node: Node, axis: int, spatial_shape: str) -> str:
    """Write the positions of all pixels along one axis, ``(*spatial_shape)``."""
    matrices = node.inputs[0]
    one, two = (b.scalar(number, matrices) for number in (1, 2))
    size = b.op("Gather", spatial_shape, b.constant(np.array(axis)))
    count = b.cast(size, b.facts[matrices].dtype.name)
    numbers = b.op("Range", b.scalar(0, matrices), count, one)
    if integer(node, "align_corners", 0):
        # Positions are computed from the last corner, where ONNX Runtime places a single pixel.
        steps = b.op("Sub", count, one)
        left = b.op("Mul", b.op("Sub", steps, numbers), two)
        places = b.op("Sub", one, b.op("Div", left, b.op("Max", steps, one)))
    else:
        middles = b.op("Add", b.op("Mul", numbers, two), one)
        places = b.op("Sub", b.op("Div", middles, count), one)
    behind = b.facts[matrices].shape[1] - 1 - axis
    return b.op(
        "Expand",
        b.op("Unsqueeze", places, b.constant(range(1, 1 + behind), "int64")),
        spatial_shape,
    )


# -- DeformConv ------------------------------------------------------------------------------------


@lowering("DeformConv")
def deform_conv(b: LoweringBuilder, node: Node) -> None:
    """Write a pointwise convolution of the pixels at offset positions.

    Source: Zhu, Hu, Lin & Dai 2019, arXiv:1811.11168, equations 1 and 2.
    """
    image, weight, offset, bias, mask = (*node.inputs, "", "")[:5]
    outs, ins, *kernel = b.facts[weight].shape
    if len(kernel) != 2:
        raise b.refuse(node, f"its kernel has shape {kernel}; only two spatial axes are covered")
    groups, taps = integer(node, "offset_group", 1), prod(kernel)
    places = _deformed(b, node, kernel)
    # Groups of channels with common offsets become separate images.
    apart = b.op("Concat", b.constant([0, groups, -1]), b.op("Shape", image, start=2), axis=0)
    last = b.op("Transpose", b.op("Reshape", image, apart), perm=(0, 1, 3, 4, 2))
    rows = b.op("Flatten", last, axis=4)
    first = first_rows(b, image, (groups, 1, 1, 1))
    values = weighted_taps(b, rows, first, places)
    # (n, groups, taps, y, x, channels of a group)
    read = b.op("ReduceSum", values, b.constant([5, 6]), keepdims=0)
    if mask:
        mask_shape = b.op("Shape", mask, start=2)
        strengths = b.op("Concat", b.constant([0, groups, taps]), mask_shape, axis=0)
        strengths = b.op("Unsqueeze", b.op("Reshape", mask, strengths), b.constant([-1]))
        read = b.op("Mul", read, strengths)
    columns = b.op("Transpose", read, perm=(0, 1, 5, 2, 3, 4))
    group = integer(node, "group", 1)
    places_shape = b.op("Shape", offset, start=2)
    columns = b.op(
        "Reshape",
        columns,
        b.op("Concat", b.constant([0, group * ins * taps]), places_shape, axis=0),
    )
    pixelwise = b.op("Reshape", weight, b.constant([outs, ins * taps, 1, 1]))
    operands = (columns, pixelwise, bias) if bias else (columns, pixelwise)
    b.op("Conv", *operands, group=group, result=node.outputs[0])


def _deformed(b: LoweringBuilder, node: Node, kernel: list[int]) -> list[Taps]:
    """Write the taps along the two axes, at positions ``(n, groups, taps, y, x)``."""
    image, offset = node.inputs[0], node.inputs[2]
    groups = integer(node, "offset_group", 1)
    places_shape = b.op("Shape", offset, start=2)
    pairs = b.op("Concat", b.constant([0, groups, prod(kernel), 2]), places_shape, axis=0)
    moves = b.op("Reshape", offset, pairs)
    strides, dilations = integers(node, "strides", (1, 1)), integers(node, "dilations", (1, 1))
    pads = integers(node, "pads", (0, 0, 0, 0))
    taps = []
    for axis in range(2):
        line = Axis(b, image, 2 + axis)
        count = b.op("Gather", places_shape, b.constant(np.array(axis)))
        begin, step = b.constant(np.array(0)), b.constant(np.array(1))
        numbers = b.cast(b.op("Range", begin, count, step), b.facts[image].dtype.name)
        starts = b.op("Mul", numbers, line.number(strides[axis]))
        starts = b.op("Unsqueeze", starts, b.constant([1] if axis == 0 else [0]))
        tap = np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis] - pads[axis]
        still = b.op("Add", starts, line.number(tap))
        place = b.op("Add", b.op("Gather", moves, b.constant(np.array(axis)), axis=3), still)
        taps.append(line.taps(place, KERNELS["linear"], outside="zeros"))
    return taps


# -- RoiAlign --------------------------------------------------------------------------------------


@lowering("RoiAlign")
def roi_align(b: LoweringBuilder, node: Node) -> None:
    """Write the mean or maximum over sampled positions, for each bin of each region."""
    image, _, batch = node.inputs
    high, wide = _RoiAxis(b, node, 0), _RoiAxis(b, node, 1)
    first = b.op("Mul", b.cast(batch, "int64"), pixel_count(b, image))
    first = b.op("Unsqueeze", first, b.constant([1, 2, 3, 4]))
    # (regions, bins, places, bins, places, taps, taps, channels)
    values = weighted_taps(b, pixel_rows(b, image), first, [high.taps, wide.taps])
    among = b.constant([2, 4, 5, 6])
    count = b.op("Mul", high.count, wide.count)
    if text(node, "mode", "avg") == "avg":
        sums = b.op("ReduceSum", values, among, keepdims=0)
        bins = b.op("Div", sums, b.op("Max", count, b.scalar(1, image)))
    else:
        # ONNX defines the result as the maximum of the weighted pixels, not of interpolated values.
        least = b.constant(np.finfo(b.facts[image].dtype).min)
        counted = b.op("And", high.counted, wide.counted)
        known = b.op("Unsqueeze", counted, b.constant([5, 6, 7]))
        bins = b.op("ReduceMax", b.op("Where", known, values, least), among, keepdims=0)
        nonempty = b.op("Greater", count, b.scalar(0, image))
        bins = b.op("Where", nonempty, bins, b.scalar(0, image))
    b.op("Transpose", bins, perm=(0, 3, 1, 2), result=node.outputs[0])


class _RoiAxis:
    """The sampling positions of all regions along one axis.

    Attributes:
        taps: Taps of all positions, ``(regions, bins, places, 1, 1)`` for the height and
            ``(regions, 1, 1, bins, places)`` for the width.
        count: Number of positions in a bin of each region, ``(regions, 1, 1, 1)``, in the type of
            the image.
        counted: Mask of the positions of each region.
    """

    def __init__(self, b: LoweringBuilder, node: Node, axis: int) -> None:
        image, regions, _ = node.inputs
        half_pixel = text(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
        bins = integer(node, ("output_height", "output_width")[axis], 1)
        line = Axis(b, image, 2 + axis)
        scale, shift = number(node, "spatial_scale", 1.0), 0.5 if half_pixel else 0.0
        ends = []
        for column in (1 - axis, 3 - axis):
            end = b.op("Gather", regions, b.constant(np.array(column)), axis=1)
            end = b.op("Sub", b.op("Mul", end, line.number(scale)), line.number(shift))
            ends += [b.op("Unsqueeze", end, b.constant([1, 2]))]
        length = b.op("Sub", ends[1], ends[0])
        if not half_pixel:
            length = b.op("Max", length, line.number(1))
        step = b.op("Div", length, line.number(bins))
        count, numbers = _places_in_bins(b, line, step, integer(node, "sampling_ratio", 0))
        divisor = b.op("Max", count, line.number(1))
        within = b.op("Div", b.op("Add", numbers, line.number(0.5)), divisor)
        which = line.number(np.arange(bins).reshape(-1, 1))
        place = b.op("Add", ends[0], b.op("Mul", b.op("Add", which, within), step))
        spread = b.constant([3, 4] if axis == 0 else [1, 2])
        place = b.op("Unsqueeze", place, spread)
        self.count = b.op("Unsqueeze", count, b.constant([3]))
        self.counted = b.op("Unsqueeze", b.op("Less", numbers, count), spread)
        seen = b.op("And", line.inside(place, 1), self.counted)
        seen = b.op("Unsqueeze", seen, b.constant([-1]))
        taps = line.taps(line.clipped(place), KERNELS["linear"], outside="border")
        weights = b.op("Where", seen, taps.weights, line.number(0))
        self.taps = Taps(taps.pixels, weights, taps.side)


def _places_in_bins(b: LoweringBuilder, line: Axis, step: str, ratio: int) -> tuple[str, str]:
    """Write the number of positions in a bin, ``(regions or 1, 1, 1)``, and their indices."""
    if ratio > 0:
        return line.number(np.full((1, 1, 1), ratio)), line.number(np.arange(ratio))
    count = b.op("Ceil", step)
    # A one is added, because the maximum of no regions is undefined.
    counts = b.op("Concat", b.op("Reshape", count, b.constant([-1])), line.number([1]), axis=0)
    most = b.op("ReduceMax", counts, keepdims=0)
    return count, b.op("Range", line.number(0), most, line.number(1))


# -- MaxRoiPool ------------------------------------------------------------------------------------


@lowering("MaxRoiPool")
def max_roi_pool(b: LoweringBuilder, node: Node) -> None:
    """Write the maximum of all pixels of each bin, along rows and then along columns.

    Corners are rounded to pixels and have no derivative.

    Source: Girshick 2015, arXiv:1504.08083, section 2.1.
    """
    image, regions = node.inputs
    batch = b.op("Gather", regions, b.constant(np.array(0)), axis=1)
    pixels = b.op("Gather", image, b.cast(batch, "int64"), axis=0)
    least = b.constant(np.finfo(b.facts[image].dtype).min)
    # (regions, channels, y, bins, x), then (regions, channels, bins, y, bins)
    wide = b.op("Unsqueeze", _pixels_of_bins(b, node, 1), b.constant([1, 2]))
    lines = b.op("Where", wide, b.op("Unsqueeze", pixels, b.constant([3])), least)
    lines = b.op("ReduceMax", lines, b.constant([4]), keepdims=0)
    high = b.op("Unsqueeze", _pixels_of_bins(b, node, 0), b.constant([1, 4]))
    columns = b.op("Where", high, b.op("Unsqueeze", lines, b.constant([2])), least)
    bins = b.op("ReduceMax", columns, b.constant([3]), keepdims=0)
    nonempty = b.op("Greater", bins, least)
    b.op("Where", nonempty, bins, b.scalar(0, image), result=node.outputs[0])


def _pixels_of_bins(b: LoweringBuilder, node: Node, axis: int) -> str:
    """Write whether a bin contains each pixel of an axis, Booleans ``(regions, bins, pixels)``."""
    image, regions = node.inputs
    bins = integers(node, "pooled_shape", ())[axis]
    line = Axis(b, image, 2 + axis)
    scale = line.number(number(node, "spatial_scale", 1.0))
    ends = []
    for column in (2 - axis, 4 - axis):
        end = b.op("Gather", regions, b.constant([column]), axis=1)
        end = b.op("Mul", end, scale)
        # Halves are rounded away from zero, and Round would round them to even.
        whole = b.op("Floor", b.op("Add", b.op("Abs", end), line.number(0.5)))
        whole = b.op("Mul", b.op("Sign", end), whole)
        ends += [b.op("Unsqueeze", whole, b.constant([2]))]
    extent = b.op("Add", b.op("Sub", ends[1], ends[0]), line.number(1))
    step = b.op("Div", b.op("Max", extent, line.number(1)), line.number(bins))
    numbers = np.arange(bins).reshape(-1, 1)
    first = b.op("Floor", b.op("Mul", line.number(numbers), step))
    behind = b.op("Ceil", b.op("Mul", line.number(numbers + 1), step))
    pixels = b.op("Range", line.number(0), line.length, line.number(1))
    begun = b.op("GreaterOrEqual", pixels, b.op("Add", first, ends[0]))
    return b.op("And", begun, b.op("Less", pixels, b.op("Add", behind, ends[0])))
