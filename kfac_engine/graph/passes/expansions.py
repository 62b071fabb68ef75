"""Raises a ModelError for models that would exceed a limit when they run.

A function that calls another function twice doubles the number of nodes, and a trip count or a size
is one number. A damaged or hostile file of a few bytes could therefore use all memory, or run for
years.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from graphlib import CycleError, TopologicalSorter
from math import inf, prod
from typing import TypeAlias

import numpy as np
import onnx

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.passes.constants import constant_value
from kfac_engine.graph.passes.order import all_nodes, bodies_of, label_of
from kfac_engine.graph.tensors import MOST_ENTRIES, to_array

# Largest number of nodes of a model after its functions are inlined.
MOST_NODES = 1_000_000
# Largest number of iterations of a Loop with a constant trip count, times those of the loops around
# it.
MOST_TRIPS = 1_000_000

# The largest number of axes of a value.
_MOST_AXES = 16

# Domain, name and overload of a function.
_Key: TypeAlias = tuple[str, str, str]


def check_functions(model: onnx.ModelProto) -> None:
    """Raise a ModelError if a function calls itself or expands to too many nodes."""
    nodes = {(f.domain, f.name, f.overload): list(all_nodes(f.node)) for f in model.functions}
    calls = {key: {_key(node) for node in inside} for key, inside in nodes.items()}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as failure:
        names = " → ".join(f"'{name}'" for _, name, _ in failure.args[1])
        raise ModelError(f"the model's functions call themselves: {names}.") from None
    sizes: dict[_Key, int] = {}
    for key in (key for key in order if key in nodes):
        sizes[key] = _inlined(nodes[key], sizes)
        _refuse_many(sizes[key], f"function '{key[1]}'")
    _refuse_many(_inlined(all_nodes(model.graph.node), sizes), "the graph")


def _key(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload


def _inlined(nodes: Iterable[onnx.NodeProto], sizes: Mapping[_Key, int]) -> int:
    return sum(sizes.get(_key(node), 1) for node in nodes)


def _refuse_many(count: int, what: str) -> None:
    if count > MOST_NODES:
        raise ModelError(
            f"{what} of the model has {count:.3g} nodes after its functions are inlined; the limit "
            f"is {MOST_NODES}."
        )


def check_sizes(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> None:
    """Raise a ModelError for loops and values whose constant sizes exceed a limit.

    The graph has lifted constants; its bodies are checked, too.
    """
    _check_nodes(graph.node, dict(constants), 1)


def _check_nodes(
    nodes: Iterable[onnx.NodeProto], constants: MutableMapping[str, Array], trips: float
) -> None:
    for node in nodes:
        known = [constants.get(name) for name in node.input]
        count = _ENTRIES[node.op_type](known) if node.op_type in _ENTRIES and not node.domain else 0
        if count > MOST_ENTRIES:
            raise ModelError(
                f"the {label_of(node)} computes {count:.3g} entries, {4 * count / 1e9:.3g} GB in "
                f"float32; the limit is {MOST_ENTRIES}."
            )
        inside = trips * (_trips(node, constants) if _is_loop(node) else 1)
        if inside > MOST_TRIPS:
            raise ModelError(
                f"the body of the {label_of(node)} runs {inside:.3g} times; the limit is "
                f"{MOST_TRIPS} iterations."
            )
        for body in bodies_of(node):
            _check_nodes(body.node, ChainMap(_own_numbers(body), constants), inside)


def _is_loop(node: onnx.NodeProto) -> bool:
    return node.op_type == "Loop" and not node.domain and len(node.input) > 1


def _trips(node: onnx.NodeProto, constants: Mapping[str, Array]) -> float:
    """Return the constant trip count of a Loop; 1 if a condition may end the loop earlier."""
    body = next((entry.g for entry in node.attribute if entry.name == "body"), onnx.GraphProto())
    if not _has_fixed_condition(body, constants):
        return 1
    limit, going = node.input[:2]
    if not limit:
        always = not going or (going in constants and bool(constants[going].all()))
        return inf if always else 1
    return max(1.0, float(constants[limit].max(initial=1))) if limit in constants else 1


def _has_fixed_condition(body: onnx.GraphProto, constants: Mapping[str, Array]) -> bool:
    """Return whether the condition of a Loop never changes, or is constant."""
    if len(body.input) < 2 or not body.output:
        return False
    fixed = {body.input[1].name, *(entry.name for entry in body.initializer)}
    # The body is not checked yet. One pass in its order ends, even if the body has a cycle.
    for node in body.node:
        copied = node.input if node.op_type == "Identity" else ()
        if node.op_type == "Constant" or any(n in fixed or n in constants for n in copied):
            fixed.update(node.output)
    condition = body.output[0].name
    return condition in fixed or condition in constants


def _own_numbers(body: onnx.GraphProto) -> dict[str, Array]:
    """Return the small constants of a body: trip counts and sizes."""
    small = (entry for entry in body.initializer if prod(entry.dims) <= _MOST_AXES)
    constants = {entry.name: to_array(entry) for entry in small}
    nodes = (node for node in body.node if node.op_type == "Constant" and len(node.output) == 1)
    values = ((node.output[0], constant_value(node, {})) for node in nodes)
    return constants | {name: array for name, array in values if array is not None}


# Values of the operands of a node; None for computed operands.
_Known: TypeAlias = Sequence[Array | None]


def _product(index: int) -> Callable[[_Known], float]:
    """Return a function that multiplies the entries of an operand, each at least one."""

    def count(known: _Known) -> float:
        shape = known[index] if len(known) > index else None
        return 1.0 if shape is None else prod(max(1.0, float(size)) for size in shape.flat)

    return count


def _range(known: _Known) -> float:
    operands = [float(a.item()) for a in known if a is not None and a.size == 1]
    if len(operands) != 3 or not operands[2]:
        return 1.0
    start, limit, step = operands
    return (limit - start) / step


def _padded(known: _Known) -> float:
    pads = known[1] if len(known) > 1 else None
    if pads is None or pads.size % 2:
        return 1.0
    sizes = pads.reshape(2, -1).astype(np.float64).sum(axis=0)
    return float(np.maximum(sizes, 1).prod())


# Functions that return the least number of entries of the result, by operator.
_ENTRIES: Mapping[str, Callable[[_Known], float]] = {
    "ConstantOfShape": _product(0),
    "Expand": _product(1),
    "OneHot": _product(1),
    "Pad": _padded,
    "Range": _range,
    "Resize": lambda known: max(_product(2)(known), _product(3)(known)),
    "Tile": _product(1),
    "Upsample": _product(1),
}
