"""Computes values that only constants and sizes determine, such as trip counts and conditions.

Sizes come from the sample run. Nodes that depend on them are correct only for batches with the same
sizes. Checks in the graph fail for all other batches.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import UNROLLED, LoweringBuilder, label_last
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.training_form import draws
from kfac_engine.graph.structure import ONLY_SHAPES, Fact, Graph, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.printable import quoted
from kfac_engine.sessions.session import Session


class KnownValues:
    """Values that do not depend on data, of the graph of a builder.

    ``checks`` are values that depend on sizes or weights, by name.
    """

    def __init__(self, b: LoweringBuilder) -> None:
        self._builder = b
        self.checks: dict[str, Array] = {}
        self._zeros: dict[str, str] = {}

    def get(self, name: str) -> Array | None:
        """Return the array of a value of the graph; None if it depends on data or is random."""
        graph = self._builder.graph
        if name in graph.constants and graph.constants[name].dtype.kind != "f":
            return graph.constants[name]
        origin = Origin(graph, self._builder.facts, name)
        if origin.undecided:
            return None
        value = origin.value()
        if origin.varies:
            self.checks[name] = value
        return value

    def zeros(self, node: Node) -> list[str]:
        """Return the name of a 0-d integer zero for each check.

        The computation of a zero fails if its check fails. Each zero is written once, at the first
        call. Call this before nodes that would fail on another batch with a less clear message.
        Messages name ``node``.
        """
        for name, array in self.checks.items():
            if name not in self._zeros:
                self._zeros[name] = _zero_if_same(self._builder, node, name, array)
        return [self._zeros[name] for name in self.checks]


def gated(b: LoweringBuilder, node: Node, value: str, known: KnownValues, result: str = "") -> str:
    """Write a copy of a value, whose computation fails if a check fails, and return its name.

    The value is a tensor, a sequence or an optional value; only tensors are checked. ``result``
    names a value of the graph of the same type, and may be empty if ``value`` is in the graph.
    Messages name ``node``.
    """
    fact = b.facts.get(result or value)
    if fact is not None:
        for zero in known.zeros(node):
            join = "Or" if fact.dtype.kind == "b" else "Add"
            value = b.op(join, value, b.cast(zero, fact.dtype.name))
    return b.op("Identity", value, result=result)


def gated_reads(b: LoweringBuilder, node: Node, known: KnownValues) -> dict[str, str]:
    """Return checked names for the operands of a node whose results cannot be checked.

    Each floating-point value that is not constant is mapped to its checked name. The map is empty
    if all results are tensors or if there are no checks.
    """
    if not known.checks or all(result in b.facts for result in node.outputs if result):
        return {}
    reads = dict.fromkeys((*node.inputs, *node.captures))
    return {
        name: gated(b, node, name, known)
        for name in reads
        if name not in b.graph.constants and name in b.facts and b.facts[name].dtype.kind == "f"
    }


def _zero_if_same(b: LoweringBuilder, node: Node, name: str, array: Array) -> str:
    """Add a 0-d integer zero whose computation fails unless the value ``name`` equals ``array``."""
    same = b.cast(b.op("Equal", name, b.constant(array)), "int64")
    least = b.op("ReduceMin", b.op("Reshape", same, b.constant([-1])), keepdims=1)
    # Every runtime refuses to reshape one element to the shape (0,).
    zero = b.op("Reshape", b.constant([0]), least, allowzero=1)
    # The label has no quotes, because they end the name in messages of ONNX Runtime.
    shown = np.array2string(array, threshold=8, separator=", ").replace("\n", "")
    label_last(b, f"{node.op} {UNROLLED} {name} = {shown}, as in the sample inputs")
    return b.op("Squeeze", zero)


class Origin:
    """The inputs, constants and random values that the value ``name`` of a graph depends on.

    ``undecided`` are inputs and random results that it depends on. ``sized`` is whether it depends
    on sizes, and ``varies`` whether it may change with the batch or with the weights.
    """

    def __init__(self, graph: Graph, facts: Mapping[str, Fact], name: str) -> None:
        self._graph, self._name = graph, name
        self._nodes: list[Node] = []
        self._inputs: dict[str, Array] = {}
        self.undecided: list[str] = []
        self.sized = False
        waiting, seen = [name], {name}
        while waiting:
            value = waiting.pop()
            node = graph.producers.get(value)
            if value in graph.constants:
                self._inputs[value] = graph.constants[value]
            elif value in graph.fixed:
                self._inputs[value] = graph.fixed[value]
            elif node is None or draws(graph, node):
                self.undecided.append(value)
            elif node.op in ONLY_SHAPES and node.inputs[0] in facts:
                self._inputs[value] = _size(node, facts[node.inputs[0]])
                self.sized = True
            else:
                self._nodes.append(node)
                reads = dict.fromkeys((*node.inputs, *node.captures))
                new = [read for read in reads if read and read not in seen]
                waiting += new
                seen.update(new)
        fixed = not graph.fixed.keys().isdisjoint(self._inputs)
        weighed = any(array.dtype.kind == "f" for array in self._inputs.values())
        self.varies = self.sized or fixed or weighed

    def value(self) -> Array:
        """Return the array of a value that ``undecided`` does not list."""
        if not self._nodes:
            return self._inputs[self._name]
        nodes = sorted(self._nodes, key=lambda node: self._graph.positions[node.name])
        return _evaluated(self._graph, nodes, self._inputs, self._name)

    def why_undecided(self) -> str:
        """Return the reason why the value is unknown, and a remedy if there is one."""
        listed = quoted(self.undecided)
        numbers = {entry.name for entry in self._graph.inputs if entry.is_setting}
        if not numbers.issuperset(self.undecided):
            return f"'{self._name}' depends on the data, through {listed}"
        return (
            f"'{self._name}' depends on {listed}: pass a batch with its value, by sample_inputs=… "
            f"or --inputs, or make {listed} a constant of the file"
        )


def _size(node: Node, fact: Fact) -> Array:
    if node.op == "Size":
        return np.asarray(prod(fact.shape), np.int64)
    start, end = integer(node, "start", 0), integer(node, "end", len(fact.shape))
    return np.asarray(fact.shape[start:end], np.int64)


def _evaluated(
    graph: Graph, nodes: Sequence[Node], constants: Mapping[str, Array], name: str
) -> Array:
    read = {value for node in nodes for value in (*node.inputs, *node.captures)}
    read_constants = {value: array for value, array in constants.items() if value in read}
    model = compact_model(nodes, [], [name], read_constants, graph.opset, domains=graph.domains)
    session = Session(model, threads=1, optimize=False, what=f"the value of '{name}'")
    return session.run([name], {})[name]
