"""Parts of a graph: what some values are computed from, and what is computed from them."""

from collections.abc import Container, Iterable, Mapping

from kfac_engine._types import Array
from kfac_engine.graph.analysis.rearrangements import ONLY_SHAPES, RELAYS
from kfac_engine.graph.structure import Graph, Node

# A slice counts as all of its operand: so it is where it is the weight of a layer by itself.
_HAND_ON = RELAYS | {"Slice"}


def dependents(
    graph: Graph, sources: Iterable[str], stops: Container[str] = frozenset()
) -> frozenset[str]:
    """All values that are computed from some, these included.

    Args:
        graph: The whole.
        sources: Names of the values.
        stops: Operators whose results do not count.

    Returns:
        Their names.
    """
    values = set(sources)
    for node in graph.nodes:
        if not values.isdisjoint((*node.inputs, *node.captures)) and node.qualified_op not in stops:
            values.update(node.outputs)
    return frozenset(values - {""})


def of_data(graph: Graph, stops: Container[str] = frozenset()) -> frozenset[str]:
    """The inputs, and all values that are computed from them; ``stops`` as in ``dependents``."""
    return dependents(graph, (entry.name for entry in graph.inputs), stops)


def of_constants(graph: Graph) -> frozenset[str]:
    """The constants, and all values that are computed from them and from shapes alone."""
    known = set(graph.constants)
    for node in graph.nodes:
        operands = node.inputs[:1] if node.op == "CastLike" else node.inputs
        if known.issuperset(filter(None, (*operands, *node.captures))):
            known.update(node.outputs)
    return frozenset(known - {""})


def read_by(
    nodes: Iterable[Node], constants: Mapping[str, Array], *, excluded: Container[str]
) -> dict[str, Array]:
    """Those constants that the nodes read (bodies included), but the excluded."""
    reads = {name for node in nodes for name in (*node.inputs, *node.captures)}
    return {n: array for n, array in constants.items() if n in reads and n not in excluded}


def handed_on(graph: Graph, value: str) -> str:
    """The first value on the way to ``value`` along nodes that only hand it on."""
    maker = graph.producers.get(value)
    while maker is not None and maker.qualified_op in _HAND_ON:
        value = maker.inputs[0]
        maker = graph.producers.get(value)
    return value


class SubGraph:
    """All ancestors of some values, these included.

    Args:
        graph: The whole.
        ends: Names of the values.

    Attributes:
        nodes: The nodes it is made of, in topological order.
    """

    def __init__(self, graph: Graph, ends: Iterable[str]) -> None:
        members = set(ends)
        nodes: list[Node] = []
        for node in reversed(graph.nodes):
            if members.intersection(node.outputs):
                members.update(name for name in (*node.inputs, *node.captures) if name)
                nodes.append(node)
        self.nodes = tuple(reversed(nodes))
        self._members = frozenset(members)
        self._readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys((*node.inputs, *node.captures)):
                self._readers.setdefault(name, []).append(node)

    def is_member(self, name: str) -> bool:
        """Whether a value is an ancestor, or one of the values themselves."""
        return name in self._members

    def filter_list(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of ``names`` that are members, in their order."""
        return tuple(name for name in names if self.is_member(name))

    def variable_uses(self, name: str) -> int:
        """Number of nodes that read a value; a node that only hands it on counts as its readers."""
        count, waiting = 0, [name]
        while waiting:
            for node in self._readers.get(waiting.pop(), ()):
                if node.qualified_op in _HAND_ON:
                    waiting.append(node.outputs[0])
                elif node.qualified_op not in ONLY_SHAPES:
                    count += 1
        return count
