"""Writes operators that sample images at computed positions, as weighted sums of gathered pixels.

Positions may depend on parameters. Only the weights of the sum have a derivative with respect to
them.
"""

from math import prod

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.interpolation import (
    KERNELS,
    Axis,
    Taps,
    first_rows,
    pixel_rows,
    weighted_taps,
)
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.graph.structure import Node

# -- GridSample ------------------------------------------------------------------------------------

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
    """Write the taps along both axes, at positions ``(n, groups, taps, y, x)``."""
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
