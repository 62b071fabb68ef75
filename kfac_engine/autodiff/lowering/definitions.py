"""Operators without a rule that ONNX defines by other ones: the definition takes their place."""

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.graph.functions import definition
from kfac_engine.graph.structure import Node

# Fixed values that a definition may branch on are sizes and axes, never tables.
_SMALL_BYTES = 4096


def write_definition(pen: Pen, node: Node) -> None:
    """The nodes by which ONNX defines the operator of ``node``.

    Args:
        pen: Writes them.
        node: Its operator has a definition.

    Raises:
        UnsupportedOpError: An operand is a sequence or an optional value.
    """
    operands = [name for name in node.inputs if name]
    if any(name not in pen.facts for name in operands):
        raise pen.refuse(node, "an operand is no tensor")
    constants = pen.graph.constants
    known = {n: constants[n] for n in operands if n in constants and _decides(constants[n])}
    versions = {"": pen.graph.opset, **pen.graph.domains}
    found = definition(node, pen.facts, known, versions, pen.prefix)
    pen.nodes.extend(found.nodes)
    pen.constants |= {n: array for n, array in found.constants.items() if n not in known}


def _decides(array: Array) -> bool:
    # Numbers that may be parameters stay open.
    return array.dtype.kind in "iub" and array.nbytes <= _SMALL_BYTES
