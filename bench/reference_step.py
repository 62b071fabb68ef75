"""The result of a step of K-FAC by definition: the truth of the suite ``step``.

Plain NumPy in float64 evaluates the operators of the file one by one, without the package's graphs,
derivatives and factors: forward, backward, second moments, inverses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kfac_engine._types import Array
from kfac_engine.bench.jobs import DAMPING, GRADIENT, NATURAL, STEPS, Run
from kfac_engine.bench.step_networks import NETWORKS, Network
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


def step(network: str, batch: int, kind: str) -> Run:
    """Return a function that computes gradients and the natural gradients of layers."""
    net = NETWORKS[network]()

    def run() -> dict[str, list[Array]]:
        tape = evaluate(net, net.inputs(batch)["x"])
        _, sums = differentiate(net, tape, net.targets(batch))
        count = net.targets(batch).size
        gradients = {name: sums[name] / count for name in net.compared}
        result = {GRADIENT: list(gradients.values())}
        if STEPS[kind]:
            natural = natural_gradients(net, tape, sums, gradients)
            result[NATURAL] = [natural[name] for name in net.preconditioned]
        return result

    return run


@dataclass(frozen=True, slots=True)
class Tape:
    """The record of an evaluation, for the backward pass.

    ``backward`` has each node with the function from its cotangent to those of its operands.
    """

    values: dict[str, Array]
    backward: list[tuple[Node, Backward]]


def evaluate(net: Network, x: Array, weights: Mapping[str, Array] | None = None) -> Tape:
    """Run a network in float64, with other weights than its own if they are given."""
    known = {**net.constants, **(weights or net.weights), "x": x}
    values = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in known.items()}
    backward = []
    for node in net.nodes:
        operands = [values[name] for name in node.inputs]
        values[node.outputs[0]], back = OPERATORS[node.op](node.attributes, *operands)
        backward.append((node, back))
    return Tape(values, backward)


def differentiate(net: Network, tape: Tape, targets: Array) -> tuple[float, dict[str, Array]]:
    """Differentiate the loss, summed over examples and positions."""
    z = tape.values[net.result]
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    hit = np.arange(z.shape[-1]) == targets[..., None]
    return -float(log_p[hit].sum()), propagate(tape, net.result, np.exp(log_p) - hit)


def propagate(tape: Tape, result: str, cotangent: Array) -> dict[str, Array]:
    """Return the derivatives of ``⟨cotangent, result⟩`` with respect to every value."""
    cotangents = {result: cotangent}
    for node, back in reversed(tape.backward):
        for name, term in zip(node.inputs, back(cotangents[node.outputs[0]]), strict=False):
            cotangents[name] = cotangents[name] + term if name in cotangents else term
    return cotangents


def natural_gradients(
    net: Network, tape: Tape, sums: Mapping[str, Array], gradients: Mapping[str, Array]
) -> dict[str, Array]:
    """Return ``c⁻¹ (A + λ_A)⁻¹ V (G + λ_G)⁻¹`` of each dense layer and convolution.

    ``G`` contains the mean over positions of the loss. ``sums`` are gradients of the loss summed
    over examples and positions, ``gradients`` those of the mean loss.

    Source: Martens & Grosse 2015, arXiv:1503.05671, section 6.3; Grosse & Martens 2016,
    arXiv:1602.01407.
    """
    natural = {}
    predictions = net.positions or 1
    for node, _ in tape.backward:
        weight = next((name for name in node.inputs if name.endswith(".weight")), "")
        if weight not in net.preconditioned:
            continue
        a, s = rows_of(node, tape.values[node.inputs[0]]), sums[node.outputs[0]]
        examples, W, bias = len(s), gradients[weight], f"{weight.removesuffix('.weight')}.bias"
        filters = W.ndim == 4
        ds = (np.moveaxis(s, 1, -1) if filters else s).reshape(len(a), -1)
        V = np.vstack([W.reshape(len(W), -1).T if filters else W, gradients[bias]])
        A = a.T @ a / len(a)
        G = ds.T @ ds / len(ds) / predictions
        root = np.sqrt(DAMPING / (len(a) / examples))
        pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
        left = np.linalg.solve(A + root * pi * np.eye(len(A)), V)
        U = np.linalg.solve(G + root / pi * np.eye(len(G)), left.T).T / (len(a) / examples)
        natural[weight] = U[:-1].T.reshape(W.shape) if filters else U[:-1]
        natural[bias] = U[-1]
    return natural
