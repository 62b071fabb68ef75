"""Names for new values."""

from collections.abc import Iterable

import onnx

from kfac_engine.graph.passes.order import all_nodes


def taken_names(graph: onnx.GraphProto, others: Iterable[str] = ()) -> set[str]:
    """Names that a graph has given to values, in its bodies as well, and some others."""
    names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    return names.union((entry.name for entry in graph.input), others)


def claim(name: str, taken: set[str]) -> str:
    """``name``, or with lines behind it until it is free; it is taken from then on."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
