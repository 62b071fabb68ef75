"""Finds the parts of the outputs of a layer that a graph reads apart.

One product may compute what several could: queries, keys and values, or the gates of a recurrence.
Its weight is then several matrices side by side.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.analysis.rearrangements import ONLY_SHAPES
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.layers.match import LayerMatch
from kfac_engine.layers.parameter_slices import rearrange_entries

# The weights of these layers are vectors, a matrix for each group, or read in two ways.
_WITHOUT_PARTS = {
    "grouped_convolution", "grouped_convolution_multi", "scale_and_shift", "shift",
    "tied_embedding",
}  # fmt: skip
# A feature of the result depends on the same feature of an operand. A division after the operator
# is one before it.
_BY_FEATURE = {"Add", "Clip", "Relu", "Sigmoid", "Sub", "Tanh"}


def output_parts(
    graph: Graph, layer: LayerMatch, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Array, ...]:
    """Return the parts into which all uses of a layer divide its outputs.

    Args:
        graph: The graph.
        layer: A layer.
        shapes: Shape of every value.

    Returns:
        Indices of the outputs of each part; every output is in one part. Empty if an operator reads
        all outputs, or reads outputs of several parts.
    """
    if layer.kind in _WITHOUT_PARTS:
        return ()
    names = (layer.outputs,) if isinstance(layer.outputs, str) else layer.outputs
    channels_first = str(layer.options.get("data_format", "")).startswith("NC")
    axis = 1 if channels_first else cast("int", layer.options.get("feature_axis", -1))
    width, read = shapes[names[0]][axis], []
    for name in names:
        shape = shapes[name]
        numbers = np.arange(width).reshape(-1, *[1] * (len(shape) - 1 - axis % len(shape)))
        for part in _read_parts(graph, name, np.broadcast_to(numbers, shape), shapes):
            if part.size == width:
                return ()
            read.append(part)
    parts: list[Array] = []
    owner = np.full(width, -1)  # an output to the number of its part
    for part in sorted(read, key=len, reverse=True):
        owners = np.unique(owner[part]).tolist()
        if len(owners) > 1:
            return ()
        if owners == [-1]:
            owner[part] = len(parts)
            parts.append(part)
    return () if -1 in owner else tuple(parts)


def _read_parts(
    graph: Graph, name: str, features: Array, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Array]:
    """Yield the features that are read together, once for each operator that computes with them.

    Args:
        graph: The graph.
        name: Name of a value.
        features: Number of the feature of each entry of the value.
        shapes: Shape of every value.
    """
    queue, reached = [(name, features)], {name: [features]}
    for value, entries in queue:
        users = [(n, i) for n, i in graph.consumers.get(value, ()) if n.op not in ONLY_SHAPES]
        following = [_following(graph, node, index, entries, shapes) for node, index in users]
        if value in graph.results or not users or not all(following):
            varying = tuple(slice(None if stride else 1) for stride in entries.strides)
            yield np.unique(entries[varying])
        for result, array in (item for results in following for item in results.items()):
            known = reached.setdefault(result, [])
            if not any(np.array_equal(array, other) for other in known):
                known.append(array)
                queue.append((result, array))


def _following(
    graph: Graph, node: Node, index: int, entries: Array, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Return the features of the results of a node; empty if it computes with several features."""
    if node.op in _BY_FEATURE and not node.domain and index >= 0:
        return {node.outputs[0]: np.broadcast_to(entries, shapes[node.outputs[0]])}
    return rearrange_entries(entries, node, graph, shapes) if index == 0 else {}
