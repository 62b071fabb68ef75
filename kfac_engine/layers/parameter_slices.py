"""Parts of parameters: values of a graph that hold some or all entries of one, in another order.

A file may keep the weights of several layers in one array, or turned around. What moves entries
about without changing them (``Transpose``, ``Slice``, ``Split``, …) is done here to the numbers of
the entries: so each value knows where its entries lie in the file's parameter.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.graph.analysis.rearrangements import RELAYS
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import Graph, Node

# Takes the numbers of the operand's entries, the node, the constants and the shapes of the results;
# returns the numbers of the entries of each result.
_Move: TypeAlias = Callable[
    [Array, Node, Mapping[str, Array], Sequence[tuple[int, ...]]], Sequence[Array]
]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The entries of a parameter that a value holds.

    Attributes:
        parameter: Name in the file.
        index: Place of each entry in the parameter, counted row-major; in the value's shape.
        size: Entries of the parameter.
    """

    parameter: str
    index: Array
    size: int

    @property
    def in_order(self) -> bool:
        """Whether it holds all entries in the parameter's order, whatever its shape."""
        return self.index.size == self.size and _counts(self.index)

    def same_as(self, other: "Held") -> bool:
        """Whether another value of the same parameter has the same entries in the same places."""
        return np.array_equal(self.index, other.index)

    def transpose_of(self, other: "Held") -> bool:
        """Whether it is another matrix of the same parameter, turned around."""
        return self.index.ndim == 2 and np.array_equal(self.index.T, other.index)


@dataclass(slots=True, eq=False)
class ParameterSlice:
    """Entries of a parameter that form a parameter of a block.

    Attributes:
        name: Name of the value in the graph; blocks name their parameter by it.
        index: Row-major position of each entry in the parameter, in the shape of the value; None
            for all entries in the order of the parameter. Do not change it.
    """

    name: str
    index: Array | None = None
    # Copy of ``index`` on a device, which the first use of an array of that device creates.
    _device_index: Array | None = field(default=None, init=False, repr=False)

    def read(self, array: Array) -> Array:
        """Return the entries of an array in the shape of the parameter.

        Args:
            array: An array of the host or of a device, in the shape of the parameter.

        Returns:
            The entries, in the shape of the value.
        """
        return array if self.index is None else array.reshape(-1)[self._index_for(array)]

    def write(self, flat: Array, entries: Array) -> None:
        """Set the entries of an array, in place.

        Args:
            flat: A flat array with as many entries as the parameter.
            entries: New entries, in the shape of the value.
        """
        flat[... if self.index is None else self._index_for(flat)] = entries

    def _index_for(self, array: Array) -> Array:
        """The index in the memory space of an array."""
        assert self.index is not None, "callers read all entries without an index"
        if isinstance(array, np.ndarray):
            return self.index
        if self._device_index is None:
            self._device_index = array_module(array).asarray(self.index)
        return self._device_index


def held_values(
    graph: Graph, parameters: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Held]:
    """Values that consist of entries of parameters, and the parameters they come from.

    Args:
        graph: The graph.
        parameters: Names of constants.
        shapes: Shape of every value.

    Returns:
        Value to what it holds, entries once each. A parameter is listed if such values come of it.
        A value with entries of several parameters is listed where it is only taken apart again;
        its ``parameter`` is empty.
    """
    varying = of_data(graph)
    moves = [
        node
        for node in graph.nodes
        if node.inputs and _moves(node) and varying.isdisjoint(_settings(node))
    ]
    moved_first = {name for node in moves for name in _operands(node)}
    # The numbers of all entries are an array as large as the parameter: only where one is needed.
    found = {name: _all_entries(name, shapes[name]) for name in parameters if name in moved_first}
    owners = tuple(found.values())
    for node in moves:
        operands = [found[name] for name in _operands(node) if name in found]
        if len(operands) == len(_operands(node)):
            moved = _moved(_joined(operands, node, owners), node, graph, shapes)
            found |= {name: _owned(held, owners) for name, held in moved.items() if name}
    for node in reversed(graph.nodes):
        for name in node.outputs:
            if name in found and not found[name].parameter and _is_read(name, graph, found):
                del found[name]
    return found


def is_move(node: Node, index: int, held: Mapping[str, Held]) -> bool:
    """Whether a node makes values out of its operand that hold entries of the same parameter."""
    made = [name for name in node.outputs if name]
    moved = index == 0 or node.op == "Concat"
    return moved and bool(made) and all(name in held for name in made)


def moved_entries(
    entries: Array, node: Node, constants: Mapping[str, Array], shape: tuple[int, ...]
) -> Array:
    """The result of a node of ``RELAYS``, or a Slice by constants, for an array of this shape."""
    return _MOVES[node.op](entries, node, constants, [shape])[0]


def split(
    parts: Mapping[str, Sequence[ParameterSlice]], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Arrays in the shapes of parameters, taken apart.

    Args:
        parts: Parameter to its parts.
        arrays: Parameter to array.

    Returns:
        Part to array.
    """
    return {part.name: part.read(array) for name, array in arrays.items() for part in parts[name]}


def join(
    parts: Sequence[ParameterSlice], arrays: Mapping[str, Array], like: Array, rest: float
) -> Array:
    """The inverse of ``split`` for one parameter.

    Args:
        parts: Of the parameter.
        arrays: ParameterSlice to array.
        like: In the parameter's shape.
        rest: Entries in no part are those of ``like`` times this number.

    Returns:
        An array in the parameter's shape.
    """
    if len(parts) == 1 and parts[0].index is None:
        return arrays[parts[0].name]
    joined: Array = (like * rest).astype(like.dtype).reshape(-1)
    for part in parts:
        part.write(joined, arrays[part.name])
    return joined.reshape(like.shape)


def describe(index: Array, shape: tuple[int, ...]) -> str:
    """Entries of an array of some shape: ``[0:4, :]`` where they are a box, else their number."""
    places = [np.unique(place) for place in np.unravel_index(index.reshape(-1), shape)]
    steps = [np.unique(np.diff(place)) for place in places]
    if np.prod([place.size for place in places]) != index.size or any(s.size > 1 for s in steps):
        return f"[{index.size} of {int(np.prod(shape))} entries]"
    return f"[{', '.join(_range(p, side) for p, side in zip(places, shape, strict=True))}]"


def _range(places: Array, side: int) -> str:
    if places.size == side:
        return ":"
    step = int(places[1] - places[0]) if places.size > 1 else 1
    text = f"{places[0]}:{places[-1] + 1}"
    return text if step == 1 else f"{text}:{step}"


def _all_entries(name: str, shape: tuple[int, ...]) -> Held:
    size = int(np.prod(shape, dtype=np.int64))
    numbers = np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)
    return Held(name, numbers.reshape(shape), size)


def _counts(index: Array) -> bool:
    flat = index.reshape(-1)
    return bool((flat[1:] > flat[:-1]).all()) if flat.size else True


def _moves(node: Node) -> bool:
    """Whether a node can move entries about: a Cast may also round them."""
    known = not node.domain and (node.op in _MOVES or node.op == "Concat")
    return known and (node.op != "Cast" or node.attributes.get("to") in _FLOAT_CODES)


def _operands(node: Node) -> tuple[str, ...]:
    """Operands whose entries the node rearranges."""
    return node.inputs if node.op == "Concat" else node.inputs[:1]


def _settings(node: Node) -> tuple[str, ...]:
    """Operands whose values say where entries go."""
    return () if node.op in ("CastLike", "Concat") else node.inputs[1:]


def _moved(
    held: Held, node: Node, graph: Graph, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Held]:
    """What the results hold; nothing where an operand is no constant or entries are repeated."""
    if node.op == "Concat":
        once = np.unique(held.index).size == held.index.size
        return {node.outputs[0]: held} if once else {}
    results = [shapes.get(name, ()) for name in node.outputs]
    unknown = any(name not in graph.constants for name in node.inputs[1:] if name)
    if unknown and node.op in _BY_VALUE:
        return {}
    indices = _MOVES[node.op](held.index, node, graph.constants, results)
    return {
        name: Held(held.parameter, index, held.size)
        for name, index in zip(node.outputs, indices, strict=False)
    }


# -- entries of several parameters -----------------------------------------------------------------

# In a value of several parameters, the number of an entry is its index in its parameter plus this
# constant times the position of the parameter. No parameter has as many entries.
_OWNER = 1 << 40


def _joined(operands: Sequence[Held], node: Node, owners: Sequence[Held]) -> Held:
    """The entries of the operands of a node, in order along the axis of a Concat."""
    first = operands[0]
    if len(operands) == 1:
        return first
    axis = int(str(node.attributes["axis"]))
    if all(held.parameter == first.parameter for held in operands):
        index = np.concatenate([held.index for held in operands], axis)
        return Held(first.parameter, index, first.size)
    position = {owner.parameter: i for i, owner in enumerate(owners)}
    numbers = [held.index + _OWNER * np.int64(position.get(held.parameter, 0)) for held in operands]
    return Held("", np.concatenate(numbers, axis), sum(held.size for held in operands))


def _owned(held: Held, owners: Sequence[Held]) -> Held:
    """The same entries, with the name of the parameter if all of them belong to one."""
    whose = [] if held.parameter else np.unique(held.index // _OWNER).tolist()
    if len(whose) != 1:
        return held
    owner = owners[whose[0]]
    return Held(owner.parameter, (held.index % _OWNER).astype(owner.index.dtype), owner.size)


def _is_read(name: str, graph: Graph, held: Mapping[str, Held]) -> bool:
    """Whether a value is more than moved about."""
    users = graph.consumers.get(name, ())
    return not all(is_move(node, index, held) for node, index in users)


# -- moves -----------------------------------------------------------------------------------------


def _kept(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del node, constants
    return [index.reshape(results[0])]


def _turned(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del constants, results
    perm = cast("tuple[int, ...] | None", node.attributes.get("perm"))
    return [index.transpose(perm)]


def _sliced(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del results
    starts, ends, *given = (constants[name].tolist() if name else [] for name in node.inputs[1:])
    axes, steps = (*given, [], [])[:2]
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    box = [slice(None)] * index.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        box[axis] = slice(start, end, step)
    return [index[tuple(box)]]


def _divided(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del constants
    axis = int(str(node.attributes.get("axis", 0)))
    ends = np.cumsum([shape[axis] for shape in results])
    return np.split(index, ends[:-1], axis)


def _picked(
    index: Array, node: Node, constants: Mapping[str, Array], results: Sequence[tuple[int, ...]]
) -> Sequence[Array]:
    del results
    axis = int(str(node.attributes.get("axis", 0)))
    places = constants[node.inputs[1]] % index.shape[axis]
    return [index.take(places, axis)] if np.unique(places).size == places.size else []


_MOVES: Mapping[str, _Move] = {
    **dict.fromkeys(RELAYS, _kept),
    "Gather": _picked,
    "Slice": _sliced,
    "Split": _divided,
    "Transpose": _turned,
}
_FLOAT_CODES = frozenset({1, 10, 11, 16})  # TensorProto.DataType of float32, 16, 64 and bfloat16
# Those whose further operands must be known by value; the others' show in the shape of the result.
_BY_VALUE = frozenset({"Gather", "Slice"})
