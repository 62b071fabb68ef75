"""Activations of LSTM, GRU and RNN, which name them in an attribute."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isnan, nan
from typing import TypeAlias

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import number
from kfac_engine.graph.structure import Node

Activation: TypeAlias = Callable[[str], str]


def activations(b: LoweringBuilder, node: Node, names: tuple[str, ...]) -> tuple[Activation, ...]:
    """Functions that write an activation each.

    Args:
        b: Writes them.
        node: Its ``activation_alpha`` and ``activation_beta`` list the numbers of those that have
            one, in their order.
        names: As the node has them; upper and lower case are the same.

    Returns:
        One function for each name.

    Raises:
        UnsupportedOpError: A name is unknown, or a number without default is missing.
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
            raise b.refuse(node, f"it does not list the numbers of its activation '{name}'")
        functions.append(partial(write, b, node, *numbers))
    return tuple(functions)


def clipping(b: LoweringBuilder, node: Node) -> Activation:
    """Bounds a value by the node's ``clip``; hands it on where there is none."""
    bound = number(node, "clip", 0)
    if not bound:
        return lambda value: value
    low, high = (b.scalar(side, node.inputs[0]) for side in (-bound, bound))
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
    """``x`` above α, else zero."""
    above = b.op("Greater", x, b.scalar(alpha, node.inputs[0]))
    return b.op("Where", above, x, b.scalar(0, node.inputs[0]))


def _hard_sigmoid(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    return b.op("HardSigmoid", x, alpha=alpha, beta=beta)


def _affine(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    """``α x + β``."""
    slope, shift = (b.scalar(value, node.inputs[0]) for value in (alpha, beta))
    return b.op("Add", b.op("Mul", x, slope), shift)


def _scaled_tanh(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    """``α tanh(β x)``."""
    outer, inner = (b.scalar(value, node.inputs[0]) for value in (alpha, beta))
    return b.op("Mul", b.op("Tanh", b.op("Mul", x, inner)), outer)


# Writer, then the defaults of alpha and beta for those that have them. NaN where there is none that
# ONNX Runtime shares: without a number its ThresholdedRelu begins at 0, the specification's at 1.
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
