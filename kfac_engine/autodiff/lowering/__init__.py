"""Operators without a derivative rule, rewritten as operators that have one.

The table holds one function per operator; one file per family of operators. A lowering receives a
node, what a sample run showed of all values, and a ``Pen``; it writes standard nodes that make the
node's results::

    @lowering("com.microsoft::QuickGelu")
    def quick_gelu(pen: Pen, node: Node) -> None:
        x = node.inputs[0]
        ...
        pen.op("Mul", x, gate, to=node.outputs[0])

Conventions:

- Every result of the node that has a name is made under that name, with ``to=…``.
- Parameters stay parameters: a part of one is cut out by nodes (``Slice``, ``Squeeze``, …), never
  by computing with its value.
- The batch stays dynamic; lengths that are unrolled over may be taken from the sample run.
- What cannot be rewritten is refused with ``pen.refuse(node, why)``.

Operators that ONNX defines by other operators need no row: where they have no rule either, their
definition takes their place.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TypeAlias

from kfac_engine.autodiff.lowering.definitions import write_definition
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules import ZERO_DERIVATIVE, load_rules
from kfac_engine.graph.functions import has_definition
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.registry import Registry

_FAMILIES = (
    "dropout", "loops", "microsoft", "microsoft_attention", "microsoft_norms",
    "microsoft_quantized", "microsoft_rotary", "recurrent", "regions", "sampling", "sequences",
    "signal",
)  # fmt: skip

Lowering: TypeAlias = Callable[[Pen, Node], None]
LOWERINGS: Registry[Lowering] = Registry("lowering")


def lowering(*ops: str) -> Callable[[Lowering], Lowering]:
    """Enter a function into the table for each of ``ops`` (``"domain::Op"`` for other domains)."""

    def enter(function: Lowering) -> Lowering:
        for op in ops:
            LOWERINGS.add(op, function)
        return function

    return enter


def find_lowering(node: Node, graph: Graph) -> Lowering | None:
    """What rewrites ``node`` of ``graph``; None where it has a rule or nobody knows how to."""
    own = load_lowerings().get(node.qualified_op)
    if own is not None or node.qualified_op in load_rules() or node.qualified_op in ZERO_DERIVATIVE:
        return own
    versions = {"": graph.opset, **graph.domains}
    return write_definition if has_definition(node, versions) else None


@cache
def load_lowerings() -> Registry[Lowering]:
    """The full table: imports every family once."""
    for family in _FAMILIES:
        import_module(f"{__name__}.{family}")
    return LOWERINGS
