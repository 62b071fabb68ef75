"""Convolutions over one, two or three spatial axes.

Sizes of images stay open. Sizes of kernels are read from the sample run: a weight that is computed
from parameters has the same sides in every batch.
"""

from kfac_engine.autodiff.builder import Builder
from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
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


def _image(b: Builder, node: Node, g: str, window: Sliding, group: int) -> str:
    """Cotangent of the image."""
    # With unit strides it is a convolution with the kernel turned around, which ONNX Runtime
    # computes up to three times faster than ConvTranspose.
    x, weight = node.inputs[:2]
    begins = tuple(r - p for r, p in zip(window.reaches, window.begins, strict=True))
    ends = tuple(r - p for r, p in zip(window.reaches, window.ends, strict=True))
    if window.unit_strides and min(begins + ends) >= 0:
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
    """Cotangent of the kernel: a convolution of the image with the cotangent for a kernel."""
    # Examples take the place of input channels; strides and dilations change roles.
    x, weight = node.inputs[:2]
    pads = window.begins + window.ends
    spatial, axes = window.axes, b.constant(window.axes)
    image = x
    if window.same:
        sides = b.forward("Concat", *same_padding(b, window, x, node.outputs[0]), axis=0)[0]
        image = b.op("Pad", x, sides, "", axes)
    image = _examples_as_channels(b, image, x, b.sides(weight)[1], window, group)
    kernel = b.op("Transpose", g, perm=(1, 0, *spatial))
    taps = b.op(
        "Conv", image, kernel, pads=pads, group=group,
        strides=window.dilations, dilations=window.strides,
    )  # fmt: skip
    if any((s - 1) // d for s, d in zip(window.strides, window.dilations, strict=True)):
        # Pixels that no window reached look like further taps.
        none = b.constant([0] * len(spatial))
        taps = b.op("Slice", taps, none, b.constant(window.kernel), axes)
    return b.op("Transpose", taps, perm=(1, 0, *spatial))


def _examples_as_channels(
    b: Builder, image: str, x: str, ins: int, window: Sliding, group: int
) -> str:
    """``(n, group · ins, *pixels)`` to ``(ins, group · n, *pixels)``."""
    spatial = window.axes
    if group == 1:
        return b.op("Transpose", image, perm=(1, 0, *spatial))
    pixels = b.op("Shape", image, start=2)
    split = b.op("Concat", b.constant([0, group, ins]), pixels, axis=0)
    later = tuple(axis + 1 for axis in spatial)
    turned = b.op("Transpose", b.op("Reshape", image, split), perm=(2, 1, 0, *later))
    return b.op("Reshape", turned, b.op("Concat", b.constant([ins, -1]), pixels, axis=0))
