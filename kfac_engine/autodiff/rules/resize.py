"""Differentiates Resize.

Resize is a product with a matrix along each axis. The Resize of an identity matrix is this matrix,
for every mode, coordinate system and size. The rule multiplies the cotangent by its transpose.
Nearest neighbors with integer scales have shorter forms.
"""

from dataclasses import replace
from math import prod

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integers, text
from kfac_engine.autodiff.rules.indexing import rearranged
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.structure import Node

# Coordinates and rounding for which an integer scale repeats each pixel the same number of times.
_REPEATS = {
    ("asymmetric", "floor"),
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
}
# Coordinates for which an axis of scale one may change.
_MOVING = {"tf_crop_and_resize", "tf_half_pixel_for_nn"}


@vjp_rule("Resize")
def resize(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the product with the transposed matrix of each axis, or the sum over copies."""
    if wanted != {0}:
        raise UnsupportedOpError(
            f"no derivative rule for Resize with respect to its region of interest or its scales "
            f"at node '{node.name}'; only the image may depend on parameters."
        )
    cropped = _coordinates(node) == "tf_crop_and_resize"
    if text(node, "mode", "nearest") != "nearest" or cropped:
        return {0: _by_matrices(b, node, g[0])}
    scales = _tiling(b, node)
    if not scales:
        return {0: rearranged(b, node, g[0], narrow=True)}
    mean = b.op("AveragePool", g[0], kernel_shape=scales, strides=scales)
    return {0: b.op("Mul", mean, b.scalar(prod(scales), node.inputs[0]))}


def _coordinates(node: Node) -> str:
    return text(node, "coordinate_transformation_mode", "half_pixel")


# -- nearest neighbours ----------------------------------------------------------------------------


def _tiling(b: VjpBuilder, node: Node) -> tuple[int, ...]:
    """Return the number of copies of a pixel along each spatial axis; empty for other modes."""
    name = node.operand(2)
    scales = b.graph.constants.get(name)
    rounding = text(node, "nearest_mode", "round_prefer_floor")
    if (
        scales is None
        or "axes" in node.attributes
        or not 3 <= scales.size <= 5
        or (_coordinates(node), rounding) not in _REPEATS
    ):
        return ()
    whole = scales.round()
    if (whole != scales).any() or (whole < 1).any() or (whole[:2] != 1).any():
        return ()
    return tuple(int(scale) for scale in whole[2:])


# -- any mode --------------------------------------------------------------------------------------


def _by_matrices(b: VjpBuilder, node: Node, g: str) -> str:
    """Write the product with the transposed matrices, the last axis first."""
    x = node.inputs[0]
    last = b.rank(x) - 1
    for axis in sorted(_resized(b, node), reverse=True):
        matrix = _matrix(b, node, axis)
        if axis == last:
            g = b.op("MatMul", g, b.forward("Transpose", matrix, perm=(1, 0)))
        else:
            # All later axes are merged, so that their sizes do not matter and products are large.
            columns = b.op("Reshape", g, b.constant([0] * (axis + 1) + [-1]))
            g = b.op("MatMul", matrix, columns)
    return b.reshape_like(g, x)


def _named_axes(b: VjpBuilder, node: Node) -> tuple[int, ...]:
    """Return the axes of scales, sizes and region, in their order."""
    rank = b.rank(node.inputs[0])
    return tuple(axis % rank for axis in integers(node, "axes", range(rank)))


def _resized(b: VjpBuilder, node: Node) -> tuple[int, ...]:
    """Return the axes that may change; an unchanged axis only costs a product."""
    x, y = node.inputs[0], node.outputs[0]
    named = _named_axes(b, node)
    scales = b.graph.constants.get(node.operand(2))
    if scales is not None and scales.shape == (len(named),) and _coordinates(node) not in _MOVING:
        return tuple(axis for axis, scale in zip(named, scales, strict=True) if scale != 1)
    if "axes" in node.attributes:
        return named
    # Batch and channels come first and do not change, unless they change in the sample run.
    first = 2 if b.rank(x) > 2 else 0
    pairs = zip(b.sample_shape(x), b.sample_shape(y), strict=True)
    return tuple(axis for axis, (old, new) in enumerate(pairs) if axis >= first or old != new)


def _matrix(b: VjpBuilder, node: Node, axis: int) -> str:
    """Write the transposed matrix of one axis, ``(old size, new size)``."""
    x, y = node.inputs[0], node.outputs[0]
    at = b.constant([axis])
    old, new = (b.forward("Gather", b.shape(name), at) for name in (x, y))
    square = b.forward("ConstantOfShape", b.forward("Concat", old, old, axis=0))
    identity = b.forward("EyeLike", square, dtype=FLOAT_CODES[b.dtype(x).name])
    if text(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        resized = _resized_whole(b, node, identity, axis)
    else:
        resized = _resized_alone(b, node, identity, axis)
    return b.forward("Reshape", resized, b.forward("Concat", old, new, axis=0))


def _resized_alone(b: VjpBuilder, node: Node, identity: str, axis: int) -> str:
    """Resize the identity matrix along one axis, as channels of images one pixel wide."""
    x, roi, scales, _ = (*node.inputs, "", "", "")[:4]
    place = b.constant([_named_axes(b, node).index(axis)])
    one, whole = b.constant([1]), b.constant([1], "float32")
    images = b.forward("Unsqueeze", identity, b.constant([0, 3]))
    region = target = size = ""
    if roi and _coordinates(node) == "tf_crop_and_resize":
        region = _region(b, node, roi, place)
    if scales and b.sample_shape(scales) != (0,):
        scale = b.forward("Gather", scales, place)
        target = b.forward("Concat", whole, whole, scale, whole, axis=0)
    else:
        at = b.constant([axis])
        sizes = (b.forward("Gather", b.shape(name), at) for name in (x, node.outputs[0]))
        size = b.forward("Concat", one, *sizes, one, axis=0)
    return b.repeat(_of_images(node), images, region, target, size)[0]


def _region(b: VjpBuilder, node: Node, roi: str, place: str) -> str:
    """Write a region of interest of four axes: one axis is resized, the others are whole."""
    ends = b.forward("Add", place, b.constant([len(_named_axes(b, node))]))
    begin, end = (b.forward("Gather", roi, at) for at in (place, ends))
    zeros, ones = (b.constant([n, n], b.dtype(roi).name) for n in (0, 1))
    zero, one = (b.constant([n], b.dtype(roi).name) for n in (0, 1))
    return b.forward("Concat", zeros, begin, zero, ones, end, one, axis=0)


def _of_images(node: Node) -> Node:
    """Return the same interpolation for images with all four axes."""
    whole = ("axes", "keep_aspect_ratio_policy")
    attributes = {name: value for name, value in node.attributes.items() if name not in whole}
    # Pixels outside the image are a constant, whose derivative is zero.
    return replace(node, attributes=attributes | {"extrapolation_value": 0.0})


def _resized_whole(b: VjpBuilder, node: Node, identity: str, axis: int) -> str:
    """Resize the identity matrix as images of full size, for scales that depend on all sizes."""
    x, rank, named = node.inputs[0], b.rank(node.inputs[0]), _named_axes(b, node)
    if "axes" not in node.attributes or 0 in named:
        raise UnsupportedOpError(
            f"no derivative rule for Resize with keep_aspect_ratio_policy over the first axis at "
            f"node '{node.name}'; name the spatial axes in its attribute 'axes'."
        )
    others = [a for a in range(1, rank) if a != axis]
    line = b.forward("Unsqueeze", identity, b.constant(others))
    one = b.constant([1])
    sizes = [b.forward("Gather", b.shape(x), b.constant([axis]))]
    for a in range(1, rank):
        sizes += [b.forward("Gather", b.shape(x), b.constant([a])) if a in named else one]
    images = b.forward("Expand", line, b.forward("Concat", *sizes, axis=0))
    resized = b.repeat(node, images, *node.inputs[1:])[0]
    ends = b.constant([0] * len(others)), b.constant([1] * len(others))
    return b.forward("Slice", resized, *ends, b.constant(others))
