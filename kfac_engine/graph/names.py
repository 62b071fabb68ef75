"""Finds free names for new values."""

from collections.abc import Iterable

import onnx

from kfac_engine.graph.passes.order import all_nodes


def taken_names(graph: onnx.GraphProto, others: Iterable[str] = ()) -> set[str]:
    """Return the names of all values of a graph and of its bodies, with those of ``others``."""
    names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    return names.union((entry.name for entry in graph.input), others)


def claim(name: str, taken: set[str]) -> str:
    """Append underscores to ``name`` until it is free; add it to ``taken`` and return it."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
