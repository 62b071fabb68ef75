"""Operators that read images at computed places: gathers of pixels, and sums of them with weights.

Places may depend on parameters too: their derivative is that of the weights.
"""

from math import prod

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.interpolation import (
    KERNELS,
    Axis,
    Taps,
    first_rows,
    pixel_rows,
    weighted_taps,
)
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.graph.structure import Node

# -- GridSample ------------------------------------------------------------------------------------

# The names of operator set 16 beside those of 20.
_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@lowering("GridSample")
def grid_sample(pen: Pen, node: Node) -> None:
    """Images of any rank, read where a grid says, in coordinates from −1 to 1."""
    image = node.inputs[0]
    spatial = len(pen.facts[image].shape) - 2
    taps = [_grid_taps(pen, node, axis) for axis in range(spatial)]
    values = weighted_taps(
        pen, pixel_rows(pen, image), first_rows(pen, image, (1,) * spatial), taps
    )
    # (n, *places, taps, channels): sum over the taps, channels to the front.
    sums = pen.op("ReduceSum", values, pen.constant(range(-1 - spatial, -1)), keepdims=0)
    back = (0, 1 + spatial, *range(1, 1 + spatial))
    pen.op("Transpose", sums, perm=back, to=node.outputs[0])


def _grid_taps(pen: Pen, node: Node, axis: int) -> Taps:
    """The taps along one spatial axis; the grid names the last axis first."""
    image, grid = node.inputs
    spatial = len(pen.facts[image].shape) - 2
    mode = text(node, "mode", "bilinear")
    mode = _MODES.get(mode, mode)
    padding, corners = text(node, "padding_mode", "zeros"), bool(integer(node, "align_corners", 0))
    line = Axis(pen, image, 2 + axis)
    place = pen.op("Gather", grid, pen.constant(np.array(spatial - 1 - axis)), axis=-1)
    half = pen.op("Mul", pen.op("Add", place, line.number(1)), line.number(0.5))
    if corners:
        place = pen.op("Mul", half, line.last())
    else:
        place = pen.op("Sub", pen.op("Mul", half, line.length), line.number(0.5))
    # A cubic goes on past the border, up to where all its taps read the border's pixel.
    if padding == "border" and mode != "cubic":
        place = line.clipped(place)
    if padding == "reflection":
        place = line.reflected(place, corners=corners)
    if mode == "nearest":
        place = pen.op("Round", place)
    return line.taps(place, KERNELS[mode], outside=padding, corners=corners)


# -- AffineGrid ------------------------------------------------------------------------------------


@lowering("AffineGrid")
def affine_grid(pen: Pen, node: Node) -> None:
    """Places of pixels and a one, times each matrix, whose rows name the last axis first."""
    matrices, size = node.inputs
    spatial = pen.facts[matrices].shape[1]
    sides = pen.op("Slice", size, pen.constant([2]), pen.constant([2 + spatial]))
    columns = [_even_places(pen, node, axis, sides) for axis in reversed(range(spatial))]
    ones = pen.op("Expand", pen.constant(np.ones(1), pen.facts[matrices].dtype.name), sides)
    last = pen.constant([-1])
    places = pen.op("Concat", *(pen.op("Unsqueeze", c, last) for c in (*columns, ones)), axis=-1)
    rows = pen.op("Reshape", places, pen.constant([-1, spatial + 1]))
    moved = pen.op("MatMul", rows, pen.op("Transpose", matrices, perm=(0, 2, 1)))
    shape = pen.op("Concat", last, sides, pen.constant([spatial]), axis=0)
    pen.op("Reshape", moved, shape, to=node.outputs[0])


def _even_places(pen: Pen, node: Node, axis: int, sides: str) -> str:
    """Places along one axis of all pixels, ``(*sides)``."""
    matrices = node.inputs[0]
    one, two = (pen.scalar(number, matrices) for number in (1, 2))
    side = pen.op("Gather", sides, pen.constant(np.array(axis)))
    count = pen.cast(side, pen.facts[matrices].dtype.name)
    numbers = pen.op("Range", pen.scalar(0, matrices), count, one)
    if integer(node, "align_corners", 0):
        # Counted from the last corner, where ONNX Runtime puts a single pixel.
        steps = pen.op("Sub", count, one)
        left = pen.op("Mul", pen.op("Sub", steps, numbers), two)
        places = pen.op("Sub", one, pen.op("Div", left, pen.op("Max", steps, one)))
    else:
        middles = pen.op("Add", pen.op("Mul", numbers, two), one)
        places = pen.op("Sub", pen.op("Div", middles, count), one)
    behind = pen.facts[matrices].shape[1] - 1 - axis
    return pen.op(
        "Expand", pen.op("Unsqueeze", places, pen.constant(range(1, 1 + behind), "int64")), sides
    )


# -- DeformConv ------------------------------------------------------------------------------------


@lowering("DeformConv")
def deform_conv(pen: Pen, node: Node) -> None:
    """A convolution whose taps are moved by offsets: read pixels, then a pixelwise convolution.

    Source: Zhu, Hu, Lin & Dai 2019, arXiv:1811.11168, equations 1 and 2.
    """
    image, weight, offset, bias, mask = (*node.inputs, "", "")[:5]
    outs, ins, *kernel = pen.facts[weight].shape
    if len(kernel) != 2:
        raise pen.refuse(node, f"its kernel has the sides {kernel}; only two axes are known")
    groups, taps = integer(node, "offset_group", 1), prod(kernel)
    places = _deformed(pen, node, kernel)
    # Groups of channels that move together count as images of their own.
    apart = pen.op("Concat", pen.constant([0, groups, -1]), pen.op("Shape", image, start=2), axis=0)
    last = pen.op("Transpose", pen.op("Reshape", image, apart), perm=(0, 1, 3, 4, 2))
    rows = pen.op("Flatten", last, axis=4)
    first = first_rows(pen, image, (groups, 1, 1, 1))
    values = weighted_taps(pen, rows, first, places)
    # (n, groups, taps, y, x, channels of a group)
    read = pen.op("ReduceSum", values, pen.constant([5, 6]), keepdims=0)
    if mask:
        sides = pen.op("Shape", mask, start=2)
        strengths = pen.op("Concat", pen.constant([0, groups, taps]), sides, axis=0)
        strengths = pen.op("Unsqueeze", pen.op("Reshape", mask, strengths), pen.constant([-1]))
        read = pen.op("Mul", read, strengths)
    columns = pen.op("Transpose", read, perm=(0, 1, 5, 2, 3, 4))
    group = integer(node, "group", 1)
    sides = pen.op("Shape", offset, start=2)
    columns = pen.op(
        "Reshape", columns, pen.op("Concat", pen.constant([0, group * ins * taps]), sides, axis=0)
    )
    pixelwise = pen.op("Reshape", weight, pen.constant([outs, ins * taps, 1, 1]))
    operands = (columns, pixelwise, bias) if bias else (columns, pixelwise)
    pen.op("Conv", *operands, group=group, to=node.outputs[0])


def _deformed(pen: Pen, node: Node, kernel: list[int]) -> list[Taps]:
    """The taps of all places along both axes; places are ``(n, groups, taps, y, x)``."""
    image, offset = node.inputs[0], node.inputs[2]
    groups = integer(node, "offset_group", 1)
    sides = pen.op("Shape", offset, start=2)
    pairs = pen.op("Concat", pen.constant([0, groups, prod(kernel), 2]), sides, axis=0)
    moves = pen.op("Reshape", offset, pairs)
    strides, dilations = integers(node, "strides", (1, 1)), integers(node, "dilations", (1, 1))
    pads = integers(node, "pads", (0, 0, 0, 0))
    taps = []
    for axis in range(2):
        line = Axis(pen, image, 2 + axis)
        count = pen.op("Gather", sides, pen.constant(np.array(axis)))
        begin, step = pen.constant(np.array(0)), pen.constant(np.array(1))
        numbers = pen.cast(pen.op("Range", begin, count, step), pen.facts[image].dtype.name)
        starts = pen.op("Mul", numbers, line.number(strides[axis]))
        starts = pen.op("Unsqueeze", starts, pen.constant([1] if axis == 0 else [0]))
        tap = np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis] - pads[axis]
        still = pen.op("Add", starts, line.number(tap))
        place = pen.op("Add", pen.op("Gather", moves, pen.constant(np.array(axis)), axis=3), still)
        taps.append(line.taps(place, KERNELS["linear"], outside="zeros"))
    return taps
