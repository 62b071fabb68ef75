"""Builds the nodes that replace one node while a model is read."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import Node


class DecompositionBuilder(NodeBuilder):
    """Collects the nodes that replace one node, and reads its operands and attributes.

    Args:
        node: The node that is replaced; it has a name.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.name}.")
        self.node = node

    def value_name(self, op: str, index: int) -> str:
        """Return a new value name that begins with the first result of the replaced node."""
        return f"{self.node.outputs[0]}.{op}_{len(self.nodes)}"

    def node_name(self, op: str, results: Sequence[str]) -> str:
        """Return a new node name that begins with the name of the replaced node."""
        return f"{self.prefix}{op}_{len(self.nodes)}"

    def operands(self, least: int, most: int) -> list[str]:
        """Return all operands, with empty names for omitted ones at the end.

        Raises:
            ModelError: The node has fewer than ``least`` or more than ``most`` operands.
        """
        names = [*self.node.inputs, *[""] * most][: max(most, len(self.node.inputs))]
        if len(self.node.inputs) > most or not all(names[:least]):
            raise ModelError(f"{self._title} needs {least} to {most} operands, all with names.")
        return names

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a number."""
        value = self.node.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise ModelError(f"attribute '{name}' of {self._title} is {value!r}, but not a number.")
        return value

    def numbers(self, name: str) -> Array:
        """Return an attribute that lists numbers as a float32 array; empty if it is absent."""
        return np.array(self.node.attributes.get(name, ()), np.float32)

    @property
    def _title(self) -> str:
        return f"{self.node.qualified_op} node '{self.node.name}'"

    def halves(self, value: str) -> tuple[str, str]:
        """Add a Split of ``value`` into two halves of its last axis; return their names."""
        first = self.op("Split", value, axis=-1, num_outputs=2)
        self.nodes[-1] = replace(self.nodes[-1], outputs=(first, f"{first}.second"))
        return first, f"{first}.second"
