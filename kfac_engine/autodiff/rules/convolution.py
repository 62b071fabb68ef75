"""Convolutions over one, two or three spatial axes.

Which form is chosen where, and what it was measured against, is in ``geometry``.
Sizes of images stay open. Sizes of kernels are read from the sample run: a weight that is computed
from parameters has the same sides in every batch.
"""

from dataclasses import replace

from numpy import ndindex

from kfac_engine.autodiff.builder import Builder
from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.autodiff.rules.geometry import Sliding, same_padding, sliding, spread
from kfac_engine.graph.structure import Node

_LAST = -(2**63) + 1  # where a backward slice ends that takes in index zero


@vjp_rule("Conv")
def conv(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """A convolution for each operand; the bias gets the sum over examples and positions."""
    window = sliding(node, b.sides(node.inputs[1])[2:])
    group = integer(node, "group", 1)
    gradients = {}
    if 0 in wanted:
        gradients[0] = _image(b, node, g[0], window, group)
    if 1 in wanted:
        gradients[1] = _weight(b, node, g[0], window, group)
    if 2 in wanted:
        gradients[2] = b.op("ReduceSum", g[0], b.constant([0, *window.axes]), keepdims=0)
    return gradients


@vjp_rule("ConvTranspose")
def conv_transpose(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Conv and ConvTranspose are adjoint: the image takes the place of Conv's cotangent."""
    x, weight = node.inputs[:2]
    window = sliding(node, b.sides(weight)[2:])
    group = integer(node, "group", 1)
    gradients = {}
    if 2 in wanted:
        gradients[2] = b.op("ReduceSum", g[0], b.constant([0, *window.axes]), keepdims=0)
    image = g[0]
    if "output_shape" in node.attributes or _pads_itself(node):
        none = (0,) * len(window.kernel)
        window = replace(window, begins=none, ends=none, same="")
        image = _uncropped(b, node, image, window)
    if 0 in wanted:
        gradients[0] = b.op(
            "Conv", image, weight, group=group, pads=window.begins + window.ends,
            strides=window.strides, dilations=window.dilations,
        )  # fmt: skip
    if 1 in wanted:
        adjoint = replace(node, inputs=(image, weight), outputs=(x,))
        gradients[1] = _weight(b, adjoint, x, window, group)
    return gradients


def _pads_itself(node: Node) -> bool:
    return text(node, "auto_pad", "NOTSET").startswith("SAME")


def _uncropped(b: Builder, node: Node, g: str, window: Sliding) -> str:
    """The cotangent of all that the taps reach, where cropping follows from the result's size."""
    x, y = node.inputs[0], node.outputs[0]
    added = integers(node, "output_padding", (0,) * len(window.kernel))
    size = b.forward("Shape", y, start=2)[0]
    steps = b.forward("Sub", b.forward("Shape", x, start=2)[0], b.constant([1]))[0]
    reached = b.forward("Mul", steps, b.constant(window.strides))[0]
    reached = b.forward("Add", reached, b.constant([reach + 1 for reach in window.reaches]))[0]
    missing = b.forward("Sub", reached, size)[0]
    total = b.forward("Max", b.forward("Add", missing, b.constant(added))[0], b.constant([0]))[0]
    begin = b.forward("Div", total, b.constant([2]))[0]
    if text(node, "auto_pad", "NOTSET") != "SAME_UPPER":
        begin = b.forward("Sub", total, begin)[0]
    pads = b.forward("Concat", begin, b.forward("Sub", missing, begin)[0], axis=0)[0]
    return b.pad(g, pads, b.constant(window.axes), 2 + len(window.kernel))


def _image(b: Builder, node: Node, g: str, window: Sliding, group: int) -> str:
    """Cotangent of the image: a convolution with the kernel turned around, or ConvTranspose."""
    x, weight = node.inputs[:2]
    begins = tuple(r - p for r, p in zip(window.reaches, window.begins, strict=True))
    ends = tuple(r - p for r, p in zip(window.reaches, window.ends, strict=True))
    few_groups = group > 1 and b.sides(weight)[1] > 1
    if window.unit_strides and min(begins + ends) >= 0 and not few_groups:
        turned = _turned(b, weight, window, group)
        return b.op("Conv", g, turned, pads=begins + ends, dilations=window.dilations, group=group)
    return spread(b, window, g, weight, x, node.outputs[0], group)


def _turned(b: Builder, weight: str, window: Sliding, group: int) -> str:
    """The kernel with input and output channels exchanged and every spatial axis reversed."""
    outs, ins = b.sides(weight)[:2]
    spatial = window.axes
    turned = weight
    if window.taps > 1:
        start, end, step = ([n] * len(spatial) for n in (-1, _LAST, -1))
        at = b.constant(spatial)
        turned = b.op("Slice", turned, b.constant(start), b.constant(end), at, b.constant(step))
    if group == 1:
        return b.op("Transpose", turned, perm=(1, 0, *spatial))
    grouped = b.constant([group, outs // group, ins, *window.kernel])
    later = tuple(axis + 1 for axis in spatial)
    turned = b.op("Transpose", b.op("Reshape", turned, grouped), perm=(0, 2, 1, *later))
    return b.op("Reshape", turned, b.constant([group * ins, outs // group, *window.kernel]))


def _weight(b: Builder, node: Node, g: str, window: Sliding, group: int) -> str:
    """Cotangent of the kernel, in the faster of two forms."""
    channels = b.sides(node.inputs[1])[1]
    # Measured with 64 channels and 3×3 taps: product by product takes half the time, with 1×1 taps
    # an eighth. With few channels the products are thin; with many taps the nodes become many.
    if group == 1 and window.taps <= min(_MOST_PRODUCTS, channels):
        return _tap_by_tap(b, node, g, window)
    return _all_taps(b, node, g, window, group)


_MOST_PRODUCTS = 9


def _tap_by_tap(b: Builder, node: Node, g: str, window: Sliding) -> str:
    """For each tap the product of the cotangent with the pixels under that tap."""
    x, weight, y = node.inputs[0], node.inputs[1], node.outputs[0]
    front = (1, 0, *window.axes)
    image = b.op("Transpose", _padded(b, x, y, window), perm=front)
    outs = b.op("Flatten", b.op("Transpose", g, perm=front), axis=1)
    axes, step, one = b.constant(window.axes), b.constant(window.strides), b.constant([1])
    last = b.forward("Sub", b.forward("Shape", y, start=2)[0], one)[0]
    behind = b.forward("Add", b.forward("Mul", last, step)[0], one)[0]
    products = []
    for tap in ndindex(*window.kernel):
        seen, rank = image, len(tap)
        if window.taps > 1 or not window.unit_strides:
            offset = b.constant([u * d for u, d in zip(tap, window.dilations, strict=True)])
            end = b.forward("Add", behind, offset)[0]
            seen = b.op("Slice", image, offset, end, axes, step)
        product = b.op("Gemm", outs, b.op("Flatten", seen, axis=1), transB=1)
        products.append(b.op("Unsqueeze", product, b.constant(range(2, 2 + rank))))
    taps = b.op("Concat", *products, axis=2) if len(products) > 1 else products[0]
    return b.reshape_like(taps, weight)


def _all_taps(b: Builder, node: Node, g: str, window: Sliding, group: int) -> str:
    """A convolution of the image whose kernel is the cotangent."""
    # Examples take the place of input channels; strides and dilations change roles.
    x, weight = node.inputs[:2]
    spatial = window.axes
    image = _padded(b, x, node.outputs[0], window)
    image = _examples_as_channels(b, image, b.sides(weight)[1], window, group)
    kernel = b.op("Transpose", g, perm=(1, 0, *spatial))
    taps = b.op(
        "Conv", image, kernel, group=group, strides=window.dilations, dilations=window.strides
    )
    if any((s - 1) // d for s, d in zip(window.strides, window.dilations, strict=True)):
        # Pixels that no window reached look like further taps.
        none = b.constant([0] * len(spatial))
        taps = b.op("Slice", taps, none, b.constant(window.kernel), b.constant(spatial))
    return b.op("Transpose", taps, perm=(1, 0, *spatial))


def _padded(b: Builder, x: str, y: str, window: Sliding) -> str:
    """The image with its padding."""
    pads = b.constant(window.begins + window.ends)
    if window.same:
        pads = b.forward("Concat", *same_padding(b, window, x, y), axis=0)[0]
    elif not any(window.begins + window.ends):
        return x
    return b.pad(x, pads, b.constant(window.axes), 2 + len(window.axes))


def _examples_as_channels(b: Builder, image: str, ins: int, window: Sliding, group: int) -> str:
    """``(n, group · ins, *pixels)`` to ``(ins, group · n, *pixels)``."""
    spatial = window.axes
    if group == 1:
        return b.op("Transpose", image, perm=(1, 0, *spatial))
    pixels = b.op("Shape", image, start=2)
    split = b.op("Concat", b.constant([0, group, ins]), pixels, axis=0)
    later = tuple(axis + 1 for axis in spatial)
    turned = b.op("Transpose", b.op("Reshape", image, split), perm=(2, 1, 0, *later))
    return b.op("Reshape", turned, b.op("Concat", b.constant([ins, -1]), pixels, axis=0))
