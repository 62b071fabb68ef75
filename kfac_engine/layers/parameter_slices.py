"""Slices of parameters: values of a graph that consist of entries of a parameter.

A file may store the weights of several layers in one array, or transposed. This module applies
operators that move entries (``Transpose``, ``Slice``, ``Split``, …) to the positions of the
entries. The result is the position in the parameter of each entry of a value.

The axes of an array in a file have no meaning by themselves: a weight may be transposed, reshaped
or joined with other weights. The layer that reads the entries knows which of them compute one
output. A formula that treats weights as matrices asks their pieces.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

import numpy as np

from kfac_engine._types import Array, Rows, entries
from kfac_engine.backend.namespace import array_module, on_device
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import RELAYS, Graph, Node
from kfac_engine.layers.grouped import StackedDensePacking
from kfac_engine.layers.packing import Packing

Entries = TypeVar("Entries", Array, Array | Rows)

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


@dataclass(slots=True, eq=False)
class ParameterSlice:
    """Entries of a parameter that form a parameter of a block."""

    name: str  # name of the value in the graph, which is the parameter name of the block
    # Row-major position of each entry in the parameter, in the shape of the value; None for all
    # entries in the order of the parameter. Do not change it.
    index: Array | None = None
    # Copy of ``index`` on a device, which the first use of an array of that device creates.
    _device_index: Array | None = field(default=None, init=False, repr=False)

    def read(self, array: Entries) -> Entries:
        """Return the entries of an array in the shape of the value.

        The array has the shape of the parameter. A slice with all entries also reads rows of the
        array.
        """
        if self.index is None or isinstance(array, Rows):
            return array
        return array.reshape(-1)[self._index_for(array)]

    def write(self, flat: Array, entries: Array) -> None:
        """Set the entries in ``flat``, which has all entries of the parameter, in place."""
        flat[... if self.index is None else self._index_for(flat)] = entries

    def _index_for(self, array: Array) -> Array:
        """Return ``index`` in the memory space of an array."""
        assert self.index is not None, "callers read all entries without an index"
        if not on_device(array):
            return self.index
        if self._device_index is None:
            self._device_index = array_module(array).asarray(self.index)
        return self._device_index


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


def split(
    parts: Mapping[str, Sequence[ParameterSlice]], arrays: Mapping[str, Entries]
) -> dict[str, Entries]:
    """Divide arrays in the shapes of parameters into slices.

    The result maps the name of a slice to its array. Rows of a parameter that is one slice stay
    rows.
    """
    return {part.name: part.read(array) for name, array in arrays.items() for part in parts[name]}


def is_whole(parts: Sequence[ParameterSlice]) -> bool:
    """Return whether a parameter has a single slice, of all its entries."""
    return len(parts) == 1 and parts[0].index is None


def join(
    parts: Sequence[ParameterSlice], arrays: Mapping[str, Entries], like: Entries, rest: float
) -> Entries:
    """Assemble an array in the shape of a parameter; the inverse of ``split``.

    ``arrays`` maps the name of a slice to its array. Entries in no slice are the entries of
    ``like``, which has the shape of the parameter, times ``rest``.
    """
    if is_whole(parts) or isinstance(like, Rows):
        return arrays[parts[0].name]
    joined: Array = (like * rest).astype(like.dtype).reshape(-1)
    for part in parts:
        part.write(joined, entries(arrays[part.name]))
    return joined.reshape(like.shape)


def describe(index: Array, shape: tuple[int, ...]) -> str:
    """Return text for entries of an array: ``[0:4, :]`` for a box, otherwise their number.

    ``index`` has the row-major positions of the entries in an array of the shape.
    """
    places = [np.unique(place) for place in np.unravel_index(index.reshape(-1), shape)]
    steps = [np.unique(np.diff(place)) for place in places]
    if np.prod([place.size for place in places]) != index.size or any(s.size > 1 for s in steps):
        return f"[{index.size} of {int(np.prod(shape))} entries]"
    return f"[{', '.join(_range(p, size) for p, size in zip(places, shape, strict=True))}]"


def _range(places: Array, size: int) -> str:
    if places.size == size:
        return ":"
    step = int(places[1] - places[0]) if places.size > 1 else 1
    text = f"{places[0]}:{places[-1] + 1}"
    return text if step == 1 else f"{text}:{step}"


def all_entries(shape: tuple[int, ...]) -> Array:
    """Return the row-major position of each entry of an array."""
    size = int(np.prod(shape, dtype=np.int64))
    return np.arange(size, dtype=np.int32 if size < 2**31 else np.int64).reshape(shape)


def _is_increasing(index: Array) -> bool:
    flat = index.reshape(-1)
    return bool((flat[1:] > flat[:-1]).all()) if flat.size else True


def _moves(node: Node) -> bool:
    """Return whether a node moves entries without changing them; a Cast may round."""
    known = not node.domain and (node.op in _MOVES or node.op == "Concat")
    return known and (node.op != "Cast" or node.attributes.get("to") in _FLOAT_CODES)


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


def _reshape(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del node, constants
    return [index.reshape(results[0])]


def _transpose(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del constants, results
    perm = cast("tuple[int, ...] | None", node.attributes.get("perm"))
    return [index.transpose(perm)]


def _slice(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del results
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
    del constants
    axis = int(str(node.attributes.get("axis", 0)))
    ends = np.cumsum([shape[axis] for shape in results])
    return np.split(index, ends[:-1], axis)


def _gather(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del results
    axis = int(str(node.attributes.get("axis", 0)))
    places = constants[node.inputs[1]] % index.shape[axis]
    return [index.take(places, axis)] if np.unique(places).size == places.size else []


_MOVES: Mapping[str, _Move] = {
    **dict.fromkeys(RELAYS, _reshape),
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}
_FLOAT_CODES = frozenset({1, 10, 11, 16})  # TensorProto.DataType of float32, 16, 64 and bfloat16
# Operators whose further operands must be constants; other operators need the shape of the result
# only.
_BY_VALUE = frozenset({"Gather", "Slice"})


@dataclass(frozen=True, slots=True)
class Piece:
    """The entries of a parameter that a layer uses; for a weight, some of its outputs only."""

    part: ParameterSlice  # the entries
    kind: str  # kind of the layer; ``"generic"`` without a layer
    # Packing of the layer, for its weight; None for biases, scales and parameters without a layer,
    # which are vectors.
    packing: Packing | None = None
    weight: str = ""  # name of the weight of the layer; empty for vectors

    def matrices(self, array: Array, *, copy: bool = True) -> Array:
        """Return the matrices of the weight in ``array``, which has the shape of the parameter.

        The result is ``(groups, inputs, outputs)``, a new array: a matrix for each map from inputs
        to outputs, such as a group of a convolution or an expert. The inputs of a convolution,
        transposed or not, are ordered by tap, then by channel; the outputs are channels. Without
        ``copy``, it may be a view.
        """
        assert self.packing is not None, "vectors have no matrices"
        return self.packing.matrices(self.part.read(array), array_module(array), copy=copy)

    def plain_matrix(self, array: Array) -> Array | None:
        """Return the only matrix of the weight as a view: see ``Packing.plain_matrix``."""
        assert self.packing is not None, "vectors have no matrices"
        return self.packing.plain_matrix(array) if self.part.index is None else None

    def divided(self, shape: tuple[int, ...], columns: Sequence[Array]) -> tuple["Piece", ...]:
        """Divide the matrices of the weight, a parameter of ``shape``, by columns.

        ``columns`` are the columns of each new piece; without columns there is one piece. The
        arrays of the new pieces are their matrices.
        """
        if self.packing is None or not columns:
            return (self,)
        matrices = self.matrices(all_entries(shape))
        packing = StackedDensePacking("IO", has_bias=False)
        return tuple(
            Piece(
                ParameterSlice(f"{self.part.name} part {i}", matrices[..., c]),
                self.kind,
                packing,
                self.weight,
            )
            for i, c in enumerate(columns)
        )

    def array(self, matrices: Array, like: Array) -> Array:
        """Return an array in the shape and type of ``like``; the inverse of ``matrices``.

        Entries of the parameter that are not in the piece are zero.
        """
        assert self.packing is not None, "vectors have no matrices"
        weight = self.packing.from_matrices(matrices, self.part.read(like))
        if self.part.index is None:
            return weight
        whole: Array = array_module(like).zeros(like.size, like.dtype)
        self.part.write(whole, weight)
        return whole.reshape(like.shape)
