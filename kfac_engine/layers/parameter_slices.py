"""Describes which entries of a parameter a layer uses.

The axes of an array in a file have no meaning by themselves: a weight may be transposed, reshaped
or joined with other weights. The layer that reads the entries knows which of them compute one
output. A formula that treats weights as matrices asks their pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kfac_engine._types import Array, Rows, entries
from kfac_engine.backend.namespace import array_module, on_device, recordable
from kfac_engine.layers.grouped import StackedDensePacking
from kfac_engine.layers.packing import Packing

Entries = TypeVar("Entries", Array, Array | Rows)


@dataclass(slots=True, eq=False)
class ParameterSlice:
    """Entries of a parameter that form a parameter of a block."""

    name: str  # name of the value in the graph, which is the parameter name of the block
    # Row-major position of each entry in the parameter, in the shape of the value; None for all
    # entries in the order of the parameter. Do not change it.
    index: Array | None = None
    # Copy of ``index`` on a device, which the first use of an array of that device creates.
    _device_index: Array | None = field(default=None, init=False, repr=False)
    # Offset and strides, in entries, of positions that ascend in equal steps along each axis, such
    # as those of a box; empty for others.
    _steps: tuple[int, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.index is not None and self.index.size:
            self._steps = _steps_of(self.index)

    def read(self, array: Entries) -> Entries:
        """Return the entries of an array in the shape of the value.

        The array has the shape of the parameter. A slice with all entries also reads rows of the
        array.
        """
        if self.index is None or isinstance(array, Rows):
            return array
        flat = array.reshape(-1)
        if (box := self._box_in(flat)) is None:
            return flat[self._index_for(array)]
        values = np.empty_like(self.index, flat.dtype)  # in the order of memory of the positions
        values[...] = box
        return values

    def write(self, flat: Array, entries: Array) -> None:
        """Set the entries in ``flat``, which has all entries of the parameter, in place."""
        if self.index is None:
            flat[...] = entries
        elif (box := self._box_in(flat)) is None:
            flat[self._index_for(flat)] = entries
        else:
            box[...] = entries

    def _box_in(self, flat: Array) -> Array | None:
        """Return the entries as a view; None unless the host has them in equal steps."""
        if not self._steps or type(flat) is not np.ndarray or not flat.flags.c_contiguous:
            return None
        assert self.index is not None, "all entries have no steps"
        start, *steps = (flat.itemsize * step for step in self._steps)
        return np.ndarray(self.index.shape, flat.dtype, flat, start, steps)

    def _index_for(self, array: Array) -> Array:
        """Return ``index`` in the memory space of an array."""
        assert self.index is not None, "callers read all entries without an index"
        if not on_device(array):
            return self.index
        if self._device_index is None:
            self._device_index = array_module(array).asarray(self.index)
        return self._device_index


def _steps_of(index: Array) -> tuple[int, ...]:
    """Return the first position and the steps along the axes; empty unless these are equal."""
    first, steps, expected = int(index.flat[0]), list[int](), np.zeros((), np.int64)
    for axis, size in enumerate(index.shape):
        second = index[tuple(int(i == axis and size > 1) for i in range(index.ndim))]
        steps.append(int(second) - first)
        expected = expected[..., None] + steps[-1] * np.arange(size)
    equal = min(steps, default=0) >= 0 and np.array_equal(first + expected, index)
    return (first, *steps) if equal else ()


@recordable
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


@recordable
def join(
    parts: Sequence[ParameterSlice], arrays: Mapping[str, Entries], like: Entries, rest: float
) -> Entries:
    """Assemble an array in the shape of a parameter; the inverse of ``split``.

    ``arrays`` maps the name of a slice to its array. Entries in no slice are the entries of
    ``like``, which has the shape of the parameter, times ``rest``.
    """
    if is_whole(parts) or isinstance(like, Rows):
        return arrays[parts[0].name]
    joined: Array = (like * rest).astype(like.dtype, copy=False).reshape(-1)
    for part in parts:
        part.write(joined, entries(arrays[part.name]))
    return joined.reshape(like.shape)


def describe_part(index: Array, shape: tuple[int, ...]) -> str:
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

        It may be a view of the matrices. Entries of the parameter that are not in the piece are
        zero.
        """
        assert self.packing is not None, "vectors have no matrices"
        weight = self.packing.from_matrices(matrices, self.part.read(like))
        if self.part.index is None:
            return weight
        whole: Array = array_module(like).zeros(like.size, like.dtype)
        self.part.write(whole, weight)
        return whole.reshape(like.shape)
