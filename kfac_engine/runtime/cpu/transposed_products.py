"""Transposes within products, as ONNX Runtime would fuse them, but where they stand.

It fuses a Transpose and the MatMul that reads it, and runs the result after everything else that
can run: for hundreds of results at a time, memory that a backward pass in its own order takes for
a few. With nothing left to fuse, nodes keep their order.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.graph.structure import Node

_DOMAIN = "com.microsoft"


def fused_products(backward: Backward, *, fuse: bool = True) -> tuple[Node, ...]:
    """The nodes of a backward graph; products read as it lies what was transposed for them.

    Args:
        backward: Left as it is where its cotangents are not of float32, which the fused operator
            is for.
        fuse: Whether products are fused. Transposes that undo each other are removed in any case,
            because ONNX Runtime fails on some of them.

    Returns:
        Nodes with the same results, for ONNX Runtime alone, in the same order.
    """
    nodes = _without_round_trips(backward.nodes)
    if not fuse or set(backward.dtypes.values()) != {np.dtype(np.float32)}:
        return nodes
    turned = {node.outputs[0]: node.inputs[0] for node in nodes if _swaps_last(node)}
    fused = [_fused(node, turned) if node.op == "MatMul" else node for node in nodes]
    read = {name for node in fused for name in (*node.inputs, *node.captures)}
    read.update(backward.gradients.values())
    unread = turned.keys() - read
    return tuple(node for node in fused if node.outputs[0] not in unread)


def _without_round_trips(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes; a Transpose that undoes another one hands on what that one reads."""
    # ONNX Runtime drops both, even where the second makes a result of the graph, and fails.
    turns = {node.outputs[0]: node for node in nodes if node.op == "Transpose"}

    def handed_on(node: Node) -> Node:
        first = turns.get(node.inputs[0]) if node.op == "Transpose" else None
        if first is None or not _undoes(node.attributes.get("perm"), first.attributes.get("perm")):
            return node
        return Node("Identity", first.inputs, node.outputs, {}, node.name)

    return tuple(map(handed_on, nodes))


def _undoes(perm: object, first: object) -> bool:
    if not (isinstance(perm, tuple | list) and isinstance(first, tuple | list)):
        return perm is None and first is None  # both turn all axes around
    return [first[axis] for axis in perm] == [*range(len(perm))]


def _swaps_last(node: Node) -> bool:
    perm = node.attributes.get("perm")
    if node.op != "Transpose" or not isinstance(perm, tuple | list) or len(perm) < 2:
        return False
    return [*perm] == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]


def _fused(node: Node, turned: Mapping[str, str]) -> Node:
    names = [turned.get(name, name) for name in node.inputs]
    if names == [*node.inputs]:
        return node
    flags = {
        flag: int(name != old)
        for flag, name, old in zip(("transA", "transB"), names, node.inputs, strict=True)
    }
    return Node("FusedMatMul", tuple(names), node.outputs, flags, node.name, _DOMAIN)
