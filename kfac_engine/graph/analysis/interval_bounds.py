"""Computes bounds of the entries of a value for all inputs, by interval arithmetic."""

from collections.abc import Callable, Mapping
from math import erf, exp, inf, isnan, tanh
from typing import TypeAlias

from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.graph.structure import MOVES, Graph, Node

# Lower and upper bound.
Interval: TypeAlias = tuple[float, float]
_Known: TypeAlias = Callable[[str], Interval]
_Rule: TypeAlias = Callable[[Node, _Known], Interval]

_ANY: Interval = (-inf, inf)


def bounds(graph: Graph, value: str) -> Interval:
    """Return the lower and upper bound of the entries of a floating-point value.

    A bound is infinite where the operators imply none.
    """
    known: dict[str, Interval] = {}

    def interval(name: str) -> Interval:
        array = graph.constants.get(name)
        if array is None or array.dtype.kind not in "fiub" or not array.size:
            return known.get(name, _ANY)
        return float(array.min()), float(array.max())

    for node in SubGraph(graph, [value]).nodes:
        rule = None if node.domain else _RULES.get(node.op)
        if rule is not None:
            result = rule(node, interval)
            sound = not any(map(isnan, result))
            results = node.outputs if node.op == "Split" else node.outputs[:1]
            known.update(dict.fromkeys(results, result if sound else _ANY))
    return interval(value)


# -- private ---------------------------------------------------------------------------------------


def _operand(node: Node, known: _Known) -> Interval:
    """Return the interval of the first operand, for results that are its entries or their means."""
    return known(node.inputs[0])


def _hull(node: Node, known: _Known) -> Interval:
    """Return the hull of all intervals, for results that are entries of operands or their means."""
    operands = [known(name) for name in node.inputs]
    return min(low for low, _ in operands), max(high for _, high in operands)


def _padded(node: Node, known: _Known) -> Interval:
    """Return the interval of the operand and zero, for results that are means with zeros."""
    low, high = known(node.inputs[0])
    return min(low, 0), max(high, 0)


def _chosen(node: Node, known: _Known) -> Interval:
    (a, b), (c, d) = map(known, node.inputs[1:])
    return min(a, c), max(b, d)


def _rising(function: Callable[[float], float]) -> _Rule:
    """Return the rule of a nondecreasing function."""

    def rule(node: Node, known: _Known) -> Interval:
        low, high = known(node.inputs[0])
        return function(low), function(high)

    return rule


def _clip(node: Node, known: _Known) -> Interval:
    low, high = known(node.inputs[0])
    least, most = (*(known(name) if name else _ANY for name in node.inputs[1:]), _ANY, _ANY)[:2]
    bottom = max(low, least[0])
    top = min(high, most[1])
    return min(bottom, most[1]), max(top, least[0])


def _extreme(choose: Callable[..., float]) -> _Rule:
    def rule(node: Node, known: _Known) -> Interval:
        lows, highs = zip(*map(known, node.inputs), strict=True)
        return choose(lows), choose(highs)

    return rule


def _add(node: Node, known: _Known) -> Interval:
    (a, b), (c, d) = map(known, node.inputs)
    return a + c, b + d


def _sub(node: Node, known: _Known) -> Interval:
    (a, b), (c, d) = map(known, node.inputs)
    return a - d, b - c


def _neg(node: Node, known: _Known) -> Interval:
    low, high = known(node.inputs[0])
    return -high, -low


def _mul(node: Node, known: _Known) -> Interval:
    first, second = map(known, node.inputs)
    products = [x * y for x in first for y in second]
    return _ANY if any(map(isnan, products)) else (min(products), max(products))


def _div(node: Node, known: _Known) -> Interval:
    first, (low, high) = map(known, node.inputs)
    if low <= 0 <= high:
        return _ANY
    quotients = [x / y for x in first for y in (low, high)]
    return _ANY if any(map(isnan, quotients)) else (min(quotients), max(quotients))


def _product(node: Node, known: _Known) -> Interval:
    low, high = known(node.inputs[0])
    return (0, 1) if low >= 0 and high <= 1 else _ANY


def _exp(x: float) -> float:
    return exp(x) if x < 88 else inf  # exp(88) overflows in float32


def _sigmoid(x: float) -> float:
    return 0.5 + 0.5 * tanh(x / 2)


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys((*MOVES, "Expand", "Tile"), _operand),
    **dict.fromkeys(("ReduceMean", "ReduceMax", "ReduceMin"), _operand),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "MaxPool"), _operand),
    "AveragePool": _padded,
    **dict.fromkeys(("Concat", "Mean"), _hull),
    "Where": _chosen,
    "Clip": _clip,
    "Max": _extreme(max),
    "Min": _extreme(min),
    **dict.fromkeys(("Softmax", "HardSigmoid"), lambda node, known: (0, 1)),
    "Sigmoid": _rising(_sigmoid),
    "Tanh": _rising(tanh),
    "Erf": _rising(erf),
    "Exp": _rising(_exp),
    "Relu": _rising(lambda x: max(x, 0.0)),
    "Add": _add,
    "Sub": _sub,
    "Neg": _neg,
    "Mul": _mul,
    "Div": _div,
    "ReduceProd": _product,
}
