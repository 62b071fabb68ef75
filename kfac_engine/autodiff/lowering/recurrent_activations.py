"""Writes the activations of LSTM, GRU and RNN."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isnan, nan
from typing import TypeAlias

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import number
from kfac_engine.graph.structure import Node

Activation: TypeAlias = Callable[[str], str]


def activations(b: LoweringBuilder, node: Node, names: tuple[str, ...]) -> tuple[Activation, ...]:
    """Return functions that write activations.

    Args:
        b: Receives the nodes.
        node: Node with the parameters of activations in ``activation_alpha`` and
            ``activation_beta``.
        names: Names of activations in the node; case is ignored.

    Returns:
        One function for each name.

    Raises:
        UnsupportedOpError: A name is unknown, or a parameter without default is missing.
    """
    alphas, betas = (_listed(node, f"activation_{key}") for key in ("alpha", "beta"))
    functions: list[Activation] = []
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            raise b.refuse(node, f"it has the unknown activation '{name}'")
        write, *defaults = _ACTIVATIONS[name.lower()]
        numbers = [
            next(listed, default)
            for listed, default in zip((alphas, betas), defaults, strict=False)
        ]
        if any(map(isnan, numbers)):
            raise b.refuse(node, f"it does not list the parameters of its activation '{name}'")
        functions.append(partial(write, b, node, *numbers))
    return tuple(functions)


def clipping(b: LoweringBuilder, node: Node) -> Activation:
    """Return a function that clips values by the attribute ``clip``; the identity without it."""
    bound = number(node, "clip", 0)
    if not bound:
        return lambda value: value
    low, high = (b.scalar(limit, node.inputs[0]) for limit in (-bound, bound))
    return lambda value: b.op("Clip", value, low, high)


def _listed(node: Node, name: str) -> Iterator[float]:
    values = node.attributes.get(name, ())
    assert isinstance(values, tuple)
    return map(float, values)


def _plain(op: str) -> Callable[[LoweringBuilder, Node, str], str]:
    return lambda b, node, x: b.op(op, x)


def _leaky(b: LoweringBuilder, node: Node, alpha: float, x: str) -> str:
    return b.op("LeakyRelu", x, alpha=alpha)


def _elu(b: LoweringBuilder, node: Node, alpha: float, x: str) -> str:
    return b.op("Elu", x, alpha=alpha)


def _thresholded(b: LoweringBuilder, node: Node, alpha: float, x: str) -> str:
    """Write the nodes of ThresholdedRelu: ``x`` where ``x > α``, else zero."""
    above = b.op("Greater", x, b.scalar(alpha, node.inputs[0]))
    return b.op("Where", above, x, b.scalar(0, node.inputs[0]))


def _hard_sigmoid(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    return b.op("HardSigmoid", x, alpha=alpha, beta=beta)


def _affine(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    """Write the nodes of ``α x + β``."""
    slope, shift = (b.scalar(value, node.inputs[0]) for value in (alpha, beta))
    return b.op("Add", b.op("Mul", x, slope), shift)


def _scaled_tanh(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    """Write the nodes of ``α tanh(β x)``."""
    outer, inner = (b.scalar(value, node.inputs[0]) for value in (alpha, beta))
    return b.op("Mul", b.op("Tanh", b.op("Mul", x, inner)), outer)


# A function and the defaults of alpha and beta. A default is NaN if ONNX Runtime and the
# specification differ: the default threshold of ThresholdedRelu is 0 in ONNX Runtime and 1 in ONNX.
_Row: TypeAlias = tuple[Callable[..., str], *tuple[float, ...]]
_ACTIVATIONS: Mapping[str, _Row] = {
    "relu": (_plain("Relu"),),
    "tanh": (_plain("Tanh"),),
    "sigmoid": (_plain("Sigmoid"),),
    "softsign": (_plain("Softsign"),),
    "softplus": (_plain("Softplus"),),
    "leakyrelu": (_leaky, 0.01),
    "thresholdedrelu": (_thresholded, nan),
    "elu": (_elu, 1.0),
    "hardsigmoid": (_hard_sigmoid, 0.2, 0.5),
    "affine": (_affine, nan, nan),
    "scaledtanh": (_scaled_tanh, nan, nan),
}
