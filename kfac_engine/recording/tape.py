"""Collects the nodes of a recorded computation, with the bodies of its conditions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from kfac_engine._types import DType
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.passes.order import captures
from kfac_engine.graph.structure import AttributeValue, Input, Subgraph
from kfac_engine.graph.write import build_model

# The operator set of the files, and the oldest one that has all operators that are recorded.
OPSET = 18


class Value(Protocol):
    """A value of the graph, with its element type and number of axes; see ``Recorded``."""

    name: str
    dtype: DType

    @property
    def ndim(self) -> int: ...

    def named(self, name: str) -> Self: ...


AnyValue = TypeVar("AnyValue", bound=Value)


class Functions(Protocol):
    """What NumPy's functions record; see ``operations``."""

    def applied(self, tape: "Tape", name: str, inputs: Sequence[Any]) -> Any:
        """Record a universal function."""

    def called(self, function: Any, args: Any, options: dict[str, Any]) -> Any:
        """Record another function."""

    def namespace(self, tape: "Tape") -> Any:
        """Return the functions that create arrays."""

    def backend(self, tape: "Tape") -> Any:
        """Return the operations of a backend."""


class Level(NodeBuilder):
    """The nodes of the graph, or of the body of one node.

    Args:
        prefix: Start of all new names.

    Attributes:
        known: Name of each constant, by its type, shape and bytes.
        computed: Name of the result of each operation, so that none is recorded twice.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.computed: dict[tuple[object, ...], str] = {}

    def closed(self, results: Sequence[Value], inputs: Sequence[Input] = ()) -> Subgraph:
        """Return the nodes as a body with these inputs and results."""
        computed = {name for node in self.nodes for name in node.outputs}
        outputs: list[Input] = []
        for value in results:
            # A result that another body computes must be copied, and a name can be one result.
            fresh = value.name in computed and all(value.name != entry.name for entry in outputs)
            name = value.name if fresh else self.op("Identity", value.name)
            # The runtime compares the shapes of both branches: only their ranks are equal.
            outputs.append(Input(name, value.dtype, (None,) * value.ndim))
        nodes = needed(self.nodes, [entry.name for entry in outputs])
        body = build_model(nodes, inputs, outputs, self.constants, OPSET, name=self.prefix).graph
        return Subgraph(body.SerializeToString(), captures(body))


class Tape:
    """Records operations; operations in a body belong to the body until it is closed.

    Args:
        prefix: Start of all new names; no value of the model starts with it.
        functions: What NumPy's functions record.
        dtype: Type of floating-point numbers. Training files have single precision: a GPU of a
            browser has no other.

    Attributes:
        functions: What NumPy's functions record.
        dtype: Type of floating-point numbers.
        levels: The graph, and inside it the bodies that are open.
    """

    def __init__(self, prefix: str, functions: Functions, dtype: DType | type = np.float32) -> None:
        self.functions, self.dtype = functions, np.dtype(dtype)
        self.levels = [Level(prefix)]
        self._bodies = 0

    @property
    def graph(self) -> Level:
        """The nodes of the graph."""
        return self.levels[0]

    @property
    def level(self) -> Level:
        """The nodes to which new ones are added."""
        return self.levels[-1]

    def record(
        self, op: str, inputs: Sequence[str], attributes: dict[str, AttributeValue] | None = None
    ) -> str:
        """Add a node with one result, unless the same is known; return the name of the result."""
        attributes = attributes or {}
        key = (op, *inputs, *sorted(attributes.items()))
        # A body casts for itself: the runtime warns of casts that it cannot remove for a body.
        for level in self.levels if op != "Cast" else (self.level,):
            if key in level.computed:
                return level.computed[key]
        name = self.level.write(op, inputs, ("",), attributes)[0]
        self.level.computed[key] = name
        return name

    def constant(self, value: object, dtype: DType | type | None = None) -> str:
        """Return the name of a constant; equal constants share a name."""
        array = np.asarray(value, dtype)
        key = array.dtype.str, array.shape, array.tobytes()
        for level in self.levels:
            if key in level.known:
                return level.known[key]
        self.level.known[key] = name = self.level.constant(array)
        return name

    def integers(self, *values: int) -> str:
        """Return the name of a constant vector of integers."""
        return self.constant(values, np.int64)

    @contextmanager
    def body(self) -> Iterator[Level]:
        """Return a context in which operations belong to a new body."""
        self._bodies += 1
        self.levels.append(Level(f"{self.graph.prefix}{self._bodies}/"))
        try:
            yield self.levels[-1]
        finally:
            self.levels.pop()

    def branch(
        self,
        condition: Value,
        then: Callable[[], Sequence[AnyValue]],
        otherwise: Callable[[], Sequence[AnyValue]],
    ) -> list[AnyValue]:
        """Record ``If``: only the operations of the branch that is taken are computed.

        Both functions return results of the same types and ranks. The results of the node have the
        shapes of the results of ``then``.
        """
        bodies = []
        for function in (then, otherwise):
            with self.body() as level:
                results = list(function())
                bodies.append((level.closed(results), results))
        (first, results), (second, _) = bodies
        names = self.level.multi(
            "If", [condition.name], [""] * len(results), then_branch=first, else_branch=second
        )
        return [value.named(name) for value, name in zip(results, names, strict=True)]
