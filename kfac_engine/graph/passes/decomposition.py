"""Nodes that stand for one node, where nothing executes it or its weights are attributes."""

from dataclasses import dataclass, field, replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ModelError
from kfac_engine.graph.structure import AttributeValue, Node


@dataclass
class Spelled:
    """Nodes that stand for one node.

    Attributes:
        node: What they stand for.
        nodes: Grows as they are written.
        constants: Values that they read, by name.
    """

    node: Node
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)

    def op(self, op: str, *inputs: str, made: str = "", **attributes: AttributeValue) -> str:
        """Add a node with one result, called ``made`` if that is given; returns its name."""
        name = made or f"{self.node.outputs[0]}.{op}_{len(self.nodes)}"
        label = f"{self.node.name}.{op}_{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (name,), attributes, label))
        return name

    def constant(self, label: str, value: Array) -> str:
        """A constant named after its place in the file."""
        name = f"{self.node.name}.{label}"
        value.flags.writeable = False
        self.constants[name] = value
        return name

    def operands(self, least: int, most: int) -> list[str]:
        """All operands, empty names for those that are left out at the end."""
        given = [*self.node.inputs, *[""] * most][: max(most, len(self.node.inputs))]
        if len(self.node.inputs) > most or not all(given[:least]):
            raise ModelError(f"{self._what} needs {least} to {most} operands, all with names.")
        return given

    def number(self, name: str, default: float) -> float:
        """An attribute that is a number."""
        value = self.node.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise ModelError(f"attribute '{name}' of {self._what} is {value!r}, but not a number.")
        return value

    def numbers(self, name: str) -> Array:
        """An attribute that lists numbers; empty if it is not there."""
        return np.array(self.node.attributes.get(name, ()), np.float32)

    @property
    def _what(self) -> str:
        return f"{self.node.qualified_op} node '{self.node.name}'"

    def halves(self, value: str) -> tuple[str, str]:
        """The names of both halves of ``value``, along its last axis."""
        first = self.op("Split", value, axis=-1, num_outputs=2)
        self.nodes[-1] = replace(self.nodes[-1], outputs=(first, f"{first}.second"))
        return first, f"{first}.second"
