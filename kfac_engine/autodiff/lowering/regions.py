"""Writes operators that pool regions of images, whose corners may depend on parameters."""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.interpolation import (
    KERNELS,
    Axis,
    Taps,
    pixel_count,
    pixel_rows,
    weighted_taps,
)
from kfac_engine.autodiff.rules.attributes import integer, integers, number, text
from kfac_engine.graph.structure import Node

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
