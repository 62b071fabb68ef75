"""Computes with vectors over the parameters, arrays by name, in place where possible.

Temporary arrays of the size of a parameter cost more than the arithmetic, because the operating
system provides and takes back their memory in each step. Results are therefore written to arrays
that exist.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from math import prod
from typing import Any, TypeAlias, TypeVar

import numpy as np
from scipy.linalg import blas

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.backend.protocol import ManyArrays

Key = TypeVar("Key", str, tuple[str, ...])
Vector: TypeAlias = Mapping[str, Array]
# Weights to the inner products of all their matrices, on one axis.
Products: TypeAlias = Mapping[tuple[str, ...], Array]

# Entries of a part of an array.
_PART = 1 << 16
# Largest number of entries of an array in a group. A call of NumPy takes as long as the arithmetic
# of some thousand entries, and a launch on a GPU as long as the arithmetic of some hundred
# thousand. In a file, the nodes of each array take time when a session is created, too.
_SMALL, _SMALL_ELSEWHERE = 1 << 13, 1 << 18

_AXPY: Mapping[str, Any] = {"f": blas.saxpy, "d": blas.daxpy}


def add_multiple(out: Array, factor: float, array: Array) -> None:
    """Add ``factor · array`` to ``out``, in place; both have the same shape and type."""
    on_host = type(out) is type(array) is np.ndarray
    axpy = _AXPY.get(out.dtype.char) if on_host and out.dtype == array.dtype else None
    if axpy and out.size and out.flags.c_contiguous and array.flags.c_contiguous:
        axpy(array.reshape(-1), out.reshape(-1), a=factor)
    else:
        out += factor * array


def combine(out: Array, factor: float, array: Array, other_factor: float, other: Array) -> None:
    """Write ``factor · array + other_factor · other`` to ``out``, which may be ``array``."""
    for part, first, second in parts(out, array, other):
        np.multiply(first, factor, out=part)
        add_multiple(part, other_factor, second)


def combine_all(
    combinations: Sequence[tuple[Array, float, Array, float, Array]], many: ManyArrays | None
) -> None:
    """Call ``combine`` with each of the arguments, on a device in one launch if ``many`` is given.

    Arrays of a device are contiguous and of one type.
    """
    if many is not None and combinations:
        many.combine(combinations)
        return
    for arguments in combinations:
        combine(*arguments)


def dot(left: Vector, right: Vector) -> float:
    """Return the inner product of two vectors; the names of the first one count."""
    return sum(float(np.vdot(array, right[name])) for name, array in left.items())


def inner_products(pairs: Sequence[tuple[Array, Array]]) -> list[Any]:
    """Return the inner products of pairs of arrays, all of one shape.

    An array of several pairs is read from memory once.
    """
    if pairs[0][0].size <= _PART:
        return [*starmap(np.vdot, pairs)]
    ranges = parts(*chain(*pairs))
    addends = [[*map(np.vdot, views[::2], views[1::2])] for views in ranges]
    return addends[0] if len(addends) == 1 else [*np.sum(addends, axis=0)]


class Zeros(dict[str, Array]):
    """Arrays of zeros by name, in the memory of one array for each type.

    They have the shapes and types of the arrays ``like``. ``blocks`` is the memory, by the name of
    the first array in it, and ``views`` that of adjacent arrays, by their names, once it was read.
    """

    def __init__(self, like: Vector) -> None:
        super().__init__(like)  # in the same order
        alike: dict[Any, list[str]] = {}
        for name, value in like.items():
            alike.setdefault(value.dtype, []).append(name)
        self.blocks: dict[str, Array] = {}
        self.views: dict[tuple[str, ...], Array] = {}
        for dtype, names in alike.items():
            size = sum(like[name].size for name in names)
            block = array_module(like[names[0]]).zeros(size, dtype)
            self.blocks[names[0]] = self.views[tuple(names)] = block
            self.update(views_of(block, names, like))

    def block(self, names: tuple[str, ...]) -> Array:
        """Create a view with one axis of arrays of one type that follow one another."""
        (every,) = (every for every in self.views if names[0] in every)
        first = every.index(names[0])
        assert every[first : first + len(names)] == names, "the arrays are not adjacent"
        start = sum(self[name].size for name in every[:first])
        stop = start + sum(self[name].size for name in names)
        self.views[names] = self.views[every][start:stop]
        return self.views[names]


def groups(arrays: Vector, kinds: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the names of small arrays of one kind and type together, and other names singly.

    ``kinds`` map a name to the rule of the entries, which must be equal in a group; None for no
    group.
    """
    together: dict[Any, list[str]] = {}
    for name, kind in kinds.items():
        array = arrays[name]
        largest = _SMALL if isinstance(array, np.ndarray) else _SMALL_ELSEWHERE
        small = kind is not None and array.size <= largest
        together.setdefault((kind, array.dtype) if small else name, []).append(name)
    return map(tuple, together.values())


def joined(vector: Mapping[Key, Array], names: Sequence[Key]) -> Array:
    """Return the entries of arrays on one axis, as a copy; the array itself for one name."""
    if len(names) == 1:
        return vector[names[0]]
    entries: Array = array_module(vector[names[0]]).concatenate(
        [vector[name].reshape(-1) for name in names]
    )
    return entries


def by_name(entries: Array, names: Sequence[str], like: Vector) -> dict[str, Array]:
    """Return the arrays that ``joined`` joins, as views in the shapes of ``like``."""
    return views_of(entries, names, like) if names[1:] else {names[0]: entries}


def block_of(state: Zeros, names: tuple[str, ...]) -> Array:
    """Return the entries of state arrays as a view with one axis; the array itself for one name."""
    if len(names) == 1:
        return state[names[0]]
    view = state.views.get(names)
    return state.block(names) if view is None else view


def views_of(entries: Array, names: Sequence[str], like: Vector) -> dict[str, Array]:
    """Return views of the entries of one axis, for arrays of these names that follow one another.

    They have the shapes of ``like``.
    """
    views, start = dict[str, Array](), 0
    for name in names:
        shape = like[name].shape
        stop = start + prod(shape)
        views[name] = entries[start:stop].reshape(shape)
        start = stop
    return views


def parts(*arrays: Array) -> Iterable[tuple[Array, ...]]:
    """Return views of equal ranges of arrays of one shape, which stay in the cache of a core.

    Arrays that are not contiguous, or not of the host, are one part.
    """
    if arrays[0].size <= _PART or not all(map(_is_flat, arrays)):
        return (arrays,)
    flat, starts = [array.reshape(-1) for array in arrays], range(0, arrays[0].size, _PART)
    return (tuple([array[start : start + _PART] for array in flat]) for start in starts)


def _is_flat(array: Array) -> bool:
    return isinstance(array, np.ndarray) and bool(array.flags.c_contiguous)
