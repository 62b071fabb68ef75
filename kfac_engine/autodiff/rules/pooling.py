"""Differentiates pooling over one, two or three spatial axes."""

from dataclasses import replace

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.autodiff.rules.geometry import sliding, spread
from kfac_engine.autodiff.rules.indexing import added
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.backend.window import SlidingWindow
from kfac_engine.errors import ModelError, UnsupportedOpError
from kfac_engine.graph.structure import Node


@vjp_rule("MaxPool")
def max_pool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the sum of cotangents at largest pixels; equal pixels of a tile share a cotangent."""
    window = sliding(node, integers(node, "kernel_shape", ()))
    compares = _tiles(window)
    return {0: _compared(b, node, g[0], window) if compares else _by_index(b, node, g[0])}


def _by_index(b: VjpBuilder, node: Node, g: str) -> str:
    x = node.inputs[0]
    # In the default storage order, indices count the pixels of the whole batch, row by row.
    geometry = {k: v for k, v in node.attributes.items() if k != "storage_order"}
    winners = b.repeat(replace(node, attributes=geometry), x, outputs=2)[1]
    return added(b, x, winners, g)


def _compared(b: VjpBuilder, node: Node, g: str, window: SlidingWindow) -> str:
    """Write the cotangent by a comparison of each pixel with the maximum of its tile."""
    _refuse_larger(b, node, window)
    # For 2×2 tiles of 32 images of 32·28·28 pixels, forward and backward pass take 2.3 ms in this
    # form, and 4.6 ms with indices.
    x, y = node.inputs[0], node.outputs[0]
    won = b.cast_like(b.op("Equal", x, _tiled(b, y, x, window)), x)
    mean = b.op("AveragePool", won, kernel_shape=window.kernel, strides=window.strides)
    winners = b.op("Mul", mean, b.scalar(window.taps, x))
    return b.op("Mul", won, _tiled(b, b.op("Div", g, winners), x, window))


def _tiled(b: VjpBuilder, value: str, x: str, window: SlidingWindow) -> str:
    """Write each entry on all pixels of its tile, and zero on pixels outside of all tiles."""
    scales = b.constant(np.array([1, 1, *window.kernel], dtype="float32"))
    tiles = b.op(
        "Resize", value, "", scales, mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    rest = b.op("Sub", b.forward("Shape", x, start=2), b.op("Shape", tiles, start=2))
    pads = b.op("Concat", b.constant([0] * len(window.kernel)), rest, axis=0)
    return b.pad(tiles, pads, b.constant(window.axes), b.rank(x))


@vjp_rule("AveragePool")
def average_pool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent of each window, divided among its pixels."""
    x, y = node.inputs[0], node.outputs[0]
    window = sliding(node, integers(node, "kernel_shape", ()))
    _refuse_misplaced(node, window)
    return {0: _shared(b, b.op("Mul", g[0], _weight_of_pixels(b, node, window)), x, y, window)}


@vjp_rule("LpPool")
def lp_pool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangents times the derivative of each window's norm."""
    x, y = node.inputs[0], node.outputs[0]
    window = sliding(node, integers(node, "kernel_shape", ()))
    _refuse_misplaced(node, window)
    if not window.padded:
        _refuse_larger(b, node, window)
    share = _shared(b, _over_norm(b, node, g[0]), x, y, window)
    return {0: b.op("Mul", share, _signed_power(b, node))}


@vjp_rule("GlobalLpPool")
def global_lp_pool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times the derivative of the norm."""
    return {0: b.op("Mul", _over_norm(b, node, g[0]), _signed_power(b, node))}


def _over_norm(b: VjpBuilder, node: Node, g: str) -> str:
    """Write ``g · y^(1−p)``, with zero at the kink of the norm, where all pixels are zero."""
    y = node.outputs[0]
    nonzero = b.op("Greater", y, b.scalar(0, y))
    norm = b.op("Where", nonzero, y, b.scalar(1, y))
    share = b.op("Mul", g, b.op("Pow", norm, b.scalar(1 - integer(node, "p", 2), y)))
    return b.op("Where", nonzero, share, b.scalar(0, y))


def _signed_power(b: VjpBuilder, node: Node) -> str:
    """Write ``sign(x) · |x|^(p−1)``."""
    x = node.inputs[0]
    power = b.op("Pow", b.op("Abs", x), b.scalar(integer(node, "p", 2) - 1, x))
    return b.op("Mul", b.op("Sign", x), power)


def _shared(b: VjpBuilder, g: str, x: str, y: str, window: SlidingWindow) -> str:
    """Write the sum of the cotangents of all windows of ``y`` at their pixels of ``x``."""
    if _tiles(window):
        return _tiled(b, g, x, window)
    if _covers(b, x, y, window):
        return b.op("Expand", g, b.forward("Shape", x))
    if window.unit_strides and max(window.dilations) == 1:
        begins, ends = (
            tuple(reach - pad for reach, pad in zip(window.reaches, pads, strict=True))
            for pads in (window.begins, window.ends)
        )
        mean = b.op(
            "AveragePool", g, kernel_shape=window.kernel, pads=begins + ends, count_include_pad=1
        )
        return b.op("Mul", mean, b.scalar(window.taps, x))
    # Channels become examples, so that one kernel of ones is correct for any number of channels.
    positions = b.forward("Concat", b.constant([-1, 1]), b.forward("Shape", y, start=2), axis=0)
    images = b.op("Reshape", g, positions)
    return b.reshape_like(spread(b, window, images, _kernel_of_ones(b, x, window), x, y), x)


def _tiles(window: SlidingWindow) -> bool:
    """Return whether the windows are adjacent tiles."""
    return window.kernel == window.strides and not window.padded and max(window.dilations) == 1


def _covers(b: VjpBuilder, x: str, y: str, window: SlidingWindow) -> bool:
    """Return whether a single window covers the image and extends beyond it.

    Models use a window of thousands of pixels to average images of any size. On an image that is
    larger than the window, ``ceil_mode`` adds windows, and the cotangent cannot be expanded to the
    shape of the image.
    """
    padded = any(window.begins + window.ends) or window.same
    images, windows = (b.sample_shape(value)[2:] for value in (x, y))
    return (
        window.ceil_mode
        and not padded
        and max(*window.dilations, *windows) == 1
        and all(size <= k for size, k in zip(images, window.kernel, strict=True))
    )


def _refuse_misplaced(node: Node, window: SlidingWindow) -> None:
    """Refuse windows whose padding in ONNX Runtime differs from the definition of ONNX."""
    # ONNX Runtime ignores dilations in the padding, and starts inside the image if strides skip
    # pixels.
    apart = any(s > k for s, k in zip(window.strides, window.kernel, strict=True))
    if text(node, "auto_pad", "").startswith("SAME") and (apart or max(window.dilations) > 1):
        raise UnsupportedOpError(
            f"{node.op} at node '{node.name}' pads by auto_pad with dilations {window.dilations}, "
            f"strides {window.strides} and kernel {window.kernel}, for which the padding of ONNX "
            f"Runtime differs from that of ONNX; state the padding as pads."
        )


def _refuse_larger(b: VjpBuilder, node: Node, window: SlidingWindow) -> None:
    """Raise an error for an unpadded window that is larger than the image of the sample run."""
    # ONNX defines no output for such a window. With strides above one, ONNX Runtime pools the
    # available pixels with other weights. With unit strides it fails.
    spatial_shape = b.sample_shape(node.inputs[0])[2:]
    if any(size <= reach for size, reach in zip(spatial_shape, window.reaches, strict=True)):
        raise ModelError(
            f"{node.op} at node '{node.name}' has a window of {window.kernel} pixels on an image "
            f"of {spatial_shape}, for which ONNX defines no output; pass sample_inputs of the real "
            f"size, or larger images."
        )


def _weight_of_pixels(b: VjpBuilder, node: Node, window: SlidingWindow) -> str:
    """Write the weight of a pixel in each average: one divided by the number of counted pixels."""
    # At the border the weight depends on count_include_pad, ceil_mode and the operator version. The
    # pool of an image of ones is the number of pixels times the weight.
    x, y = node.inputs[0], node.outputs[0]
    if not window.padded:
        _refuse_larger(b, node, window)
        return b.scalar(1 / window.taps, x)
    shape = b.forward("Concat", b.constant([1, 1]), b.forward("Shape", x, start=2), axis=0)
    ones = b.forward("Expand", b.scalar(1, x), shape)
    total = b.repeat(node, ones)[0]
    pixels = _count_pixels(b, ones, _kernel_of_ones(b, x, window), window)
    if window.ceil_mode:
        none = b.constant([0] * len(window.kernel))
        positions = b.forward("Shape", y, start=2)
        pixels = b.forward("Slice", pixels, none, positions, b.constant(window.axes))
    return b.forward("Div", total, pixels)


def _count_pixels(b: VjpBuilder, ones: str, kernel: str, window: SlidingWindow) -> str:
    """Write the number of pixels of each window, without surplus windows of ceil_mode."""
    if window.same:
        return b.forward(
            "Conv", ones, kernel, auto_pad=window.same,
            strides=window.strides, dilations=window.dilations,
        )  # fmt: skip
    further = [s - 1 if window.ceil_mode else 0 for s in window.strides]
    ends = tuple(end + more for end, more in zip(window.ends, further, strict=True))
    return b.forward(
        "Conv", ones, kernel, pads=window.begins + ends,
        strides=window.strides, dilations=window.dilations,
    )  # fmt: skip


def _kernel_of_ones(b: VjpBuilder, x: str, window: SlidingWindow) -> str:
    return b.constant(np.ones((1, 1, *window.kernel), dtype=b.dtype(x)))


@vjp_rule("GlobalAveragePool")
def global_average_pool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by the number of pixels."""
    x = node.inputs[0]
    share = b.op("Div", g[0], b.count(x, range(2, b.rank(x))))
    return {0: b.op("Expand", share, b.shape(x))}


@vjp_rule("GlobalMaxPool")
def global_max_pool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return each cotangent, divided among the largest pixels."""
    x, y = node.inputs[0], node.outputs[0]
    winners = b.cast_like(b.op("Equal", x, y), x)
    spatial = b.constant(range(2, b.rank(x)))
    share = b.op("Div", g[0], b.op("ReduceSum", winners, spatial, keepdims=1))
    return {0: b.op("Mul", winners, share)}


# -- back to images --------------------------------------------------------------------------------


@vjp_rule("MaxUnpool")
def max_unpool(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return, for each value, the cotangent of its pixel; zero for overwritten values."""
    x, indices, y = *node.inputs[:2], node.outputs[0]
    everything = b.constant([-1])
    places = b.forward("Reshape", indices, everything)
    count = b.forward("ReduceProd", b.shape(indices), keepdims=0)
    numbers = b.indices(count)
    pixels = b.forward("ReduceProd", b.shape(y), keepdims=1)
    nobody = b.forward("Expand", b.constant([-1]), pixels)
    owners = b.forward("ScatterElements", nobody, places, numbers, axis=0)
    owns = b.forward("Equal", b.forward("GatherElements", owners, places, axis=0), numbers)
    picked = b.op("GatherElements", b.op("Reshape", g[0], everything), places, axis=0)
    return {0: b.reshape_like(b.op("Mul", picked, b.cast_like(owns, x)), x)}


@vjp_rule("Col2Im")
def col2im(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the patches of the cotangent, by a convolution with one channel for each tap."""
    x, _, block = node.inputs
    if block not in b.graph.constants:
        raise UnsupportedOpError(
            f"no derivative rule for Col2Im with blocks of a computed shape at node "
            f"'{node.name}'; make '{block}' a constant."
        )
    kernel = tuple(int(size) for size in b.graph.constants[block])
    window = sliding(node, kernel)
    taps = np.eye(window.taps, dtype=b.dtype(x)).reshape(window.taps, 1, *kernel)
    pixels = b.forward("Shape", node.outputs[0], start=2)
    shape = b.forward("Concat", b.constant([-1, 1]), pixels, axis=0)
    patches = b.op(
        "Conv", b.op("Reshape", g[0], shape), b.constant(taps),
        pads=window.begins + window.ends, strides=window.strides, dilations=window.dilations,
    )  # fmt: skip
    return {0: b.reshape_like(patches, x)}
