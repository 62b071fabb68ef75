"""Adds casts between half-precision inputs and outputs of a graph and its float32 nodes."""

from collections.abc import Iterable, Mapping

from onnx import TensorProto, helper

from kfac_engine._types import DType
from kfac_engine.graph.names import claim
from kfac_engine.graph.passes.bodies import renamed
from kfac_engine.graph.structure import Node


def with_borders(
    nodes: Iterable[Node], operands: Mapping[str, DType], results: Mapping[str, DType]
) -> list[Node]:
    """Return the nodes of a graph with casts before and after them.

    Args:
        nodes: Nodes in topological order; they compute in float32.
        operands: Element types of inputs and constants with another type, by name.
        results: Element types of results with another type, by name.

    Returns:
        The casts, and the nodes with new names for the float32 values.
    """
    nodes = tuple(nodes)
    used = {name for node in nodes for name in (*node.inputs, *node.outputs, *node.captures)}
    names = {name: claim(f"{name}/float32", used) for name in (*operands, *results)}
    widening = [_cast(name, names[name], TensorProto.FLOAT) for name in operands]
    narrowing = [
        _cast(names[name], name, helper.np_dtype_to_tensor_dtype(dtype))
        for name, dtype in results.items()
    ]
    return [*widening, *(renamed(node, names) for node in nodes), *narrowing]


def _cast(source: str, target: str, code: int) -> Node:
    return Node("Cast", (source,), (target,), {"to": code}, name=f"node_{source}_to_{target}")
