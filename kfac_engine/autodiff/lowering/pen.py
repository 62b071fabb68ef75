"""Writes the nodes that take the place of an operator without a derivative rule."""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.node_builder import FLOAT_CODES
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Node

_CODES: Mapping[str, int] = {**FLOAT_CODES, "int32": 6, "int64": 7, "bool": 9}


class Pen:
    """Writes the nodes that take the place of one.

    Args:
        graph: The graph that is rewritten.
        facts: Element type and shape of every value of it, from a sample run.
        prefix: Starts the names of all new values; free in the graph.

    Attributes:
        nodes: What was written, in topological order.
        constants: New constants that the nodes read.
        prefix: Starts the names of all new values.
    """

    def __init__(self, graph: Graph, facts: Mapping[str, Fact], prefix: str) -> None:
        self.graph = graph
        self.facts = facts
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.prefix = prefix

    def op(
        self, op: str, *inputs: str, to: str = "", domain: str = "", **attributes: AttributeValue
    ) -> str:
        """Add a node with one result, called ``to`` if that is given; returns its name."""
        return self.multi(op, inputs, (to,), domain=domain, **attributes)[0]

    def multi(
        self,
        op: str,
        inputs: Sequence[str],
        to: Sequence[str],
        *,
        domain: str = "",
        **attributes: AttributeValue,
    ) -> tuple[str, ...]:
        """Add a node with several results, called as ``to`` says where not empty."""
        return self.write(op, inputs, to, attributes, domain)

    def write(
        self,
        op: str,
        inputs: Sequence[str],
        to: Sequence[str],
        attributes: Mapping[str, AttributeValue],
        domain: str = "",
    ) -> tuple[str, ...]:
        """Like ``multi``, with the attributes in a mapping."""
        names = tuple(
            name or f"{self.prefix}{op}_{len(self.nodes)}_{i}" for i, name in enumerate(to)
        )
        label = f"{self.prefix}node_{len(self.nodes)}"
        self.nodes.append(Node(op, tuple(inputs), names, attributes, label, domain))
        return names

    def cast(self, value: str, dtype: str, to: str = "") -> str:
        """``value`` in the element type that NumPy calls ``dtype``."""
        return self.write("Cast", (value,), (to,), {"to": _CODES[dtype]})[0]

    def constant(self, value: Array | Sequence[int] | int, dtype: str | None = None) -> str:
        """A new constant; integers become int64."""
        name = f"{self.prefix}constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype=dtype)
        return name

    def scalar(self, value: float, like: str) -> str:
        """A 0-d constant with the element type of the value ``like`` of the graph."""
        return self.constant(np.asarray(value, dtype=self.facts[like].dtype))

    def refuse(self, node: Node, why: str) -> UnsupportedOpError:
        """The error to raise where a node has no rewriting."""
        return UnsupportedOpError(
            f"no derivative of {node.qualified_op} at node '{node.name}': {why}."
        )
