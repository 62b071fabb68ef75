"""Determines the ancestors and descendants of a graph's values."""

from collections.abc import Container, Iterable, Mapping

from kfac_engine._types import Array
from kfac_engine.graph.structure import ONLY_SHAPES, RELAYS, Graph, Node, values_read

# Operators whose result represents their operand. A slice of a weight may be the weight of a layer.
PASS_ON = RELAYS | {"Slice"}


def dependents(
    nodes: Iterable[Node],
    sources: Iterable[str],
    stops: Container[str] = frozenset(),
    cut: Container[str] = frozenset(),
) -> frozenset[str]:
    """Return the names of ``sources`` and of all values that depend on them.

    Nodes are in topological order. Results of the operators in ``stops`` and the values in ``cut``
    are not followed.
    """
    values = set(sources)
    for node in nodes:
        if not values.isdisjoint((*node.inputs, *node.captures)) and node.qualified_op not in stops:
            values.update(name for name in node.outputs if name not in cut)
    return frozenset(values - {""})


def of_data(graph: Graph, stops: Container[str] = frozenset()) -> frozenset[str]:
    """Return the inputs and all values that depend on them; ``stops`` as in ``dependents``."""
    return dependents(graph.nodes, (entry.name for entry in graph.inputs), stops)


def of_constants(graph: Graph) -> frozenset[str]:
    """Return the constants and all values that depend on constants and shapes only."""
    known = set(graph.constants)
    for node in graph.nodes:
        operands = node.inputs[:1] if node.op == "CastLike" else node.inputs
        if known.issuperset(filter(None, (*operands, *node.captures))):
            known.update(node.outputs)
    return frozenset(known - {""})


def final_outputs(graph: Graph, outputs: Iterable[str]) -> list[str]:
    """Return the outputs from which no other output is computed, in their order.

    States of attention, hidden states and attention weights are on the way to an output. A copy of
    such a value, or a rearrangement of it, is too.
    """
    outputs = list(outputs)
    sources = {name: graph.source(name, RELAYS) for name in outputs}
    final = []
    for name in outputs:
        after = dependents(graph.nodes, [sources[name]])
        if not any(o != name and s != sources[name] and s in after for o, s in sources.items()):
            final.append(name)
    return final


def read_by(
    nodes: Iterable[Node], constants: Mapping[str, Array], *, excluded: Container[str]
) -> dict[str, Array]:
    """Return the constants that nodes and their bodies read, without ``excluded`` names."""
    reads = values_read(nodes)
    return {n: array for n, array in constants.items() if n in reads and n not in excluded}


class SubGraph:
    """The part of a graph that the values ``ends`` depend on.

    Its ``nodes`` are in topological order.
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
        """Return whether a value is one of the ends or an ancestor of one."""
        return name in self._members

    def filter_list(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names in ``names`` that belong to the subgraph, in the order of ``names``."""
        return tuple(name for name in names if self.is_member(name))

    def variable_uses(self, name: str) -> int:
        """Return the number of nodes that read a value, directly or through a Reshape or Slice."""
        count, views = 0, [name]
        passed_on: set[str] = set()
        for view in views:  # the loop appends to the list
            for node in self._readers.get(view, ()):
                if node.qualified_op in PASS_ON:
                    views += [result for result in node.outputs if result not in passed_on]
                    passed_on.update(node.outputs)
                elif node.qualified_op not in ONLY_SHAPES:
                    count += 1
        return count
