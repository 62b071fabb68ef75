"""Derivatives of convolutions over one, two or three spatial axes.

``geometry`` and ``kernels`` describe the choice of forms and its measurements. Sizes of images are
dynamic. Shapes of kernels come from the sample run, because a weight that is computed from
parameters has the same shape in every batch.
"""

from dataclasses import replace

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.autodiff.rules.geometry import sliding, spread
from kfac_engine.autodiff.rules.kernels import kernel_cotangent
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.backend.window import SlidingWindow
from kfac_engine.graph.structure import Node

_LAST = -(2**63) + 1  # end of a backward slice that includes index zero


@vjp_rule("Conv")
def conv(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Write a convolution for image and kernel, and a sum over positions for the bias."""
    window = sliding(node, b.sample_shape(node.inputs[1])[2:])
    group = integer(node, "group", 1)
    gradients = {}
    if 0 in wanted:
        gradients[0] = _image(b, node, g[0], window, group)
    if 1 in wanted:
        gradients[1] = kernel_cotangent(b, node, g[0], window, group)
    if 2 in wanted:
        gradients[2] = b.op("ReduceSum", g[0], b.constant([0, *window.axes]), keepdims=0)
    return gradients


@vjp_rule("ConvTranspose")
def conv_transpose(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Write the adjoint Conv, in which the image replaces the cotangent of Conv."""
    x, weight = node.inputs[:2]
    window = sliding(node, b.sample_shape(weight)[2:])
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
        gradients[1] = kernel_cotangent(b, adjoint, x, window, group)
    return gradients


def _pads_itself(node: Node) -> bool:
    return text(node, "auto_pad", "NOTSET").startswith("SAME")


def _uncropped(b: VjpBuilder, node: Node, g: str, window: SlidingWindow) -> str:
    """Write the cotangent, padded to all pixels of the taps if the crop depends on its size."""
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


def _image(b: VjpBuilder, node: Node, g: str, window: SlidingWindow, group: int) -> str:
    """Write the cotangent of the image: a Conv with the reversed kernel, or a ConvTranspose."""
    x, weight = node.inputs[:2]
    begins = tuple(r - p for r, p in zip(window.reaches, window.begins, strict=True))
    ends = tuple(r - p for r, p in zip(window.reaches, window.ends, strict=True))
    few_groups = group > 1 and b.sample_shape(weight)[1] > 1
    if window.unit_strides and min(begins + ends) >= 0 and not few_groups:
        kernel = _transposed_kernel(b, weight, window, group)
        return b.op("Conv", g, kernel, pads=begins + ends, dilations=window.dilations, group=group)
    return spread(b, window, g, weight, x, node.outputs[0], group)


def _transposed_kernel(b: VjpBuilder, weight: str, window: SlidingWindow, group: int) -> str:
    """Write the kernel with exchanged channels and reversed spatial axes."""
    outs, ins = b.sample_shape(weight)[:2]
    spatial = window.axes
    kernel = weight
    if window.taps > 1:
        start, end, step = ([n] * len(spatial) for n in (-1, _LAST, -1))
        at = b.constant(spatial)
        kernel = b.op("Slice", kernel, b.constant(start), b.constant(end), at, b.constant(step))
    if group == 1:
        return b.op("Transpose", kernel, perm=(1, 0, *spatial))
    grouped = b.constant([group, outs // group, ins, *window.kernel])
    later = tuple(axis + 1 for axis in spatial)
    kernel = b.op("Transpose", b.op("Reshape", kernel, grouped), perm=(0, 2, 1, *later))
    return b.op("Reshape", kernel, b.constant([group * ins, outs // group, *window.kernel]))
