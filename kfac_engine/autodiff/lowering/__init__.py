"""Rewrites operators without derivative rules as operators with derivative rules.

The table has one function for each operator and one file for each family of operators. A lowering
receives a node and a ``LoweringBuilder``, which has the facts of a sample run. It adds standard
nodes that compute the results of the node::

    @lowering("com.microsoft::QuickGelu")
    def quick_gelu(b: LoweringBuilder, node: Node) -> None:
        x = node.inputs[0]
        ...
        b.op("Mul", x, gate, result=node.outputs[0])

Conventions:

- The nodes compute each named result of the node under its name, by ``result=…``. Optional results
  that nothing reads have no name.
- Nodes such as ``Slice`` and ``Squeeze`` select a part of a parameter.
  A lowering never computes with the value of a parameter.
- The batch size remains dynamic. The number of unrolled steps may come from the sample run.
- ``raise b.refuse(node, why)`` refuses a node that has no lowering.

Operators that ONNX defines by other operators need no row. If they have no rule, their definition
replaces them.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TypeAlias

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules import ZERO_DERIVATIVE, load_rules
from kfac_engine.graph.definitions import is_defined
from kfac_engine.graph.functions import definition
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.registry import Registry

_FAMILIES = ("dropout", "loops", "microsoft", "recurrent", "sampling", "sequences", "signal")

Lowering: TypeAlias = Callable[[LoweringBuilder, Node], None]
LOWERINGS: Registry[Lowering] = Registry("lowering")
# Decorates the lowering of some operators, such as ``"Op"`` and ``"domain::Op"``.
lowering = LOWERINGS.register


def find_lowering(node: Node, graph: Graph) -> Lowering | None:
    """Return the lowering of a node; None if it has a derivative rule, or no lowering."""
    op, rows = node.qualified_op, load_lowerings()
    if op in rows:
        return rows[op]
    if op in load_rules() or op in ZERO_DERIVATIVE:
        return None
    versions = {"": graph.opset, **graph.domains}
    return write_definition if is_defined(node.op, node.domain, versions) else None


@cache
def load_lowerings() -> Registry[Lowering]:
    """Return the table of lowerings, after an import of every family."""
    for family in _FAMILIES:
        import_module(f"{__name__}.{family}")
    return LOWERINGS


# Largest size of a constant on which a definition may branch, such as sizes and axes.
_SMALL_BYTES = 4096


def write_definition(b: LoweringBuilder, node: Node) -> None:
    """Write the nodes of the ONNX definition of the operator of ``node``.

    An operand that is a sequence or an optional value raises UnsupportedOpError.
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
