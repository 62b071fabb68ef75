"""Transposes within products, as ONNX Runtime would fuse them, but where they stand.

It fuses a Transpose and the MatMul that reads it, and runs the result after everything else that
can run: for hundreds of results at a time, memory that a backward pass in its own order takes for
a few. With nothing left to fuse, nodes keep their order.
"""

from collections.abc import Mapping

import numpy as np

from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.graph.structure import Node

_DOMAIN = "com.microsoft"


def fused_products(backward: Backward) -> tuple[Node, ...]:
    """The nodes of a backward graph; products read as it lies what was transposed for them.

    Args:
        backward: Left as it is where its cotangents are not of float32, which the fused operator
            is for.

    Returns:
        Nodes with the same results, for ONNX Runtime alone, in the same order.
    """
    if set(backward.dtypes.values()) != {np.dtype(np.float32)}:
        return backward.nodes
    turned = {node.outputs[0]: node.inputs[0] for node in backward.nodes if _swaps_last(node)}
    fused = [_fused(node, turned) if node.op == "MatMul" else node for node in backward.nodes]
    read = {name for node in fused for name in (*node.inputs, *node.captures)}
    read.update(backward.gradients.values())
    unread = turned.keys() - read
    return tuple(node for node in fused if node.outputs[0] not in unread)


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
