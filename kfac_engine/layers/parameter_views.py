"""Finds the graph values that consist of a parameter's entries.

A file may store the weights of several layers in one array, or transposed. This module applies
operators that move entries (``Transpose``, ``Slice``, ``Split``, …) to the positions of the
entries. The result is the position in the parameter of each entry of a value.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.node_builder import FLOAT_CODES
from kfac_engine.graph.structure import RELAYS, Graph, Node
from kfac_engine.layers.parameter_slices import all_entries

# Receives the positions of the operand's entries, the node, the constants and the shapes of the
# results; returns the positions of the entries of each result.
_Move: TypeAlias = Callable[
    [Array, Node, Mapping[str, Array], Sequence[tuple[int, ...]]], Sequence[Array]
]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterView:
    """A value of the graph as entries of a parameter."""

    parameter: str  # name of the parameter in the file
    index: Array  # row-major position of each entry in the parameter, in the shape of the value
    size: int  # number of entries of the parameter

    @property
    def in_order(self) -> bool:
        """Whether the value has all entries in the parameter's order, in any shape."""
        return self.index.size == self.size and _is_increasing(self.index)

    def same_as(self, other: "ParameterView") -> bool:
        """Return whether another value of the parameter has the same shape and entries."""
        return np.array_equal(self.index, other.index)

    def transpose_of(self, other: "ParameterView") -> bool:
        """Return whether the value is the transpose of another matrix of the parameter."""
        return self.index.ndim == 2 and np.array_equal(self.index.T, other.index)


def find_parameter_views(
    graph: Graph, parameters: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ParameterView]:
    """Find the values that consist of entries of parameters.

    The result maps the name of a value to its entries, each at most once. A parameter is included
    if such values depend on it. A value with entries of several parameters is included if it is
    only divided again; its ``parameter`` is then empty.
    """
    varying = of_data(graph)
    moves = [
        node
        for node in graph.nodes
        if node.inputs and _moves(node) and varying.isdisjoint(_settings(node))
    ]
    moved_first = {name for node in moves for name in _operands(node)}
    # The positions of all entries take as much memory as the parameter: only create needed ones.
    wholes = {name: all_entries(shapes[name]) for name in parameters if name in moved_first}
    views = {name: ParameterView(name, index, index.size) for name, index in wholes.items()}
    owners = tuple(views.values())
    for node in moves:
        operands = [views[name] for name in _operands(node) if name in views]
        if len(operands) == len(_operands(node)):
            moved = _moved(_joined(operands, node, owners), node, graph, shapes)
            views |= {name: _owned(view, owners) for name, view in moved.items() if name}
    for node in reversed(graph.nodes):
        for name in node.outputs:
            if name in views and not views[name].parameter and _is_read(name, graph, views):
                del views[name]
    return views


def is_move(node: Node, index: int, views: Mapping[str, ParameterView]) -> bool:
    """Return whether all results of a node consist of entries of the operand ``index``."""
    results = [name for name in node.outputs if name]
    is_rearranged = index == 0 or node.op == "Concat"
    return is_rearranged and bool(results) and all(name in views for name in results)


def rearrange_entries(
    entries: Array, node: Node, graph: Graph, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Apply a node that moves entries of its first operand to an array in the shape of the operand.

    The results are by name. There are none for another node, for one whose places are not constant,
    and for one that repeats entries.
    """
    unknown = any(name not in graph.constants for name in node.inputs[1:] if name)
    if not _moves(node) or node.op == "Concat" or (unknown and node.op in _BY_VALUE):
        return {}
    results = [shapes.get(name, ()) for name in node.outputs]
    arrays = _MOVES[node.op](entries, node, graph.constants, results)
    return dict(zip(node.outputs, arrays, strict=False))


def _is_increasing(index: Array) -> bool:
    flat = index.reshape(-1)
    return bool((flat[1:] > flat[:-1]).all()) if flat.size else True


def _moves(node: Node) -> bool:
    """Return whether a node moves entries without changing them; a Cast may round."""
    known = not node.domain and (node.op in _MOVES or node.op == "Concat")
    return known and (node.op != "Cast" or node.attributes.get("to") in FLOAT_CODES.values())


def _operands(node: Node) -> tuple[str, ...]:
    """Return the operands whose entries the node rearranges."""
    return node.inputs if node.op == "Concat" else node.inputs[:1]


def _settings(node: Node) -> tuple[str, ...]:
    """Return the operands that determine the rearrangement."""
    return () if node.op in ("CastLike", "Concat") else node.inputs[1:]


def _moved(
    view: ParameterView, node: Node, graph: Graph, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ParameterView]:
    """Return the views of a node's results by name.

    The map is empty if an operand is not constant or if entries are repeated.
    """
    if node.op == "Concat":
        once = np.unique(view.index).size == view.index.size
        return {node.outputs[0]: view} if once else {}
    indices = rearrange_entries(view.index, node, graph, shapes)
    return {
        name: ParameterView(view.parameter, index, view.size) for name, index in indices.items()
    }


# -- entries of several parameters -----------------------------------------------------------------

# In a value with entries of several parameters, an index is the position in the parameter plus this
# constant times the number of the parameter. Every parameter has fewer entries.
_OWNER = 1 << 40


def _joined(
    operands: Sequence[ParameterView], node: Node, owners: Sequence[ParameterView]
) -> ParameterView:
    """Return the concatenated operands of a Concat, or the only operand of another node."""
    first = operands[0]
    if len(operands) == 1:
        return first
    axis = int(str(node.attributes["axis"]))
    if all(view.parameter == first.parameter for view in operands):
        index = np.concatenate([view.index for view in operands], axis)
        return ParameterView(first.parameter, index, first.size)
    position = {owner.parameter: i for i, owner in enumerate(owners)}
    numbers = [view.index + _OWNER * np.int64(position.get(view.parameter, 0)) for view in operands]
    return ParameterView("", np.concatenate(numbers, axis), sum(view.size for view in operands))


def _owned(view: ParameterView, owners: Sequence[ParameterView]) -> ParameterView:
    """Return a view with its parameter if all entries belong to one, else the same view."""
    numbers = [] if view.parameter else np.unique(view.index // _OWNER).tolist()
    if len(numbers) != 1:
        return view
    owner = owners[numbers[0]]
    index = (view.index % _OWNER).astype(owner.index.dtype)
    return ParameterView(owner.parameter, index, owner.size)


def _is_read(name: str, graph: Graph, views: Mapping[str, ParameterView]) -> bool:
    """Return whether a node that is not a move reads a value."""
    users = graph.consumers.get(name, ())
    return not all(is_move(node, index, views) for node, index in users)


# -- moves -----------------------------------------------------------------------------------------


def _transpose(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    perm = cast("tuple[int, ...] | None", node.attributes.get("perm"))
    return [index.transpose(perm)]


def _slice(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    starts, ends, *options = (constants[name].tolist() if name else [] for name in node.inputs[1:])
    axes, steps = (*options, [], [])[:2]
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    box = [slice(None)] * index.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        box[axis] = slice(start, end, step)
    return [index[tuple(box)]]


def _split(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    axis = int(str(node.attributes.get("axis", 0)))
    ends = np.cumsum([shape[axis] for shape in results])
    return np.split(index, ends[:-1], axis)


def _gather(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    axis = int(str(node.attributes.get("axis", 0)))
    places = constants[node.inputs[1]] % index.shape[axis]
    return [index.take(places, axis)] if np.unique(places).size == places.size else []


_MOVES: Mapping[str, _Move] = {
    **dict.fromkeys(RELAYS, lambda index, node, constants, results: [index.reshape(results[0])]),
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}
# Operators whose operands after the first must be constants. Other operators need only the shape of
# their result.
_BY_VALUE = frozenset({"Gather", "Slice"})
