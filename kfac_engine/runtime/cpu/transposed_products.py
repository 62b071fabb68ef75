"""Fuses transposes with the products that read them, in the order of the graph.

ONNX Runtime also fuses a Transpose with the MatMul that reads it. It then runs the fused node after
all other nodes that are ready, so that hundreds of results remain in memory. If no Transpose
remains to be fused, it runs nodes in the order of the graph.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.graph.structure import Node

_DOMAIN = "com.microsoft"


def fused_products(backward: Backward, *, fuse: bool = True) -> tuple[Node, ...]:
    """Return the nodes of a backward graph, with transposes fused with the products that read them.

    The nodes have the same results in the same order, and only ONNX Runtime can run them. Products
    are not fused if a cotangent is not float32, because the fused operator supports no other type.
    Pairs of inverse transposes are removed even without ``fuse``, because ONNX Runtime fails on
    some of them.
    """
    nodes = _without_round_trips(backward.nodes)
    if not fuse or set(backward.dtypes.values()) != {np.dtype(np.float32)}:
        return nodes
    transposed = {node.outputs[0]: node.inputs[0] for node in nodes if _swaps_last(node)}
    fused = [_fused(node, transposed) if node.op == "MatMul" else node for node in nodes]
    read = {name for node in fused for name in (*node.inputs, *node.captures)}
    read.update(backward.gradients.values())
    unread = transposed.keys() - read
    return tuple(node for node in fused if node.outputs[0] not in unread)


def _without_round_trips(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes with an Identity for each Transpose that inverts another one."""
    # ONNX Runtime removes both, and fails if the second transpose computes a result of the graph.
    transposes = {node.outputs[0]: node for node in nodes if node.op == "Transpose"}

    def simplified(node: Node) -> Node:
        first = transposes.get(node.inputs[0]) if node.op == "Transpose" else None
        if first is None or not _undoes(node.attributes.get("perm"), first.attributes.get("perm")):
            return node
        return Node("Identity", first.inputs, node.outputs, {}, node.name)

    return tuple(map(simplified, nodes))


def _undoes(perm: object, first: object) -> bool:
    if not (isinstance(perm, tuple | list) and isinstance(first, tuple | list)):
        return perm is None and first is None  # both reverse all axes
    return [first[axis] for axis in perm] == [*range(len(perm))]


def _swaps_last(node: Node) -> bool:
    perm = node.attributes.get("perm")
    if node.op != "Transpose" or not isinstance(perm, tuple | list) or len(perm) < 2:
        return False
    return [*perm] == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]


def _fused(node: Node, transposed: Mapping[str, str]) -> Node:
    names = [transposed.get(name, name) for name in node.inputs]
    if names == [*node.inputs]:
        return node
    flags = {
        flag: int(name != old)
        for flag, name, old in zip(("transA", "transB"), names, node.inputs, strict=True)
    }
    return Node("FusedMatMul", tuple(names), node.outputs, flags, node.name, _DOMAIN)
