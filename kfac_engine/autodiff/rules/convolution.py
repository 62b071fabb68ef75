"""Differentiates convolutions over one, two or three spatial axes.

``geometry`` describes the choice of forms and its measurements. Sizes of images are dynamic. Shapes
of kernels come from the sample run, because a weight that is computed from parameters has the same
shape in every batch.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.autodiff.rules.geometry import same_padding, sliding, spread
from kfac_engine.autodiff.vjp_builder import KernelGradient, VjpBuilder
from kfac_engine.backend.window import SlidingWindow
from kfac_engine.graph.structure import Node

_LAST = -(2**63) + 1  # end of a backward slice that includes index zero


@vjp_rule("Conv")
def conv(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Write convolutions for the gradients of image and kernel, and a sum for the bias."""
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
    """Return the gradients by the adjoint Conv, which has the cotangent as its image."""
    x, weight = node.inputs[:2]
    window = sliding(node, b.sample_shape(weight)[2:])
    group = integer(node, "group", 1)
    gradients = {}
    if 2 in wanted:
        gradients[2] = b.op("ReduceSum", g[0], b.constant([0, *window.axes]), keepdims=0)
    image = g[0]
    if "output_shape" in node.attributes or text(node, "auto_pad", "").startswith("SAME"):
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


def _uncropped(b: VjpBuilder, node: Node, g: str, window: SlidingWindow) -> str:
    """Write the cotangent with zeros for the pixels that a ConvTranspose has cropped.

    The crop follows from the size of the output, as with ``auto_pad`` or ``output_shape``.
    """
    x, y = node.inputs[0], node.outputs[0]
    added = integers(node, "output_padding", (0,) * len(window.kernel))
    size = b.forward("Shape", y, start=2)
    steps = b.forward("Sub", b.forward("Shape", x, start=2), b.constant([1]))
    reached = b.forward("Mul", steps, b.constant(window.strides))
    reached = b.forward("Add", reached, b.constant([reach + 1 for reach in window.reaches]))
    missing = b.forward("Sub", reached, size)
    total = b.forward("Max", b.forward("Add", missing, b.constant(added)), b.constant([0]))
    begin = b.forward("Div", total, b.constant([2]))
    if text(node, "auto_pad", "NOTSET") != "SAME_UPPER":
        begin = b.forward("Sub", total, begin)
    pads = b.forward("Concat", begin, b.forward("Sub", missing, begin), axis=0)
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


# -- the cotangent of the kernel, from products of shifted operands --------------------------------
#
# For each tap, the cotangent of the kernel is the product of the cotangent and the pixels under the
# tap. Copying a slice for each tap takes longer than the product. Instead, convolutions with
# kernels of ones and zeros shift the operands, in all threads: the image along its last axes, and
# the cotangent in the opposite direction along the first axes. One product then contains every pair
# of shifts, and so every tap. With strides, or if the operands are smaller, only the image is
# shifted. On a CPU most of these products are computed outside of the graph
# (``_is_faster_outside``). Milliseconds of ONNX Runtime 1.31 on two threads:
#
# | images, kernel | shifted | ms | slices and products | convolution with the cotangent |
# |---|---|---|---|---|
# | 128 × 16 × 32 × 32, 3×3, 16 → 16 | both | 9.5 | 20.8 | 36.7 |
# | 128 × 64 × 8 × 8, 3×3, 64 → 64 | both | 6.2 | 9.7 | 15.6 |
# | 32 × 256 × 14 × 14, 3×3, 256 → 256 | both | 40.8 | 47.4 | 94.1 |
# | 128 × 3 × 32 × 32, 3×3, 3 → 16 | image | 3.1 | | 8.0 |
# | 32 × 64 × 56 × 56, 3×3, stride 2 | image | 22.5 | 69.8 | 50.1 |
# | 8 × 3 × 224 × 224, 7×7, stride 2, 3 → 64 | image | 24.4 | | 25.9 |
# | 8 × 3 × 224 × 224, 16×16, stride 16 | image | 5.2 | | 2.0 |
# | 32 × 256 × 56 × 56, 1×1, 256 → 64 | none | 19.3 | 27.5 | |

# ``backend.cpu.conv_weight_grad`` is faster than ONNX Runtime for kernels with at least two taps
# and at least these numbers of channels per group and of multiplications per example.
_LEAST_CHANNELS = 4
_LEAST_MULTIPLIED = 1e6

# Largest ratio of the sizes of shifted operands and operands, which bounds the memory.
_MOST_SHIFTS = 9


def kernel_cotangent(b: VjpBuilder, node: Node, g: str, window: SlidingWindow, group: int) -> str:
    """Write the gradient of a ``Conv`` kernel, from the gradient ``g`` of the result."""
    shifts = _shifts(b, node, window) if group == 1 else None
    if shifts is None:
        gradient = _as_kernel(b, node, g, window, group)
    else:
        gradient = _product_of_shifts(b, node, g, window, shifts)
    if _is_faster_outside(b, node, window, group):
        outs, ins = b.sample_shape(node.inputs[1])[:2]
        b.leaves[gradient] = KernelGradient(node.inputs[0], g, window, outs, ins)
    return gradient


def _is_faster_outside(b: VjpBuilder, node: Node, window: SlidingWindow, group: int) -> bool:
    """Return whether BLAS is faster than nodes of the graph for the sizes of the sample run."""
    weight = node.inputs[1]
    outs, ins = b.sample_shape(weight)[:2]
    multiplied = prod(b.sample_shape(weight)) * prod(b.sample_shape(node.outputs[0])[2:])
    return (
        window.taps > 1
        and min(outs // group, ins) >= _LEAST_CHANNELS
        and multiplied >= _LEAST_MULTIPLIED
        and b.dtype(weight) == np.float32
    )


@dataclass(frozen=True, slots=True)
class _Shifts:
    """The spatial axes along which the cotangent and the image are shifted."""

    cut: int  # number of leading spatial axes along which the cotangent is shifted
    written: int  # number of entries of both shifted operands for each position of the result


def _shifts(b: VjpBuilder, node: Node, window: SlidingWindow) -> _Shifts | None:
    """Return the division of the axes with the smallest operands; None if all are too large."""
    outs, ins = b.sample_shape(node.inputs[1])[:2]
    kernel, pads = window.kernel, (window.begins, window.ends)
    inside = all(p <= reach for ends in pads for p, reach in zip(ends, window.reaches, strict=True))
    divisible = window.unit_strides and inside and not window.same
    choices = [
        _Shifts(cut, ins * prod(kernel[cut:]) + outs * prod(kernel[:cut]))
        for cut in range(len(kernel) if divisible else 1)
    ]
    best = min(choices, key=lambda shifts: shifts.written)
    few = window.unit_strides or window.taps <= _MOST_SHIFTS
    return best if few and best.written <= _MOST_SHIFTS * (ins + outs) else None


def _product_of_shifts(
    b: VjpBuilder, node: Node, g: str, window: SlidingWindow, shifts: _Shifts
) -> str:
    """Write the product of the shifted operands over examples and positions, in kernel order."""
    x, weight, y = node.inputs[0], node.inputs[1], node.outputs[0]
    outs, ins, *kernel = b.sample_shape(weight)
    along_g, along_x = kernel[: shifts.cut], kernel[shifts.cut :]
    image = _padded(b, x, y, window) if window.same else x
    image = _shifted(b, image, weight, ins, _only_last(window, shifts.cut))
    g = _shifted(b, g, weight, outs, _against(window, shifts.cut), backwards=True)
    if window.taps * outs * ins <= shifts.written * prod(b.sample_shape(y)[2:]):
        # The products of single examples are smaller than their operands, so a batch of products is
        # summed without a transposition.
        rows = b.op("Reshape", g, b.constant([0, outs * prod(along_g), -1]))
        columns = b.op("Reshape", image, b.constant([0, ins * prod(along_x), -1]))
        each = b.op("MatMul", rows, b.op("Transpose", columns, perm=(0, 2, 1)))
        product = b.op("ReduceSum", each, b.constant([0]), keepdims=0)
    else:
        front = (1, 0, *window.axes)
        rows, columns = (
            b.op("Flatten", b.op("Transpose", value, perm=front), axis=1) for value in (g, image)
        )
        product = b.op("Gemm", rows, columns, transB=1)
    taps = b.op("Reshape", product, b.constant([outs, *along_g, ins, *along_x]))
    middle = 1 + len(along_g)
    order = 0, middle, *range(1, middle), *range(middle + 1, 2 + len(kernel))
    return b.op("Transpose", taps, perm=order) if along_g else taps


def _only_last(window: SlidingWindow, cut: int) -> SlidingWindow:
    """Return the window without its first ``cut`` axes."""
    none, ones = (0,) * cut, (1,) * cut
    return replace(
        window,
        kernel=ones + window.kernel[cut:],
        begins=none + window.begins[cut:],
        ends=none + window.ends[cut:],
        same="",
    )


def _against(window: SlidingWindow, cut: int) -> SlidingWindow:
    """Return the window that shifts a cotangent, in reverse, along the first ``cut`` axes.

    ``window`` has unit strides and a padding of at most the reach of the kernel. The result is as
    long as the image along these axes. Its padding is the reach of the kernel minus the padding of
    the image.
    """
    rest = len(window.kernel) - cut
    begins, ends = (
        tuple(reach - pad for reach, pad in zip(window.reaches[:cut], pads[:cut], strict=True))
        for pads in (window.begins, window.ends)
    )
    return replace(
        window,
        kernel=window.kernel[:cut] + (1,) * rest,
        strides=(1,) * (cut + rest),
        begins=begins + (0,) * rest,
        ends=ends + (0,) * rest,
        same="",
    )


def _shifted(
    b: VjpBuilder,
    value: str,
    like: str,
    channels: int,
    window: SlidingWindow,
    *,
    backwards: bool = False,
) -> str:
    """Write the pixels under each tap of a window as channels.

    The result is ``(n, channels · taps, *positions)``; ``value`` is ``(n, channels,
    *spatial_shape)`` and has the element type of the forward value ``like``. ``backwards`` reverses
    the order of the taps.
    """
    if window.taps == 1 and window.unit_strides and not any(window.begins + window.ends):
        return value
    taps = np.eye(window.taps, dtype=b.dtype(like))[:: -1 if backwards else 1]
    kernel = np.tile(taps, (channels, 1)).reshape(-1, 1, *window.kernel)
    return b.op(
        "Conv", value, b.constant(kernel), group=channels, strides=window.strides,
        dilations=window.dilations, pads=window.begins + window.ends,
    )  # fmt: skip


def _as_kernel(b: VjpBuilder, node: Node, g: str, window: SlidingWindow, group: int) -> str:
    """Write a convolution of the image with the cotangent as kernel."""
    # Examples become input channels, and strides and dilations are exchanged.
    x, weight = node.inputs[:2]
    spatial = window.axes
    image = _padded(b, x, node.outputs[0], window)
    image = _examples_as_channels(b, image, b.sample_shape(weight)[1], window, group)
    kernel = b.op("Transpose", g, perm=(1, 0, *spatial))
    taps = b.op(
        "Conv", image, kernel, group=group, strides=window.dilations, dilations=window.strides
    )
    if any((s - 1) // d for s, d in zip(window.strides, window.dilations, strict=True)):
        # Pixels that no window reaches would give further taps, which are removed.
        none = b.constant([0] * len(spatial))
        taps = b.op("Slice", taps, none, b.constant(window.kernel), b.constant(spatial))
    return b.op("Transpose", taps, perm=(1, 0, *spatial))


def _padded(b: VjpBuilder, x: str, y: str, window: SlidingWindow) -> str:
    """Write the image with explicit padding."""
    pads = b.constant(window.begins + window.ends)
    if window.same:
        pads = b.forward("Concat", *same_padding(b, window, x, y), axis=0)
    elif not any(window.begins + window.ends):
        return x
    return b.pad(x, pads, b.constant(window.axes), 2 + len(window.axes))


def _examples_as_channels(
    b: VjpBuilder, image: str, ins: int, window: SlidingWindow, group: int
) -> str:
    """Write ``(n, group · ins, *pixels)`` as ``(ins, group · n, *pixels)``."""
    spatial = window.axes
    if group == 1:
        return b.op("Transpose", image, perm=(1, 0, *spatial))
    pixels = b.op("Shape", image, start=2)
    split = b.op("Concat", b.constant([0, group, ins]), pixels, axis=0)
    later = tuple(axis + 1 for axis in spatial)
    grouped = b.op("Transpose", b.op("Reshape", image, split), perm=(2, 1, 0, *later))
    return b.op("Reshape", grouped, b.op("Concat", b.constant([ins, -1]), pixels, axis=0))
