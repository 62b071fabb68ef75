"""Checks the names of values, finds unused ones, and sorts nodes in topological order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import onnx

from kfac_engine.errors import ModelError


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of an If, Loop or Scan; other nodes have none."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield ``nodes``, each followed by the nodes in its bodies."""
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from all_nodes(body.node)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of values that ``node`` or its bodies read."""
    yield from (name for name in node.input if name)
    for body in bodies_of(node):
        yield from captures(body)


def captures(body: onnx.GraphProto) -> tuple[str, ...]:
    """Return the names of outer values that the body of an If, Loop or Scan reads, each once."""
    inner = {entry.name for entry in (*body.input, *body.initializer)}
    inner.update(name for node in body.node for name in node.output)
    wanted = (name for node in body.node for name in reads(node))
    results = (entry.name for entry in body.output)
    return tuple(dict.fromkeys(name for name in (*wanted, *results) if name not in inner))


def label_of(node: onnx.NodeProto) -> str:
    """Return a description of a node for messages: its operator, and its name or first result."""
    result = next(iter(node.output), "nothing")
    return (
        f"{node.op_type} node '{node.name}'"
        if node.name
        else f"{node.op_type} that computes '{result}'"
    )


def refuse_repeated(names: Iterable[str], kind: str, remedy: str = "") -> None:
    """Raise a ModelError if two names are equal; ``kind`` is the plural noun for the names."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        advice = f"; {remedy}" if remedy else ""
        raise ModelError(f"two {kind} of the model have the name '{twice[0]}'{advice}.")


def sort_nodes(graph: onnx.GraphProto, remedy: str = "") -> None:
    """Sort the nodes of ``graph`` in topological order, in place.

    A name with two definitions, a value without a producer, and a value that depends on itself
    raise ModelError. ``remedy`` says what to do about a name with two definitions.
    """
    inputs = [entry.name for entry in graph.input]
    outputs = [entry.name for entry in graph.output]
    sources = {*inputs, *(entry.name for entry in graph.initializer)}
    results = [name for node in graph.node for name in node.output if name]
    refuse_repeated(inputs, "inputs")
    refuse_repeated(outputs, "outputs")
    refuse_repeated([*sources, *results], "values", remedy)
    if not outputs:
        raise ModelError("the model has no output.")
    known = sources.union(results)
    for node in graph.node:
        for name in reads(node):
            if name not in known:
                raise ModelError(f"the {label_of(node)} reads '{name}', which no node computes.")
    for name in outputs:
        if name not in known:
            raise ModelError(f"no node computes the output '{name}' of the model.")
    before = _dependencies(graph.node)
    # Most files are sorted, and need no search for an order.
    if any(index <= max(earlier, default=-1) for index, earlier in before.items()):
        ordered = [graph.node[index] for index in _order(before, graph.node)]
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del graph.node[:]
        graph.node.extend(copies)


def _dependencies(nodes: Iterable[onnx.NodeProto]) -> dict[int, set[int]]:
    """Return the indices of the nodes that each node depends on."""
    nodes = tuple(nodes)
    makers = {name: index for index, node in enumerate(nodes) for name in node.output}
    return {
        index: {makers[name] for name in reads(node) if name in makers}
        for index, node in enumerate(nodes)
    }


def _order(before: Mapping[int, set[int]], nodes: Sequence[onnx.NodeProto]) -> list[int]:
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as failure:
        cycle = failure.args[1]
        raise ModelError(
            f"the model has a cycle: the {label_of(nodes[cycle[0]])} reads its own result, through "
            f"{len(cycle) - 2} other nodes."
        ) from failure


# -- unused names ----------------------------------------------------------------------------------


def taken_names(graph: onnx.GraphProto, others: Iterable[str] = ()) -> set[str]:
    """Return ``others`` and the names of all values in a graph and its bodies."""
    names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    return names.union((entry.name for entry in graph.input), others)


def claim(name: str, used: set[str]) -> str:
    """Return ``name`` with underscores that make it unused, and add it to ``used``."""
    while name in used:
        name += "_"
    used.add(name)
    return name
