"""Differentiates the discrete Fourier transform.

A complex number is a pair of real numbers. The adjoint of a complex matrix is then its conjugate
transpose, so the adjoint of the transform is the inverse transform times the number of points. A
one-sided transform omits the half of a spectrum that follows from the other half.
"""

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.structure import Node


@vjp_rule("DFT")
def dft(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Write the transform in the other direction, cropped or padded to the signal length."""
    axis = _axis(b, node)
    onesided, inverse = (integer(node, name, 0) for name in ("onesided", "inverse"))
    if onesided and inverse:
        return {0: _real_result(b, node, g[0], axis)}
    x, length = node.inputs[0], node.operand(1)
    spectrum, points = g[0], _side(b, x, axis)
    if length:
        points = b.forward("Reshape", length, b.constant([1]))
    if onesided:
        spectrum = _fitted(b, spectrum, _side(b, node.outputs[0], axis), points, (axis, b.rank(x)))
    back = _transformed(b, node, spectrum, axis, 1 - inverse)
    signal = b.op("Div" if inverse else "Mul", back, _float(b, points, x))
    if b.sample_shape(x)[-1] == 1:
        signal = b.op("Slice", signal, b.constant([0]), b.constant([1]), b.constant([-1]))
    if length:
        signal = _fitted(b, signal, points, _side(b, x, axis), (axis, b.rank(x)))
    return {0: signal}


def _real_result(b: VjpBuilder, node: Node, g: str, axis: int) -> str:
    """Write the adjoint of a transform from half a spectrum to a real signal."""
    x, y = node.inputs[0], node.outputs[0]
    inputs, outputs = (b.sample_shape(name)[axis] for name in (x, y))
    if inputs > outputs // 2 + 1:
        raise UnsupportedOpError(
            f"DFT at node '{node.name}' has {inputs} input frequencies, but needs only "
            f"{outputs // 2 + 1} for {outputs} output points. Slice the spectrum first."
        )
    one, two, points = b.constant([1]), b.constant([2]), _side(b, y, axis)
    half = b.forward("Add", b.forward("Div", points, two), one)
    last = b.forward("Reshape", half, b.constant([], "int64"))
    numbers = b.indices(last)
    opposite = b.forward("Mod", b.forward("Sub", points, numbers), points)
    alone = b.forward("Equal", numbers, opposite)
    counts = b.forward("Where", alone, one, two)
    weights = b.forward("Div", _float(b, counts, x), _float(b, points, x))
    shape = b.constant([-1] + [1] * (b.rank(x) - 1 - axis))
    spectrum = _transformed(b, node, g, axis, 0)
    weighted = b.op("Mul", spectrum, b.forward("Reshape", weights, shape))
    return _fitted(b, weighted, half, _side(b, x, axis), (axis, b.rank(x)))


def _axis(b: VjpBuilder, node: Node) -> int:
    """Return the axis of the signal, an attribute or, since operator set 20, an operand."""
    rank = b.rank(node.inputs[0])
    if b.graph.opset < 20:
        return integer(node, "axis", 1) % rank
    name = node.operand(2)
    if name and name not in b.graph.constants:
        raise UnsupportedOpError(
            f"no derivative rule for DFT over an axis that is computed at node '{node.name}'; "
            f"make '{name}' a constant."
        )
    return int(b.graph.constants[name]) % rank if name else rank - 2


def _transformed(b: VjpBuilder, node: Node, signal: str, axis: int, inverse: int) -> str:
    """Write the transform of ``signal``, one-sided if ``node`` converts a spectrum to reals."""
    half = integer(node, "onesided", 0) * integer(node, "inverse", 0)
    if b.graph.opset < 20:
        return b.op("DFT", signal, axis=axis, inverse=inverse, onesided=half)
    at = b.constant(np.array(axis))
    return b.op("DFT", signal, "", at, inverse=inverse, onesided=half)


def _side(b: VjpBuilder, name: str, axis: int) -> str:
    return b.forward("Gather", b.shape(name), b.constant([axis]))


def _float(b: VjpBuilder, value: str, like: str) -> str:
    return b.forward("Cast", value, to=FLOAT_CODES[b.dtype(like).name])


def _fitted(b: VjpBuilder, value: str, old: str, new: str, place: tuple[int, int]) -> str:
    """Write ``value`` cropped or padded from ``old`` to ``new`` entries along an axis."""
    axis, rank = place
    more = b.forward("Sub", new, old)
    pads = b.forward("Concat", b.constant([0]), more, axis=0)
    return b.pad(value, pads, b.constant([axis]), rank)
