"""Operators that ``onnx.reference`` 1.23 gets wrong, written down from their definitions.

Slow and plain, in the type of the operands: truth for the derivative rules.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

from tests.autodiff.definitions_sampling import AffineGrid, DeformConv, GridSample, MaxRoiPool


class ConvTranspose(OpRun):
    """The reference takes wrong slices of the weight when channels are grouped."""

    op_domain = ""

    def _run(
        self,
        x: NDArray,
        weight: NDArray,
        bias: NDArray | None = None,
        *,
        dilations: list[int] | None = None,
        group: int = 1,
        output_padding: list[int] | None = None,
        pads: list[int] | None = None,
        strides: list[int] | None = None,
        auto_pad: str = "NOTSET",
        output_shape: list[int] | None = None,
        **_: object,
    ) -> tuple[NDArray]:
        kernel, axes = weight.shape[2:], weight.ndim - 2
        dilations, strides = dilations or [1] * axes, strides or [1] * axes
        pads, added = pads or [0] * 2 * axes, output_padding or [0] * axes
        ins, outs = x.shape[1] // group, weight.shape[1]
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        sides = [
            (n - 1) * s + r + a
            for n, s, r, a in zip(x.shape[2:], strides, reach, added, strict=True)
        ]
        y = np.zeros((len(x), outs * group, *sides), x.dtype)
        for g, position, tap in product(range(group), np.ndindex(x.shape[2:]), np.ndindex(*kernel)):
            pixel = tuple(
                o * s + u * d for o, s, u, d in zip(position, strides, tap, dilations, strict=True)
            )
            from_, to = slice(g * ins, (g + 1) * ins), slice(g * outs, (g + 1) * outs)
            y[(slice(None), to, *pixel)] += (
                x[(slice(None), from_, *position)] @ weight[(from_, slice(None), *tap)]
            )
        if auto_pad.startswith("SAME"):
            # ONNX Runtime returns what there is where less than a stride is reached.
            whole = (n * s for n, s in zip(x.shape[2:], strides, strict=True))
            output_shape = output_shape or list(map(min, whole, sides))
        if output_shape:
            total = [max(side - out, 0) for side, out in zip(sides, output_shape, strict=True)]
            half = [n // 2 for n in total]
            begin = half if auto_pad == "SAME_UPPER" else [n - n // 2 for n in total]
            pads = [*begin, *(n - before for n, before in zip(total, begin, strict=True))]
            further = [max(out - side, 0) for side, out in zip(sides, output_shape, strict=True)]
            y = np.pad(y, [(0, 0), (0, 0), *((0, n) for n in further)])
            sides = [side + n for side, n in zip(sides, further, strict=True)]
        crop = (slice(pads[i], sides[i] - pads[i + axes]) for i in range(axes))
        shift = 0 if bias is None else bias.reshape(-1, *[1] * axes)
        return (y[(slice(None), slice(None), *crop)] + shift,)


class _Pool(OpRun):
    """What the pools share: which pixels a window sees."""

    def _windows(
        self, x: NDArray, attributes: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[int, ...], tuple[NDArray, ...], int]]:
        """Index of a result, the pixels of its window, and how many of them are in the padding."""
        kernel = attributes["kernel_shape"]
        axes = len(kernel)
        pads = attributes.get("pads") or [0] * 2 * axes
        seen = [
            _seen_pixels(
                x.shape[2 + i],
                (kernel[i], (attributes.get("dilations") or [1] * axes)[i]),
                (attributes.get("strides") or [1] * axes)[i],
                (pads[i], pads[i + axes]),
                attributes["auto_pad"],
                attributes["ceil_mode"],
            )
            for i in range(axes)
        ]
        for index in np.ndindex(*x.shape[:2], *map(len, seen)):
            along = [seen[axis][o] for axis, o in enumerate(index[2:])]
            pixels = [[pixel for pixel in line if pixel is not None] for line in along]
            padding = prod(map(len, along)) - prod(map(len, pixels))
            yield index, np.ix_(*pixels), padding


def _seen_pixels(
    side: int,
    taps: tuple[int, int],
    stride: int,
    pads: tuple[int, int],
    auto_pad: str,
    ceil_mode: int,
) -> list[list[int | None]]:
    """For each position of a window along an axis, the pixels it sees; None is padding."""
    (k, d), (begin, end) = taps, pads
    reach = (k - 1) * d + 1
    if auto_pad.startswith("SAME"):
        total = max((-(-side // stride) - 1) * stride + reach - side, 0)
        less, more = total // 2, total - total // 2
        begin, end = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
    free = side + begin + end - reach
    count = (-(-free // stride) if ceil_mode else free // stride) + 1
    # A window that would start in the padding at the end is dropped.
    if ceil_mode and (count - 1) * stride >= side + begin:
        count -= 1
    starts = (o * stride - begin for o in range(count))
    windows = (range(start, min(start + reach, side + end), d) for start in starts)
    return [[pixel if 0 <= pixel < side else None for pixel in window] for window in windows]


class MaxPool(_Pool):
    """The reference gets Indices wrong where strides are missing, and SAME_LOWER."""

    op_domain = ""

    def _run(self, x: NDArray, **attributes: object) -> tuple[NDArray, ...]:
        numbers = np.arange(x.size).reshape(x.shape)
        found = {}
        for index, pixels, _ in self._windows(x, attributes):
            image = index[:2]
            found[index] = numbers[image][pixels].ravel()[x[image][pixels].argmax()]
        where = np.reshape(list(found.values()), np.add(max(found), 1))
        y = x.ravel()[where]
        return (y, where) if len(self.onnx_node.output) > 1 else (y,)


class AveragePool(_Pool):
    """The reference centres the image in the windows that ceil_mode adds."""

    op_domain = ""

    def _run(self, x: NDArray, **attributes: object) -> tuple[NDArray]:
        found = {}
        for index, pixels, padding in self._windows(x, attributes):
            seen = x[index[:2]][pixels]
            found[index] = seen.sum() / (seen.size + padding * attributes["count_include_pad"])
        return (np.reshape(list(found.values()), np.add(max(found), 1)),)


class LpPool(_Pool):
    """The reference goes through averages, with the padding among what it averages."""

    op_domain = ""

    def _run(self, x: NDArray, **attributes: Any) -> tuple[NDArray]:
        p = attributes["p"]
        found = {}
        for index, pixels, _ in self._windows(x, attributes):
            found[index] = (np.abs(x[index[:2]][pixels]) ** p).sum() ** (1 / p)
        return (np.reshape(list(found.values()), np.add(max(found), 1)),)


class GlobalLpPool(OpRun):
    """The reference has none."""

    op_domain = ""

    def _run(self, x: NDArray, p: int) -> tuple[NDArray]:
        sums = (np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
        return (sums ** (1 / p),)


class GlobalMaxPool(OpRun):
    """The reference takes any image for two-dimensional."""

    op_domain = ""

    def _run(self, x: NDArray) -> tuple[NDArray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GroupNormalization(OpRun):
    """The reference rounds to float32 on the way, whatever the type of the operands."""

    op_domain = ""

    def _run(
        self,
        x: NDArray,
        scale: NDArray,
        shift: NDArray,
        *,
        epsilon: float,
        num_groups: int,
        **_: object,
    ) -> tuple[NDArray]:
        y, size = np.zeros_like(x), x.shape[1] // num_groups
        rows = range(x.shape[1]) if len(scale) == x.shape[1] else np.arange(x.shape[1]) // size
        for example, channel in np.ndindex(x.shape[:2]):
            group = channel // size
            seen = x[example, group * size : (group + 1) * size]
            h = (x[example, channel] - seen.mean()) / np.sqrt(seen.var() + epsilon)
            y[example, channel] = scale[rows[channel]] * h + shift[rows[channel]]
        return (y,)


class LRN(OpRun):
    """The reference takes the number of examples for that of channels."""

    op_domain = ""

    def _run(
        self, x: NDArray, *, alpha: float, beta: float, bias: float, size: int
    ) -> tuple[NDArray]:
        y = np.zeros_like(x)
        for channel in range(x.shape[1]):
            first, last = channel - (size - 1) // 2, channel + size // 2
            squares = (x[:, max(first, 0) : last + 1] ** 2).sum(axis=1)
            y[:, channel] = x[:, channel] / (bias + alpha / size * squares) ** beta
        return (y,)


class LpNormalization(OpRun):
    """The reference adds up signed elements where p is one."""

    op_domain = ""

    def _run(self, x: NDArray, *, axis: int, p: int) -> tuple[NDArray]:
        norm = (np.abs(x) ** p).sum(axis=axis, keepdims=True) ** (1 / p)
        return (x / np.where(norm == 0, 1, norm),)


class Unique(OpRun):
    """The reference sorts against the request where only values are asked for."""

    op_domain = ""

    def _run(self, x: NDArray, *, axis: int | None = None, sorted: int = 1) -> tuple[NDArray, ...]:
        values = x.reshape(-1) if axis is None else x
        _, *indices = np.unique(values, True, True, True, axis=axis)
        first, inverse, counts = indices
        order = np.arange(len(first)) if sorted else np.argsort(first)
        rank = np.argsort(order)
        y = np.take(values, first[order], axis=0 if axis is None else axis)
        return (y, first[order], rank[inverse.reshape(-1)], counts[order])[
            : len(self.onnx_node.output)
        ]


class GatherElements(OpRun):
    """The reference wants indices with the sides of the data."""

    op_domain = ""

    def _run(self, x: NDArray, indices: NDArray, axis: int) -> tuple[NDArray]:
        y = np.zeros(indices.shape, x.dtype)
        for index in np.ndindex(indices.shape):
            source = list(index)
            source[axis] = indices[index]
            y[index] = x[tuple(source)]
        return (y,)


class Pad(OpRun):
    """The reference refuses negative padding."""

    op_domain = ""

    def _run(
        self,
        x: NDArray,
        pads: NDArray,
        value: NDArray | None = None,
        axes: NDArray | None = None,
        mode: str = "constant",
    ) -> tuple[NDArray]:
        begins, ends = np.split(pads, 2)
        widths, crop = [(0, 0)] * x.ndim, [slice(None)] * x.ndim
        for axis, begin, end in zip(
            range(x.ndim) if axes is None else axes, begins, ends, strict=True
        ):
            widths[axis] = (max(begin, 0), max(end, 0))
            crop[axis] = slice(max(-begin, 0), x.shape[axis] - max(-end, 0))
        kind = {} if value is None else {"constant_values": value.item()}
        return (np.pad(x[tuple(crop)], widths, mode, **(kind if mode == "constant" else {})),)


DEFINITIONS = (
    LpNormalization, Unique,
    AffineGrid, AveragePool, ConvTranspose, DeformConv, GridSample, MaxPool, GlobalLpPool,
    GlobalMaxPool,
    GroupNormalization, LRN, LpPool, MaxRoiPool, GatherElements, Pad,
)  # fmt: skip
