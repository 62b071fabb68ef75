"""Operators that pool regions of images, whose corners may depend on parameters."""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.interpolation import (
    KERNELS,
    Axis,
    Taps,
    pixel_count,
    pixel_rows,
    weighted_taps,
)
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer, integers, number, text
from kfac_engine.graph.structure import Node

# -- RoiAlign --------------------------------------------------------------------------------------


@lowering("RoiAlign")
def roi_align(pen: Pen, node: Node) -> None:
    """Of each region a few bins; of each bin the mean or maximum of a few places."""
    image, _, batch = node.inputs
    high, wide = _RoiAxis(pen, node, 0), _RoiAxis(pen, node, 1)
    first = pen.op("Mul", pen.cast(batch, "int64"), pixel_count(pen, image))
    first = pen.op("Unsqueeze", first, pen.constant([1, 2, 3, 4]))
    # (regions, bins, places, bins, places, taps, taps, channels)
    values = weighted_taps(pen, pixel_rows(pen, image), first, [high.taps, wide.taps])
    among = pen.constant([2, 4, 5, 6])
    count = pen.op("Mul", high.count, wide.count)
    if text(node, "mode", "avg") == "avg":
        sums = pen.op("ReduceSum", values, among, keepdims=0)
        bins = pen.op("Div", sums, pen.op("Max", count, pen.scalar(1, image)))
    else:
        # ONNX takes the maximum of the weighted pixels, not of the interpolated values.
        least = pen.constant(np.finfo(pen.facts[image].dtype).min)
        counted = pen.op("And", high.counted, wide.counted)
        known = pen.op("Unsqueeze", counted, pen.constant([5, 6, 7]))
        bins = pen.op("ReduceMax", pen.op("Where", known, values, least), among, keepdims=0)
        some = pen.op("Greater", count, pen.scalar(0, image))
        bins = pen.op("Where", some, bins, pen.scalar(0, image))
    pen.op("Transpose", bins, perm=(0, 3, 1, 2), to=node.outputs[0])


class _RoiAxis:
    """The places of all regions along one axis.

    Attributes:
        taps: Of all places; those of height as ``(regions, bins, places, 1, 1)``, those of width as
            ``(regions, 1, 1, bins, places)``.
        count: Places in a bin of each region, ``(regions, 1, 1, 1)``, in the image's type.
        counted: Which places a region has.
    """

    def __init__(self, pen: Pen, node: Node, axis: int) -> None:
        image, regions, _ = node.inputs
        half_pixel = text(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
        bins = integer(node, ("output_height", "output_width")[axis], 1)
        line = Axis(pen, image, 2 + axis)
        scale, shift = number(node, "spatial_scale", 1.0), 0.5 if half_pixel else 0.0
        ends = []
        for column in (1 - axis, 3 - axis):
            end = pen.op("Gather", regions, pen.constant(np.array(column)), axis=1)
            end = pen.op("Sub", pen.op("Mul", end, line.number(scale)), line.number(shift))
            ends += [pen.op("Unsqueeze", end, pen.constant([1, 2]))]
        length = pen.op("Sub", ends[1], ends[0])
        if not half_pixel:
            length = pen.op("Max", length, line.number(1))
        step = pen.op("Div", length, line.number(bins))
        count, numbers = _places_in_bins(pen, line, step, integer(node, "sampling_ratio", 0))
        divisor = pen.op("Max", count, line.number(1))
        within = pen.op("Div", pen.op("Add", numbers, line.number(0.5)), divisor)
        which = line.number(np.arange(bins).reshape(-1, 1))
        place = pen.op("Add", ends[0], pen.op("Mul", pen.op("Add", which, within), step))
        spread = pen.constant([3, 4] if axis == 0 else [1, 2])
        place = pen.op("Unsqueeze", place, spread)
        self.count = pen.op("Unsqueeze", count, pen.constant([3]))
        self.counted = pen.op("Unsqueeze", pen.op("Less", numbers, count), spread)
        seen = pen.op("And", line.inside(place, 1), self.counted)
        seen = pen.op("Unsqueeze", seen, pen.constant([-1]))
        taps = line.taps(line.clipped(place), KERNELS["linear"], outside="border")
        weights = pen.op("Where", seen, taps.weights, line.number(0))
        self.taps = Taps(taps.pixels, weights, taps.side)


def _places_in_bins(pen: Pen, line: Axis, step: str, ratio: int) -> tuple[str, str]:
    """How many places the bins of each region have, ``(regions or 1, 1, 1)``, and their numbers."""
    if ratio > 0:
        return line.number(np.full((1, 1, 1), ratio)), line.number(np.arange(ratio))
    count = pen.op("Ceil", step)
    # With a one among them: there may be no regions.
    counts = pen.op(
        "Concat", pen.op("Reshape", count, pen.constant([-1])), line.number([1]), axis=0
    )
    most = pen.op("ReduceMax", counts, keepdims=0)
    return count, pen.op("Range", line.number(0), most, line.number(1))


# -- MaxRoiPool ------------------------------------------------------------------------------------


@lowering("MaxRoiPool")
def max_roi_pool(pen: Pen, node: Node) -> None:
    """The maximum of all pixels of a bin, first along lines, then along columns.

    Corners are rounded to pixels: they have no derivative.

    Source: Girshick 2015, arXiv:1504.08083, section 2.1.
    """
    image, regions = node.inputs
    batch = pen.op("Gather", regions, pen.constant(np.array(0)), axis=1)
    pixels = pen.op("Gather", image, pen.cast(batch, "int64"), axis=0)
    least = pen.constant(np.finfo(pen.facts[image].dtype).min)
    # (regions, channels, y, bins, x), then (regions, channels, bins, y, bins)
    wide = pen.op("Unsqueeze", _pixels_of_bins(pen, node, 1), pen.constant([1, 2]))
    lines = pen.op("Where", wide, pen.op("Unsqueeze", pixels, pen.constant([3])), least)
    lines = pen.op("ReduceMax", lines, pen.constant([4]), keepdims=0)
    high = pen.op("Unsqueeze", _pixels_of_bins(pen, node, 0), pen.constant([1, 4]))
    columns = pen.op("Where", high, pen.op("Unsqueeze", lines, pen.constant([2])), least)
    bins = pen.op("ReduceMax", columns, pen.constant([3]), keepdims=0)
    some = pen.op("Greater", bins, least)
    pen.op("Where", some, bins, pen.scalar(0, image), to=node.outputs[0])


def _pixels_of_bins(pen: Pen, node: Node, axis: int) -> str:
    """Which pixels along an axis belong to each bin of each region, ``(regions, bins, pixels)``."""
    image, regions = node.inputs
    bins = integers(node, "pooled_shape", ())[axis]
    line = Axis(pen, image, 2 + axis)
    scale = line.number(number(node, "spatial_scale", 1.0))
    ends = []
    for column in (2 - axis, 4 - axis):
        end = pen.op("Gather", regions, pen.constant([column]), axis=1)
        end = pen.op("Mul", end, scale)
        # Halves are rounded away from zero, unlike those of Round.
        whole = pen.op("Floor", pen.op("Add", pen.op("Abs", end), line.number(0.5)))
        whole = pen.op("Mul", pen.op("Sign", end), whole)
        ends += [pen.op("Unsqueeze", whole, pen.constant([2]))]
    extent = pen.op("Add", pen.op("Sub", ends[1], ends[0]), line.number(1))
    step = pen.op("Div", pen.op("Max", extent, line.number(1)), line.number(bins))
    numbers = np.arange(bins).reshape(-1, 1)
    first = pen.op("Floor", pen.op("Mul", line.number(numbers), step))
    behind = pen.op("Ceil", pen.op("Mul", line.number(numbers + 1), step))
    pixels = pen.op("Range", line.number(0), line.length, line.number(1))
    begun = pen.op("GreaterOrEqual", pixels, pen.op("Add", first, ends[0]))
    return pen.op("And", begun, pen.op("Less", pixels, pen.op("Add", behind, ends[0])))
