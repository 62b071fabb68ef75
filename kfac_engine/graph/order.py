"""Who makes and who reads which value: names checked, nodes brought into topological order."""

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx

from kfac_engine.errors import ModelError


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes``, each followed by those in its bodies."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from all_nodes(body.node)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the values that ``node`` needs, those that its bodies capture included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            yield from captures(body)


def captures(body: onnx.GraphProto) -> tuple[str, ...]:
    """Names of outer values that the body of an If, Loop or Scan reads, each once."""
    own = {entry.name for entry in (*body.input, *body.initializer)}
    own.update(name for node in body.node for name in node.output)
    wanted = (name for node in body.node for name in reads(node))
    results = (entry.name for entry in body.output)
    return tuple(dict.fromkeys(name for name in (*wanted, *results) if name not in own))


def describe(node: onnx.NodeProto) -> str:
    """``node`` for messages: its operator and its name, or what it makes if it has none."""
    made = next(iter(node.output), "nothing")
    return (
        f"{node.op_type} node '{node.name}'" if node.name else f"{node.op_type} that makes '{made}'"
    )


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Bring the nodes of ``graph`` into topological order, in place.

    Args:
        graph: Its inputs and initializers are what nodes can start from.

    Raises:
        ModelError: Two things have one name, a value is read that nothing makes, or values depend
            on themselves.
    """
    given = {entry.name for entry in graph.input} | {entry.name for entry in graph.initializer}
    made = {name for node in graph.node for name in node.output if name}
    _check_unique(graph)
    for node in graph.node:
        for name in reads(node):
            if name not in given and name not in made:
                raise ModelError(f"{describe(node)} reads '{name}', which nothing produces.")
    for output in graph.output:
        if output.name not in given and output.name not in made:
            raise ModelError(f"nothing produces the output '{output.name}' of the model.")
    ordered = _ordered(graph.node, given)
    # Most files are in order: leave those alone.
    if any(a is not b for a, b in zip(ordered, graph.node, strict=True)):
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del graph.node[:]
        graph.node.extend(copies)


def _check_unique(graph: onnx.GraphProto) -> None:
    for kind, names in {
        "graph inputs": (entry.name for entry in graph.input),
        "initializers": (entry.name for entry in graph.initializer),
        "outputs of the model": (entry.name for entry in graph.output),
    }.items():
        _refuse_repeated(names, kind)
    given = {entry.name for entry in (*graph.input, *graph.initializer)}
    made = (name for node in graph.node for name in node.output if name)
    _refuse_repeated((*given, *made), "values")


def _refuse_repeated(names: Iterable[str], kind: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ModelError(f"two {kind} have the name '{twice[0]}'; names must be unique.")


def _ordered(nodes: Iterable[onnx.NodeProto], given: Iterable[str]) -> list[onnx.NodeProto]:
    """``nodes`` so that each comes after those it reads from; otherwise in their old order."""
    known = set(given)
    waiting, ordered = list(nodes), []
    while waiting:
        later = []
        for node in waiting:
            if known.issuperset(reads(node)):
                known.update(node.output)
                ordered.append(node)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ModelError(
                f"the model has a cycle: the {describe(later[0])} depends on its own result."
            )
        waiting = later
    return ordered
