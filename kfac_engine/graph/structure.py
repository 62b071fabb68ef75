"""Defines the immutable types of a canonical graph: ``Graph``, ``Node``, ``Input``, ``Fact``.

``graph.load`` builds a graph; ``autodiff`` and ``layers`` read it. No type refers to protobuf:
attributes are plain Python values and tensors are NumPy arrays.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from kfac_engine._types import Array, DType
from kfac_engine.graph.analysis.computed_tables import Tables


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Body of an If, Loop or Scan, stored as the bytes of an ONNX ``GraphProto``."""

    proto: bytes  # the serialized body
    captures: tuple[str, ...]  # names of outer values that the body reads


AttributeValue: TypeAlias = (
    int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Array | Subgraph
)


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an operator."""

    op: str  # operator name, as in ONNX (``"Conv"``)
    inputs: tuple[str, ...]  # names of the operands; ``""`` for an omitted optional operand
    outputs: tuple[str, ...]  # names of the results; ``""`` for an omitted result
    # Attributes that are set, by name.
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    name: str = ""  # name, unique in the graph
    domain: str = ""  # operator domain; ``""`` is the standard one

    def operand(self, index: int) -> str:
        """Return the name of an operand; ``""`` for an omitted one."""
        return self.inputs[index] if index < len(self.inputs) else ""

    @property
    def captures(self) -> tuple[str, ...]:
        """Names of the outer values that the bodies of this node read."""
        # This property is read very often, and few nodes have a body.
        bodies = [value for value in self.attributes.values() if type(value) is Subgraph]
        return tuple(name for body in bodies for name in body.captures) if bodies else ()

    @property
    def qualified_op(self) -> str:
        """Operator name with a non-standard domain as prefix, such as ``com.microsoft::Gelu``."""
        return f"{self.domain}::{self.op}" if self.domain else self.op

    @property
    def title(self) -> str:
        """Operator and name for a message, such as ``Gemm node 'head'``."""
        return f"{self.qualified_op} node '{self.name}'"


def values_read(nodes: Iterable[Node]) -> set[str]:
    """Return the values that nodes read, as operands or in their bodies."""
    return {name for node in nodes for name in (*node.inputs, *node.captures)}


@dataclass(frozen=True, slots=True)
class Input:
    """A data input of the model."""

    name: str  # name in the file
    dtype: DType  # element type
    # One entry for each axis: a size, a symbol such as ``"batch"``, or None if unknown. None in
    # place of the tuple if the rank is unknown.
    shape: tuple[int | str | None, ...] | None
    # Element type in the file if it is narrower; arrays of this type are accepted too.
    stored: DType | None = None

    @property
    def is_setting(self) -> bool:
        """Whether the input is a setting: one integer or one truth value."""
        return self.dtype.kind in "iub" and self.shape is not None and set(self.shape) <= {1}


@dataclass(frozen=True, slots=True)
class Fact:
    """The element type and the shape of a value in the sample run."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A model in canonical form."""

    nodes: tuple[Node, ...]  # nodes, in topological order
    # Data inputs. Constants that a file lists among its inputs are not included.
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]  # names of the outputs, in the file's order
    # Initializers and lifted ``Constant`` nodes by name: weights, tables, axes, shapes. Arrays are
    # read-only.
    constants: Mapping[str, Array]
    opset: int  # version of the standard operator set, 18 or newer
    name: str = "model"  # name of the model, for messages
    # Versions of the other operator domains in use.
    domains: Mapping[str, int] = field(default_factory=dict)
    # Names of constants that the file stores as a shape and one number.
    filled: frozenset[str] = frozenset()
    # Names of constants that the file stores in the bodies of nodes.
    inner: frozenset[str] = frozenset()
    # Reasons why constants are not parameters, by name, where the file states them; empty for
    # constants that it states to be parameters.
    declared: Mapping[str, str] = field(default_factory=dict)
    # Values of integer inputs in the sample; the graph is specialized to them.
    fixed: Mapping[str, Array] = field(default_factory=dict)
    # Outputs that are residuals of equations, by the metadata of the file: their targets are zero
    # if there are none.
    residuals: frozenset[str] = frozenset()

    @cached_property
    def results(self) -> frozenset[str]:
        """The outputs as a set."""
        return frozenset(self.outputs)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Index of each node in ``nodes``, by node name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that computes each value, by value name; inputs and constants are absent."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[Node, int], ...]]:
        """All readers of each value, as ``(node, operand index)``; a capture has index -1."""
        uses: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for index, name in enumerate(node.inputs):
                if name:
                    uses.setdefault(name, []).append((node, index))
            for name in node.captures:
                uses.setdefault(name, []).append((node, -1))
        return {name: tuple(readers) for name, readers in uses.items()}

    def source(self, name: str, operators: Container[str]) -> str:
        """Return the value from whose entries the operators in a row compute ``name``, or itself.

        Each of the operators reads the result of the one before as its first operand.
        """
        maker = self.producers.get(name)
        while maker is not None and maker.qualified_op in operators:
            name = maker.inputs[0]
            maker = self.producers.get(name)
        return name

    @cached_property
    def tables(self) -> Tables:
        """The recognizer of constants that a formula computed."""
        return Tables(self.constants)

    @cached_property
    def names(self) -> Mapping[str, None]:
        """The names of all values, in the order of ``values``."""
        return dict.fromkeys(self.values())

    def values(self) -> Iterator[str]:
        """Yield all value names: inputs, constants, then results in topological order."""
        yield from (entry.name for entry in self.inputs)
        yield from self.constants
        for node in self.nodes:
            yield from (name for name in node.outputs if name)


# The result has every entry of the first operand once.
RELAYS = frozenset(
    {"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)

# The result has entries of the first operand.
MOVES = RELAYS | {"Gather", "Slice", "Split"}

# The result depends on the shape of the operand, not on its entries.
ONLY_SHAPES = frozenset({"Shape", "Size"})
