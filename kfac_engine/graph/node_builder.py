"""Builds the nodes and constants that a rewrite adds to a graph.

Decompositions, lowerings, derivative rules and losses use subclasses of ``NodeBuilder``. A subclass
chooses the names of new values and adds the operations that only its users need.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2s

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.structure import AttributeValue, Node

# TensorProto.DataType codes of the types that carry gradients, for the attribute ``to`` of Cast.
FLOAT_CODES: Mapping[str, int] = {"float32": 1, "float16": 10, "float64": 11, "bfloat16": 16}
# TensorProto.DataType codes of all types that rewrites cast to.
TYPE_CODES: Mapping[str, int] = {**FLOAT_CODES, "int32": 6, "int64": 7, "bool": 9}


class NodeBuilder:
    """Collects new ``nodes``, in topological order, and the ``constants`` that they read, by name.

    All new names start with ``prefix``; no name in the graph starts with it.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}

    def op(
        self,
        op: str,
        *inputs: str,
        result: str = "",
        domain: str = "",
        **attributes: AttributeValue,
    ) -> str:
        """Add a node with one result; return the name of the result.

        ``""`` stands for an omitted operand, for a new name of the result, and for the standard
        domain.
        """
        return self.write(op, inputs, (result,), attributes, domain)[0]

    def multi(
        self, op: str, inputs: Sequence[str], results: Sequence[str], **attributes: AttributeValue
    ) -> tuple[str, ...]:
        """Add a node with several results; return the names of the results.

        ``""`` stands for an omitted operand and for a new name of a result.
        """
        return self.write(op, inputs, results, attributes)

    def write(
        self,
        op: str,
        inputs: Sequence[str],
        results: Sequence[str],
        attributes: Mapping[str, AttributeValue],
        domain: str = "",
    ) -> tuple[str, ...]:
        """Add a node like ``multi``, with the attributes in a mapping; return the result names."""
        names = tuple(name or self.value_name(op, index) for index, name in enumerate(results))
        label = self.node_name(op, names)
        self.nodes.append(Node(op, tuple(inputs), names, attributes, label, domain))
        return names

    def split(self, value: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        """Add a Split of ``value`` into parts of some sizes; return the names of the parts."""
        return self.multi("Split", (value, self.constant(sizes)), ("",) * len(sizes), axis=axis)

    def cast(self, value: str, dtype: str, result: str = "") -> str:
        """Add a Cast of ``value`` to the NumPy type ``dtype``; return the name of the result."""
        return self.write("Cast", (value,), (result,), {"to": TYPE_CODES[dtype]})[0]

    def constant(
        self, value: Array | Sequence[int] | int, dtype: str | None = None, label: str = ""
    ) -> str:
        """Add a constant; return its name, which ends with ``label`` or a number.

        Python integers become int64, unless ``dtype`` is another type.
        """
        name = f"{self.prefix}{label or f'constant_{len(self.constants)}'}"
        self.constants[name] = np.asarray(value, dtype=dtype)
        return name

    def value_name(self, op: str, index: int) -> str:
        """Return a new name for result ``index`` of the next node."""
        return f"{self.prefix}{op}_{len(self.nodes)}_{index}"

    def node_name(self, op: str, results: Sequence[str]) -> str:
        """Return a new name for the next node."""
        return f"{self.prefix}node_{len(self.nodes)}"


def digest_of(*content: object) -> str:
    """Return a short text that is the same for equal content."""
    return blake2s(repr(content).encode(), digest_size=8).hexdigest()
