"""Replaces operators without a rule by their ONNX definition in other operators."""

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.graph.functions import definition
from kfac_engine.graph.structure import Node

# Largest size of a constant on which a definition may branch, such as sizes and axes.
_SMALL_BYTES = 4096


def write_definition(b: LoweringBuilder, node: Node) -> None:
    """Write the nodes of the ONNX definition of an operator.

    Args:
        b: Receives the nodes.
        node: Node whose operator has a definition.

    Raises:
        UnsupportedOpError: An operand is a sequence or an optional value.
    """
    operands = [name for name in node.inputs if name]
    if any(name not in b.facts for name in operands):
        raise b.refuse(node, "an operand is not a tensor")
    constants = b.graph.constants
    known = {n: constants[n] for n in operands if n in constants and _decides(constants[n])}
    versions = {"": b.graph.opset, **b.graph.domains}
    graph = definition(node, b.facts, known, versions, b.prefix)
    b.nodes.extend(graph.nodes)
    b.constants |= {n: array for n, array in graph.constants.items() if n not in known}


def _decides(array: Array) -> bool:
    # Floating-point numbers may be parameters, so they are not fixed.
    return array.dtype.kind in "iub" and array.nbytes <= _SMALL_BYTES
