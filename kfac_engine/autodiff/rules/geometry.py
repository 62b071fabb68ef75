"""Describes the windows of convolutions and pools, and adds windows to pixels (the adjoint).

Several graphs compute the same cotangent. The table lists the chosen forms, with milliseconds of
ONNX Runtime 1.31 on one thread. If not stated otherwise, they are for 16 images of 28·28 pixels.

| operator | form | ms | instead of | ms |
|---|---|---|---|---|
| Conv 1×1, unit strides, 64 → 128 | Conv, kernel transposed | 1.6 | ConvTranspose | 2.1 |
| Conv 3×3, unit strides, 64 → 64 | Conv, kernel reversed | 8.4 | ConvTranspose | 7.4 |
| the same, 4 images of 56·56 pixels | | 13.1 | | 16.6 |
| Conv 3×3, depthwise, 96 | Conv, kernel reversed | 2.6 | ConvTranspose | 3.1 |
| Conv 3×3, 8 groups, 64 → 64 | ConvTranspose | 2.6 | Conv, kernel reversed | 7.6 |
| Conv, strided | ConvTranspose | | Conv of a cotangent with zeros between | |
| MaxPool in tiles | comparison with copied maxima | 2.3 | indices | 4.6 |
| MaxPool 3×3, stride 2, 8 images of 64·112·112 | indices | 58 | a comparison for each tap | |
| AveragePool 2×2 in tiles, 32 images of 64 | copies | 0.5 | ConvTranspose | 1.3 |
| AveragePool 3×3, unit strides, 32 images of 64 | AveragePool | 1.7 | ConvTranspose | 4.3 |
| AveragePool 3×3, stride 2, 32 images of 64 | ConvTranspose | 2.7 | a matrix for each axis | 1.1 |

The matrices of the last row are slower than ConvTranspose for large images, because their time is
cubic in the image size. The comparison of maxima was measured with 32 images of 32 channels.
"""

from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.backend.window import SlidingWindow, split_padding
from kfac_engine.graph.structure import Node


def sliding(node: Node, kernel: tuple[int, ...]) -> SlidingWindow:
    """Return the window that the attributes of a convolution or pool describe.

    The padding is explicit if it does not depend on the image.
    """
    ones = (1,) * len(kernel)
    strides = integers(node, "strides", ones)
    dilations = integers(node, "dilations", ones)
    pads = integers(node, "pads", (0,) * 2 * len(kernel))
    same = text(node, "auto_pad", "NOTSET")
    window = SlidingWindow(
        kernel,
        strides,
        dilations,
        begins=pads[: len(kernel)],
        ends=pads[len(kernel) :],
        same=same if same.startswith("SAME") else "",
        ceil_mode=bool(integer(node, "ceil_mode", 0)),
    )
    return _resolved(window) if window.same and window.unit_strides else window


def _resolved(window: SlidingWindow) -> SlidingWindow:
    """Return a window of unit strides whose padding for SAME is explicit."""
    begins, ends = split_padding(window.reaches, window.same)
    return SlidingWindow(
        window.kernel, window.strides, window.dilations, begins, ends, "", window.ceil_mode
    )


def same_padding(b: VjpBuilder, window: SlidingWindow, x: str, y: str) -> tuple[str, str]:
    """Write the run-time padding of SAME, by which the windows of ``y`` exceed the image ``x``.

    Both values are of the forward graph. The padding before and after the pixels is int64, with a
    size for each spatial axis.
    """
    one, two, zero = b.constant([1]), b.constant([2]), b.constant([0])
    last = b.forward("Sub", b.forward("Shape", y, start=2), one)
    last = b.forward("Mul", last, b.constant(window.strides))
    seen = b.forward("Add", last, b.constant([reach + 1 for reach in window.reaches]))
    out = b.forward("Sub", seen, b.forward("Shape", x, start=2))
    total = b.forward("Max", out, zero)
    less = b.forward("Div", total, two)
    more = b.forward("Sub", total, less)
    return (less, more) if window.same == "SAME_UPPER" else (more, less)


def spread(
    b: VjpBuilder, window: SlidingWindow, g: str, weight: str, x: str, y: str, group: int = 1
) -> str:
    """Write the adjoint of a convolution, which adds the cotangent of each window to its pixels.

    The cotangent ``g`` of the windows is ``(n, d_out, *positions)``, the weight ``(d_out, d_in /
    group, *kernel)``, and the result ``(n, d_in, *pixels)``. ``x`` and ``y`` are forward values
    with the spatial sizes of the image and of the windows.
    """
    none = (0,) * len(window.kernel)
    exact = window.unit_strides and not window.ceil_mode
    # On a GPU, ONNX Runtime runs a ConvTranspose with unequal padding on the CPU. Rows before the
    # first pixel are therefore cropped, as those after the last one.
    seen = b.op(
        "ConvTranspose", g, weight, group=group,
        pads=window.begins + window.ends if exact else 2 * none,
        strides=window.strides, dilations=window.dilations,
    )  # fmt: skip
    if exact:
        return seen
    # The windows may end before or after the last pixel, so the result is cropped to the image and
    # padded with zeros.
    pixels, axes = b.forward("Shape", x, start=2), b.constant(window.axes)
    if window.same or any(window.begins + window.ends) or window.ceil_mode:
        begin = same_padding(b, window, x, y)[0] if window.same else b.constant(window.begins)
        seen = b.op("Slice", seen, begin, b.forward("Add", begin, pixels), axes)
    unseen = any(s - 1 > end for s, end in zip(window.strides, window.ends, strict=True))
    return _filled(b, seen, pixels, axes, none) if unseen else seen


def _filled(b: VjpBuilder, seen: str, pixels: str, axes: str, none: tuple[int, ...]) -> str:
    missing = b.op("Sub", pixels, b.op("Shape", seen, start=2))
    pads = b.op("Concat", b.constant(none), missing, axis=0)
    return b.pad(seen, pads, axes, 2 + len(none))
