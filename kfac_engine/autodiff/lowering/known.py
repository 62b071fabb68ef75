"""Values that constants and sizes decide: trip counts, conditions, positions in a sequence.

A size is known from the sample run. What is written with its help is right for batches that lead to
the same values, so it is tied to a check, in nodes, which fails on all others.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.lowering.steps import label_last
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.runtime import Session
from kfac_engine.graph.structure import Fact, Graph, Node
from kfac_engine.graph.write import build_model, serialize

_RANDOM = frozenset(
    {"Bernoulli", "Multinomial"}
    | {f"Random{kind}{like}" for kind in ("Normal", "Uniform") for like in ("", "Like")}
)
_SIZES = frozenset({"Shape", "Size"})


class KnownValues:
    """What is decided without data, evaluated and remembered.

    Args:
        pen: Its graph and the facts of its sample run.

    Attributes:
        checks: Name to value of all that was asked for and took sizes or weights to decide.
    """

    def __init__(self, pen: Pen) -> None:
        self._pen = pen
        self.checks: dict[str, Array] = {}

    def get(self, name: str) -> Array | None:
        """A value of the graph; None if it depends on data or chance."""
        graph = self._pen.graph
        if name in graph.constants and graph.constants[name].dtype.kind != "f":
            return graph.constants[name]
        found = _decided(graph, self._pen.facts, name)
        if found is not None:
            self.checks[name] = found
        return found


def gated(pen: Pen, node: Node, value: str, checks: Mapping[str, Array], to: str) -> None:
    """Hand a value on as ``to``, unless something is not as it was in the sample run.

    Args:
        pen: Writes the nodes.
        node: What is rewritten, for messages.
        value: Result of the rewriting.
        checks: Names to what they have to be.
        to: A floating-point value of the graph gets a check; others are only handed on.
    """
    fact = pen.facts.get(to)
    if not to:
        return
    if not checks or fact is None or fact.dtype.kind != "f":
        pen.op("Identity", value, to=to)
        return
    for name, array in checks.items():
        value = pen.op("Add", value, _zero_if_same(pen, node, name, array, fact.dtype))
    pen.op("Identity", value, to=to)


def _zero_if_same(pen: Pen, node: Node, name: str, array: Array, dtype: DType) -> str:
    """A 0-d zero that can only be computed where the value ``name`` is ``array``."""
    same = pen.cast(pen.op("Equal", name, pen.constant(array)), "int64")
    least = pen.op("ReduceMin", pen.op("Reshape", same, pen.constant([-1])), keepdims=1)
    # One element cannot be brought to the shape (0,), in any runtime.
    zero = pen.op("Reshape", pen.constant(np.zeros(1, dtype)), least, allowzero=1)
    # No quotes: they end the name in ONNX Runtime's messages.
    shown = np.array2string(array, threshold=8, separator=", ").replace("\n", "")
    label_last(pen, f"{node.op} was unrolled for {name} = {shown}, as in the sample inputs")
    return pen.op("Squeeze", zero)


def _decided(graph: Graph, facts: Mapping[str, Fact], name: str) -> Array | None:
    """``name`` computed from constants and the sizes of the sample run, if that is possible."""
    constants = dict(graph.constants)
    nodes: list[Node] = []
    waiting, seen = [name], {name}
    while waiting:
        value = waiting.pop()
        node = graph.producers.get(value)
        if value in constants:
            continue
        if node is None or node.qualified_op in _RANDOM:
            return None
        if node.op in _SIZES and node.inputs[0] in facts:
            constants[value] = _size(node, facts[node.inputs[0]])
            continue
        nodes.append(node)
        reads = [read for read in (*node.inputs, *node.captures) if read and read not in seen]
        waiting += reads
        seen.update(reads)
    if not nodes:
        return constants[name]
    return _evaluated(graph, [node for node in graph.nodes if node in nodes], constants, name)


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
    model = build_model(nodes, [], [name], held, graph.opset, domains=graph.domains)
    session = Session(serialize(model), threads=1, what=f"the value of '{name}'")
    return session.run([name], {})[name]
