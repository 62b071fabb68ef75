"""Returns unused names for new values."""

from collections.abc import Iterable

import onnx

from kfac_engine.graph.passes.order import all_nodes


def taken_names(graph: onnx.GraphProto, others: Iterable[str] = ()) -> set[str]:
    """Return ``others`` and the names of all values of a graph and of its bodies."""
    names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    return names.union((entry.name for entry in graph.input), others)


def claim(name: str, used: set[str]) -> str:
    """Return ``name`` with underscores that make it unused, and add it to ``used``."""
    while name in used:
        name += "_"
    used.add(name)
    return name
