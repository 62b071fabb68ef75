"""Sample runs of a long graph as a chain of short sessions, each handing its results to the next.

Making a session takes time that grows faster than its nodes: 2.5 s for 30,000 and 28 s for 100,000,
but 0.7 s for 30,000 in sessions of 2,000.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kfac_engine._types import Array
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Graph, Input, Node
from kfac_engine.sessions.session import Session

_MOST_NODES = 2000  # of one session; with 500 a run takes 10 % less time, with 8,000 a third more


@dataclass(frozen=True, slots=True)
class _Link:
    """A session of a chain.

    Attributes:
        session: Runs some successive nodes.
        reads: The values it is fed.
        outputs: The values it returns.
        end: The index of the first node behind it.
    """

    session: Session
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    end: int


class Chain:
    """Runs nodes of a graph on inputs of several sizes.

    Args:
        graph: Has the inputs and the constants.
        nodes: In topological order.
        outputs: Results of the nodes that a run returns.
        what: What the graph is, for messages.

    Raises:
        BackendError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str
    ) -> None:
        self._outputs = tuple(outputs)
        self._last = _last_readers(nodes)
        self._links = tuple(_links(graph, nodes, self._outputs, what, with_shapes=False))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate the outputs.

        Args:
            feeds: One array for each input of the graph.

        Returns:
            Name to a read-only array.

        Raises:
            BackendError: An operator failed, usually because the sizes of the feeds do not fit.
        """
        held, found = dict(feeds), {}
        for link in self._links:
            results = link.session.run(link.outputs, {name: held[name] for name in link.reads})
            found.update(results)
            held.update(results)
            held = {n: array for n, array in held.items() if self._last.get(n, -1) >= link.end}
        return {name: found[name] for name in self._outputs}


def inferred(
    graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str
) -> dict[str, Input]:
    """Element types and shapes that ONNX Runtime infers, without a run.

    Args:
        graph: Has the inputs and the constants.
        nodes: In topological order.
        outputs: Results of the nodes.
        what: What the graph is, for messages.

    Returns:
        Output to its declaration, for arrays of numbers. An unknown rank looks like that of a
        scalar, whose shape has no entries.

    Raises:
        BackendError: ONNX Runtime refuses the graph.
    """
    wanted = tuple(outputs)
    found: dict[str, Input] = {}
    for link in _links(graph, nodes, wanted, what, with_shapes=True):
        types, shapes = link.session.output_dtypes, link.session.output_shapes
        found |= {name: Input(name, dtype, shapes[name]) for name, dtype in types.items()}
    return {name: found[name] for name in wanted if name in found}


def _links(
    graph: Graph, nodes: Sequence[Node], outputs: Iterable[str], what: str, *, with_shapes: bool
) -> Iterator[_Link]:
    """The sessions in order; ``with_shapes`` declares inferred shapes of values between them."""
    wanted, last = frozenset(outputs), _last_readers(nodes)
    known = {entry.name: entry for entry in graph.inputs}
    # Each session has threads of its own: a hundred sessions would have thousands.
    threads = 0 if len(nodes) <= _MOST_NODES else 1
    start, size = 0, _MOST_NODES
    while start < len(nodes):
        few, end = nodes[start : start + size], start + size
        made = [name for node in few for name in node.outputs if name]
        handed = {name for name in made if last.get(name, -1) >= end}
        fetched = [name for name in made if name in wanted or name in handed]
        link = _link(_part(graph, known, few, fetched), end, threads, what)
        types, shapes = link.session.output_dtypes, link.session.output_shapes
        if types.keys() >= handed:
            yield link
            for name in handed:
                shape = shapes[name] if with_shapes else ()
                known[name] = Input(name, types[name], shape or None)  # () may be an unknown rank
            start, size = end, _MOST_NODES
        else:  # a sequence cannot be handed on
            size *= 2


def _part(
    graph: Graph, known: Mapping[str, Input], nodes: Sequence[Node], outputs: Iterable[str]
) -> Graph:
    """A graph of some nodes, with the inputs and the constants that they read."""
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
    """Value name to the index of the last node that reads it."""
    return {
        name: index for index, node in enumerate(nodes) for name in (*node.inputs, *node.captures)
    }
