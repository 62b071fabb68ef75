"""The canonical graph: a frozen picture of an ONNX model that the rest of the engine reads.

Produced by ``graph.load``; consumed by ``autodiff`` and ``layers``. It knows no protobuf: its
attributes are plain Python values and tensors are NumPy arrays.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from kfac_engine._types import Array, DType
from kfac_engine.graph.analysis.computed_tables import Tables


@dataclass(frozen=True, slots=True)
class Subgraph:
    """The body of an If, Loop or Scan: opaque here, kept as serialized ONNX ``GraphProto`` bytes.

    Attributes:
        proto: The serialized body.
        captures: Names of outer values that the body reads.
    """

    proto: bytes
    captures: tuple[str, ...]


AttributeValue: TypeAlias = (
    int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Array | Subgraph
)


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Attributes:
        op: Operator name, as in ONNX (``"Conv"``).
        inputs: Names of the operands; ``""`` where an optional one is left out.
        outputs: Names of the results; ``""`` where one is not produced.
        attributes: Attributes that are set, by name.
        name: Unique in its graph.
        domain: Operator domain; ``""`` is the standard one.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    name: str = ""
    domain: str = ""

    @property
    def captures(self) -> tuple[str, ...]:
        """Outer values that subgraph attributes of this node read."""
        # Asked of every node again and again, and nearly none has a body.
        bodies = [value for value in self.attributes.values() if type(value) is Subgraph]
        return tuple(name for body in bodies for name in body.captures) if bodies else ()

    @property
    def qualified_op(self) -> str:
        """``op``, prefixed where the domain is not the standard one: ``com.microsoft::Gelu``."""
        return f"{self.domain}::{self.op}" if self.domain else self.op


@dataclass(frozen=True, slots=True)
class Input:
    """A data input of the model.

    Attributes:
        name: Its name in the file.
        dtype: Element type.
        shape: One entry per axis: a size, a symbol (``"batch"``), or None where the file says
            nothing; None altogether where even the rank is open.
        stored: Element type in the file where that is narrower; accepted as well.
    """

    name: str
    dtype: DType
    shape: tuple[int | str | None, ...] | None
    stored: DType | None = None

    @property
    def is_setting(self) -> bool:
        """Whether it is declared as a single integer or truth value, which is not data."""
        return self.dtype.kind in "iub" and self.shape is not None and set(self.shape) <= {1}


@dataclass(frozen=True, slots=True)
class Fact:
    """What one evaluation showed of a value: its element type and shape."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A model in canonical form.

    Attributes:
        nodes: In topological order.
        inputs: Data inputs, without the constants some files list among them.
        outputs: Names of the outputs, in the file's order.
        constants: Initializers and lifted ``Constant`` nodes by name: weights, tables, axes,
            shapes. Arrays are read-only.
        opset: Version of the standard operator set, 18 or newer.
        name: Name of the model, for messages.
        domains: Versions of other operator domains in use.
        filled: Constants that the file does not store, but fills with one number.
        inner: Constants that the file holds in the bodies of nodes.
        fixed: Inputs of one whole number each, as a sample has them: what they decide is decided.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Array]
    opset: int
    name: str = "model"
    domains: Mapping[str, int] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()
    fixed: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def results(self) -> frozenset[str]:
        """``outputs`` without their order."""
        return frozenset(self.outputs)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Node name to its index in ``nodes``."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Value name to the node that makes it (inputs and constants have none)."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[Node, int], ...]]:
        """Value name to every ``(node, operand index)`` that reads it; a capture has index -1."""
        uses: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for index, name in enumerate(node.inputs):
                if name:
                    uses.setdefault(name, []).append((node, index))
            for name in node.captures:
                uses.setdefault(name, []).append((node, -1))
        return {name: tuple(readers) for name, readers in uses.items()}

    @cached_property
    def tables(self) -> Tables:
        """Which constants were computed, not trained."""
        return Tables(self.constants)

    def values(self) -> Iterator[str]:
        """All value names: inputs, constants, then results in topological order."""
        yield from (entry.name for entry in self.inputs)
        yield from self.constants
        for node in self.nodes:
            yield from (name for name in node.outputs if name)
