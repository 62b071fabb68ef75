"""Operators of the networks of the suite ``step`` with their derivatives, in NumPy."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kfac_engine._types import Array
from kfac_engine.graph.structure import Node

# From the cotangent of a result to the cotangents of the leading operands; integers have none.
Backward: TypeAlias = Callable[[Array], tuple[Array, ...]]
Attributes: TypeAlias = Mapping[str, Any]


def rows_of(node: Node, x: Array) -> Array:
    """Return the input rows of a dense layer or convolution, ``(rows, d_in + 1)``.

    Rows are examples and positions, and end with a one; patches have channels first.
    """
    if node.op == "Conv":
        x = _patches(x, node.attributes).reshape(-1, x.shape[1] * _taps(node.attributes))
    x = x.reshape(-1, x.shape[-1])
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def _patches(x: Array, attributes: Attributes) -> Array:
    """Return the windows of images, ``(n, oh, ow, channels, kh, kw)``, a view."""
    (top, left, bottom, right), (down, across) = attributes["pads"], attributes["strides"]
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    seen = sliding_window_view(padded, attributes["kernel_shape"], (2, 3))
    return seen[:, :, ::down, ::across].transpose(0, 2, 3, 1, 4, 5)


def _taps(attributes: Attributes) -> int:
    return int(np.prod(attributes["kernel_shape"]))


def _conv(attributes: Attributes, x: Array, w: Array, b: Array) -> tuple[Array, Backward]:
    patches = _patches(x, attributes)
    y = np.tensordot(patches, w, ((3, 4, 5), (1, 2, 3))) + b

    def back(g: Array) -> tuple[Array, ...]:
        rows = g.transpose(0, 2, 3, 1)
        dw = np.tensordot(rows, patches, ((0, 1, 2), (0, 1, 2)))
        pieces = np.tensordot(rows, w, ((3,), (0,))).transpose(0, 3, 4, 5, 1, 2)
        return _placed(pieces, x.shape, attributes), dw, g.sum((0, 2, 3))

    return y.transpose(0, 3, 1, 2), back


def _placed(pieces: Array, shape: tuple[int, ...], attributes: Attributes) -> Array:
    """Return patches ``(n, channels, kh, kw, oh, ow)`` added at their positions in the image."""
    (top, left, bottom, right), (down, across) = attributes["pads"], attributes["strides"]
    n, channels, height, width = shape
    padded = np.zeros((n, channels, height + top + bottom, width + left + right))
    _, _, kh, kw, oh, ow = pieces.shape
    for i in range(kh):
        for j in range(kw):
            into = padded[:, :, i : i + oh * down : down, j : j + ow * across : across]
            into += pieces[:, :, i, j]
    return padded[:, :, top : top + height, left : left + width]


def _matmul(attributes: Attributes, x: Array, w: Array) -> tuple[Array, Backward]:
    del attributes

    def back(g: Array) -> tuple[Array, ...]:
        return g @ w.swapaxes(-1, -2), _like(x.swapaxes(-1, -2) @ g, w)

    return x @ w, back


def _gemm(attributes: Attributes, x: Array, w: Array, b: Array) -> tuple[Array, Backward]:
    del attributes
    return x @ w + b, lambda g: (g @ w.T, x.T @ g, g.sum(0))


def _add(attributes: Attributes, x: Array, y: Array) -> tuple[Array, Backward]:
    del attributes
    return x + y, lambda g: (_like(g, x), _like(g, y))


def _mul(attributes: Attributes, x: Array, y: Array) -> tuple[Array, Backward]:
    del attributes
    return x * y, lambda g: (_like(g * y, x), _like(g * x, y))


def _like(g: Array, x: Array) -> Array:
    """Return a cotangent summed over the axes along which ``x`` was broadcast."""
    g = g.sum(tuple(range(g.ndim - x.ndim)))
    summed: Array = g.sum(tuple(i for i, side in enumerate(x.shape) if side == 1), keepdims=True)
    return summed


def _relu(attributes: Attributes, x: Array) -> tuple[Array, Backward]:
    del attributes
    return np.maximum(x, 0), lambda g: (g * (x > 0),)


def _softmax(attributes: Attributes, x: Array) -> tuple[Array, Backward]:
    axis = attributes["axis"]
    p = np.exp(x - x.max(axis, keepdims=True))
    p /= p.sum(axis, keepdims=True)
    return p, lambda g: (p * (g - (g * p).sum(axis, keepdims=True)),)


def _layer_norm(
    attributes: Attributes, x: Array, scale: Array, shift: Array
) -> tuple[Array, Backward]:
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + attributes["epsilon"])
    unit = centred / deviation

    def back(g: Array) -> tuple[Array, ...]:
        u = g * scale
        along = u.mean(-1, keepdims=True) + unit * (u * unit).mean(-1, keepdims=True)
        return (u - along) / deviation, _like(g * unit, scale), _like(g, shift)

    return unit * scale + shift, back


def _gather(attributes: Attributes, table: Array, indices: Array) -> tuple[Array, Backward]:
    del attributes

    def back(g: Array) -> tuple[Array, ...]:
        gradient = np.zeros_like(table)
        np.add.at(gradient, indices, g)
        return (gradient,)

    return table[indices], back


def _reshape(attributes: Attributes, x: Array, shape: Array) -> tuple[Array, Backward]:
    del attributes
    sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())]
    return x.reshape(sizes), lambda g: (g.reshape(x.shape),)


def _transpose(attributes: Attributes, x: Array) -> tuple[Array, Backward]:
    perm = attributes["perm"]
    return x.transpose(perm), lambda g: (g.transpose(np.argsort(perm)),)


def _mean(attributes: Attributes, x: Array) -> tuple[Array, Backward]:
    del attributes
    size = x.shape[2] * x.shape[3]
    return x.mean((2, 3), keepdims=True), lambda g: (np.broadcast_to(g / size, x.shape),)


def _flatten(attributes: Attributes, x: Array) -> tuple[Array, Backward]:
    del attributes
    return x.reshape(len(x), -1), lambda g: (g.reshape(x.shape),)


OPERATORS: Mapping[str, Callable[..., tuple[Array, Backward]]] = {
    "Add": _add,
    "Conv": _conv,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _mean,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "Mul": _mul,
    "Relu": _relu,
    "Reshape": _reshape,
    "Softmax": _softmax,
    "Transpose": _transpose,
}
