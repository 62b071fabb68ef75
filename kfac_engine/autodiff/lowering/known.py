"""Values that constants and sizes decide: trip counts, conditions, positions in a sequence.

A size is known from the sample run. What is written with its help is right for batches that lead to
the same values, so it is tied to a check, in nodes, which fails on all others.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.steps import label_last
from kfac_engine.autodiff.random_ops import draws
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.analysis.rearrangements import ONLY_SHAPES
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.sessions.session import Session


class KnownValues:
    """What is decided without data, evaluated and remembered.

    Args:
        b: Its graph and the facts of its sample run.

    Attributes:
        checks: Name to value of all that was asked for and took sizes or weights to decide.
    """

    def __init__(self, b: LoweringBuilder) -> None:
        self._builder = b
        self.checks: dict[str, Array] = {}
        self._zeros: dict[str, str] = {}

    def get(self, name: str) -> Array | None:
        """A value of the graph; None if it depends on data or chance."""
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
        """0-d integer zeros that can only be computed where all checks hold.

        Each is written once, where it is first asked for: ask before anything that would fail on
        another batch too, and say less.

        Args:
            node: What is rewritten, for messages.

        Returns:
            One for each check.
        """
        for name, array in self.checks.items():
            if name not in self._zeros:
                self._zeros[name] = _zero_if_same(self._builder, node, name, array)
        return [self._zeros[name] for name in self.checks]


def gated(b: LoweringBuilder, node: Node, value: str, known: KnownValues, result: str = "") -> str:
    """Hand a value on, unless something is not as it was in the sample run.

    Args:
        b: Writes the nodes.
        node: What is rewritten, for messages.
        value: A tensor, sequence or optional value.
        known: What has to be, for tensors.
        result: Name of the result, a value of the graph with the type of ``value``; may be omitted
            where ``value`` is in the graph.

    Returns:
        The new name.
    """
    fact = b.facts.get(result or value)
    if fact is not None:
        for zero in known.zeros(node):
            join = "Or" if fact.dtype.kind == "b" else "Add"
            value = b.op(join, value, b.cast(zero, fact.dtype.name))
    return b.op("Identity", value, result=result)


def gated_reads(b: LoweringBuilder, node: Node, known: KnownValues) -> dict[str, str]:
    """Names for what a node with bodies reads, checked where its results cannot be.

    Args:
        b: Writes the nodes.
        node: Has bodies.
        known: What has to be.

    Returns:
        Name of each floating-point value that is not constant to its new name; nothing where all
        results are tensors, or nothing is to be checked.
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
    """A 0-d integer zero that can only be computed where the value ``name`` is ``array``."""
    same = b.cast(b.op("Equal", name, b.constant(array)), "int64")
    least = b.op("ReduceMin", b.op("Reshape", same, b.constant([-1])), keepdims=1)
    # One element cannot be brought to the shape (0,), in any runtime.
    zero = b.op("Reshape", b.constant([0]), least, allowzero=1)
    # No quotes: they end the name in ONNX Runtime's messages.
    shown = np.array2string(array, threshold=8, separator=", ").replace("\n", "")
    label_last(b, f"{node.op} was unrolled for {name} = {shown}, as in the sample inputs")
    return b.op("Squeeze", zero)


class Origin:
    """The inputs and random draws that a value is computed from.

    Args:
        graph: Holds the value.
        facts: Sizes of the sample run.
        name: Of the value.

    Attributes:
        undecided: Inputs, and results drawn at random, that it depends on.
        sized: Whether sizes are among what decides it.
        varies: Whether another batch, or other weights, may lead to another value.
    """

    def __init__(self, graph: Graph, facts: Mapping[str, Fact], name: str) -> None:
        self._graph, self._name = graph, name
        self._nodes: list[Node] = []
        self._held: dict[str, Array] = {}
        self.undecided: list[str] = []
        self.sized = False
        waiting, seen = [name], {name}
        while waiting:
            value = waiting.pop()
            node = graph.producers.get(value)
            if value in graph.constants:
                self._held[value] = graph.constants[value]
            elif value in graph.fixed:
                self._held[value] = graph.fixed[value]
            elif node is None or draws(graph, node):
                self.undecided.append(value)
            elif node.op in ONLY_SHAPES and node.inputs[0] in facts:
                self._held[value] = _size(node, facts[node.inputs[0]])
                self.sized = True
            else:
                self._nodes.append(node)
                reads = dict.fromkeys((*node.inputs, *node.captures))
                new = [read for read in reads if read and read not in seen]
                waiting += new
                seen.update(new)
        fixed = not graph.fixed.keys().isdisjoint(self._held)
        weighed = any(array.dtype.kind == "f" for array in self._held.values())
        self.varies = self.sized or fixed or weighed

    def value(self) -> Array:
        """The value, where nothing is undecided."""
        if not self._nodes:
            return self._held[self._name]
        nodes = sorted(self._nodes, key=lambda node: self._graph.positions[node.name])
        return _evaluated(self._graph, nodes, self._held, self._name)

    def why_undecided(self) -> str:
        """The inputs that determine the value, and the remedy where there is one."""
        listed = ", ".join(f"'{value}'" for value in self.undecided)
        numbers = {entry.name for entry in self._graph.inputs if entry.is_setting}
        if not numbers.issuperset(self.undecided):
            return f"'{self._name}' depends on the data, through {listed}"
        return (
            f"'{self._name}' depends on {listed}: give a batch with its value, by "
            f"sample_inputs=… or --inputs, or make {listed} a constant of the file"
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
    held = {value: array for value, array in constants.items() if value in read}
    model = compact_model(nodes, [], [name], held, graph.opset, domains=graph.domains)
    session = Session(model, threads=1, optimize=False, what=f"the value of '{name}'")
    return session.run([name], {})[name]
