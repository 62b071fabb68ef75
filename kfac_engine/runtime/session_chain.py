"""Runs a long graph as a chain of short sessions.

The time to build a session grows faster than its number of nodes. It is 2.5 s for 30,000 nodes and
28 s for 100,000 nodes. As sessions of 2,000 nodes, 30,000 nodes take 0.7 s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kfac_engine._types import Array
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Graph, Input, Node
from kfac_engine.sessions.session import Session

_MOST_NODES = (
    2000  # nodes of a session; with 500 a run takes 10 % less time, with 8,000 a third more
)


@dataclass(frozen=True, slots=True)
class _Link:
    """A session of successive nodes in a chain; ``end`` is the index of the first node after it."""

    session: Session
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    end: int


class Chain:
    """Runs nodes of a graph, in topological order, on inputs of different sizes.

    A run returns ``outputs``, which are results and constants. ``what`` describes the graph in
    messages. ``BackendError`` is raised if ONNX Runtime refuses the graph.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str
    ) -> None:
        self._outputs = tuple(outputs)
        self._constants = {n: graph.constants[n] for n in self._outputs if n in graph.constants}
        self._last = _last_readers(nodes)
        self._links = tuple(_links(graph, nodes, self._outputs, what, with_shapes=False))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for the inputs ``feeds``, as read-only arrays.

        ``BackendError`` is raised if an operator failed, usually because the sizes of the feeds do
        not fit.
        """
        values, outputs = dict(feeds), dict(self._constants)
        for link in self._links:
            results = link.session.run(link.outputs, {name: values[name] for name in link.reads})
            outputs.update(results)
            values.update(results)
            values = {n: array for n, array in values.items() if self._last.get(n, -1) >= link.end}
        return {name: outputs[name] for name in self._outputs}


def inferred(
    graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str
) -> dict[str, Input]:
    """Return the element types and shapes of results that ONNX Runtime infers without a run.

    Only numeric results are returned. A shape is empty for scalars and for unknown ranks. ``what``
    describes the graph in messages. ``BackendError`` is raised if ONNX Runtime refuses the graph.
    """
    names = tuple(outputs)
    declared: dict[str, Input] = {}
    for link in _links(graph, nodes, names, what, with_shapes=True):
        types, shapes = link.session.output_dtypes, link.session.output_shapes
        declared |= {name: Input(name, dtype, shapes[name]) for name, dtype in types.items()}
    return {name: declared[name] for name in names if name in declared}


def _links(
    graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str, *, with_shapes: bool
) -> Iterator[_Link]:
    """Yield the sessions in order, with inferred shapes of their inputs if ``with_shapes``."""
    wanted, last = frozenset(outputs), _last_readers(nodes)
    known = {entry.name: entry for entry in graph.inputs}
    # Each session creates threads, so a hundred sessions would create thousands of threads.
    threads = 0 if len(nodes) <= _MOST_NODES else 1
    start, size = 0, _MOST_NODES
    while start < len(nodes):
        few, end = nodes[start : start + size], start + size
        results = [name for node in few for name in node.outputs if name]
        passed_on = {name for name in results if last.get(name, -1) >= end}
        fetched = [name for name in results if name in wanted or name in passed_on]
        link = _link(_part(graph, known, few, fetched), end, threads, what)
        types, shapes = link.session.output_dtypes, link.session.output_shapes
        if types.keys() >= passed_on:
            yield link
            for name in passed_on:
                shape = shapes[name] if with_shapes else ()
                known[name] = Input(name, types[name], shape or None)  # () may be an unknown rank
            start, size = end, _MOST_NODES
        else:  # a sequence cannot be an input of the next session
            size *= 2


def _part(
    graph: Graph, known: Mapping[str, Input], nodes: Sequence[Node], outputs: Iterable[str]
) -> Graph:
    """Return the graph of some nodes, with the inputs and the constants that they read."""
    read = dict.fromkeys(n for node in nodes for n in (*node.inputs, *node.captures))
    constants = {n: graph.constants[n] for n in read if n in graph.constants and n not in known}
    return replace(
        graph,
        nodes=tuple(nodes),
        inputs=tuple(known[name] for name in read if name in known),
        outputs=tuple(outputs),
        constants=constants,
    )


def _link(part: Graph, end: int, threads: int, what: str) -> _Link:
    model = compact_model(
        part.nodes,
        part.inputs,
        part.outputs,
        part.constants,
        part.opset,
        name=part.name,
        domains=part.domains,
        once=True,
    )
    session = Session(model, threads=threads, optimize=False, once=True, what=what)
    return _Link(session, tuple(entry.name for entry in part.inputs), part.outputs, end)


def _last_readers(nodes: Sequence[Node]) -> dict[str, int]:
    """Return a map from each value to the index of the last node that reads it."""
    return {
        name: index for index, node in enumerate(nodes) for name in (*node.inputs, *node.captures)
    }
