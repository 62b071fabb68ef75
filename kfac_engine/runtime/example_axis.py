"""Describes the axis of the examples, which a model declares or two of its runs reveal.

Sample runs read the first examples of a batch.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.structure import Fact, Graph, Input

# Common symbols for the batch axis, besides those that begin with "batch".
BATCH = "batch"
_BATCH_SYMBOLS = frozenset({"n", "b", "bs"})

# Number of examples: small, and different from the lengths of most other axes.
_FEW = 5


def says_batch(size: object) -> bool:
    """Return whether the declared size of an axis is a symbol for the batch."""
    symbol = size.lower().replace("_", "") if isinstance(size, str) else ""
    return symbol in _BATCH_SYMBOLS or symbol.startswith(BATCH)


def axis_of(name: str, axis: int, rank: int) -> int:
    """Return the index of a batch axis, counted from zero; ``axis`` may count from the end.

    ``ShapeError`` is raised if the input has no such axis.
    """
    if not -rank <= axis < rank:
        raise ShapeError(
            f"batch_axes names axis {axis} of input '{name}', which has {rank} "
            f"{'axis' if rank == 1 else 'axes'}."
        )
    return axis % rank


def with_batch_axes(inputs: Sequence[Input], axes: Mapping[str, int] | None) -> tuple[Input, ...]:
    """Return the declared inputs with the batch axes of the user.

    An axis in ``axes`` without a size gets the symbol ``batch``, as do all axes with its symbol.
    ``UnknownNameError`` is raised if a name is not an input of the model, and ``ShapeError`` if an
    input has no such axis.
    """
    axes = axes or {}
    known = [entry.name for entry in inputs]
    for name in axes:
        if name not in known:
            raise UnknownNameError(
                f"batch_axes names '{name}'{suggestion(name, known)}, which is not an input of the "
                f"model; its inputs are: {', '.join(known)}."
            )
    result = []
    symbols: set[object] = set()
    for entry in inputs:
        if entry.name in axes and entry.shape is not None:
            axis, shape = axis_of(entry.name, axes[entry.name], len(entry.shape)), [*entry.shape]
            symbols.add(shape[axis])
            shape[axis] = shape[axis] if isinstance(shape[axis], int) else BATCH
            entry = replace(entry, shape=tuple(shape))
        result.append(entry)
    symbols = {symbol for symbol in symbols if isinstance(symbol, str)}
    return tuple(_renamed(entry, symbols) if symbols else entry for entry in result)


def _renamed(entry: Input, symbols: Container[object]) -> Input:
    """Return an input with the symbol ``batch`` in place of other symbols."""
    shape = entry.shape and tuple(BATCH if size in symbols else size for size in entry.shape)
    return replace(entry, shape=shape)


def first_examples(declared: Sequence[Input], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the first examples of a batch as views if the model declares the batch axes.

    The whole arrays are returned if an input with an axis without size has no symbol for the batch,
    because this axis may be time, or if the inputs differ in the number of examples.
    """
    opened = [entry for entry in declared if any(not isinstance(s, int) for s in entry.shape or ())]
    places = [
        (entry.name, axis)
        for entry in opened
        for axis, size in enumerate(entry.shape or ())
        if says_batch(size)
    ]
    axes, sizes = dict(places), {inputs[name].shape[axis] for name, axis in places}
    unknown = any(entry.shape is None for entry in declared)
    if unknown or not len(axes) == len(places) == len(opened) or len(sizes) != 1:
        return dict(inputs)
    return {
        name: array[(slice(None),) * axes[name] + (slice(_FEW),)] if name in axes else array
        for name, array in inputs.items()
    }


# Map from the name of an input to the index of an axis.
Axes: TypeAlias = Mapping[str, int]
# Map from the name of an input, or of a value, to further axes that are as long as its axis.
Squares: TypeAlias = Mapping[str, tuple[int, ...]]


# -- candidates ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """Possible axes of the examples in the inputs."""

    axes: Axes  # map from an input to an axis
    named: bool  # whether the axes have a symbol for the batch
    is_open: bool  # whether the file declares no size for the axes
    is_declared: bool = False  # whether the file declares the sizes of all axes of all inputs
    is_merged: bool = False  # whether the axes have different symbols
    # Further axes of the inputs with the same symbol, as adjacency matrices have.
    squares: Squares = field(default_factory=dict)


def batch_candidates(graph: Graph, facts: Mapping[str, Fact]) -> list[Candidate]:
    """Return candidates for the batch axes, the most likely first.

    The axes of each candidate have equal lengths in the sample run.
    """
    shapes = [(None,) if entry.shape is None else entry.shape for entry in graph.inputs]
    if all(isinstance(size, int) for shape in shapes for size in shape):
        return _declared_candidates(facts, [entry.name for entry in graph.inputs])
    # Axes with one symbol form a candidate. Axes without a size and a symbol form a candidate if
    # they have the same index. A first axis may be the batch axis although its size is declared.
    groups: dict[object, dict[str, int]] = {}
    for entry in graph.inputs:
        shape = entry.shape or (None,) * len(facts[entry.name].shape)
        for axis, size in enumerate(shape):
            if not isinstance(size, int):
                groups.setdefault(size or axis, {}).setdefault(entry.name, axis)
            elif axis == 0:
                groups.setdefault(("declared", size), {})[entry.name] = 0

    ordered = sorted(
        groups,
        key=lambda key: (not says_batch(key), min(groups[key].values()), isinstance(key, tuple)),
    )
    candidates = [
        Candidate(
            axes := groups[key],
            says_batch(key),
            is_open=not isinstance(key, tuple),
            squares=same_symbol(graph.inputs, axes),
        )
        for key in ordered
    ]
    # Exporters may give the batch axis of each input a different symbol. All axes with a symbol for
    # the batch then form a candidate, or else all first axes without a size.
    together: dict[str, int] = {}
    for candidate in candidates:
        if candidate.named:
            together = {**candidate.axes, **together}
    named = bool(together)
    if not named:
        firsts = [c.axes.items() for c in candidates if c.is_open]
        together = {name: 0 for items in firsts for name, axis in items if axis == 0}
    if len(together) > 1 and all(candidate.axes != together for candidate in candidates):
        candidates.insert(0, Candidate(together, named, is_open=True, is_merged=True))
    candidates += [
        Candidate(axes, named=False, is_open=True) for axes in _of_one_size(graph, facts)
    ]
    return [c for c in candidates if len({facts[n].shape[axis] for n, axis in c.axes.items()}) == 1]


def axes_by_symbol(inputs: Sequence[Input]) -> list[Axes]:
    """Return the axes of inputs that have the same symbol, for each symbol."""
    groups: dict[str, dict[str, int]] = {}
    for entry in inputs:
        for axis, size in enumerate(entry.shape or ()):
            if isinstance(size, str):
                groups.setdefault(size, {}).setdefault(entry.name, axis)
    return list(groups.values())


def same_symbol(inputs: Sequence[Input], axes: Axes) -> dict[str, tuple[int, ...]]:
    """Return the further axes of inputs that have the symbol of the axis in ``axes``."""
    squares = {}
    for entry in inputs:
        shape, axis = entry.shape or (), axes.get(entry.name, len(entry.shape or ()))
        symbol = shape[axis] if axis < len(shape) else None
        if isinstance(symbol, str) and shape.count(symbol) > 1:
            squares[entry.name] = tuple(
                other for other, size in enumerate(shape) if size == symbol and other != axis
            )
    return squares


def same_length(
    inputs: Sequence[Input], facts: Mapping[str, Fact], axes: Axes
) -> dict[str, tuple[int, ...]]:
    """Return the other axes without a declared size that are as long as the axis in ``axes``."""
    squares = {}
    for entry in inputs:
        shape = facts[entry.name].shape
        sizes = (None,) * len(shape) if entry.shape is None else entry.shape
        others = tuple(
            other
            for other, size in enumerate(sizes)
            if entry.name in axes
            and other != axes[entry.name]
            and not isinstance(size, int)
            and shape[other] == shape[axes[entry.name]]
        )
        if others:
            squares[entry.name] = others
    return squares


def _declared_candidates(facts: Mapping[str, Fact], names: Sequence[str]) -> list[Candidate]:
    """Return candidates for a file that declares all sizes: axes of equal sizes.

    Candidates with axes of most inputs come first, and first axes before later ones.
    """
    shapes = {name: facts[name].shape for name in names}
    groups: list[dict[str, int]] = []
    for axis in range(max(map(len, shapes.values()), default=0)):
        on_axis = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
        for size in dict.fromkeys(on_axis.values()):
            same = {name: axis for name in on_axis if on_axis[name] == size}
            elsewhere = {name: shape.index(size) for name, shape in shapes.items() if size in shape}
            groups += [same, {**elsewhere, **same}]
    distinct = [axes for place, axes in enumerate(groups) if axes not in groups[:place]]
    distinct.sort(key=len, reverse=True)
    return [Candidate(axes, named=False, is_open=False, is_declared=True) for axes in distinct]


def _of_one_size(graph: Graph, facts: Mapping[str, Fact]) -> list[dict[str, int]]:
    """Return axes without a declared size that have equal lengths, one for each input."""
    sizes: dict[int, dict[str, int]] = {}
    for entry in graph.inputs:
        for axis, size in enumerate(entry.shape or ()):
            if not isinstance(size, int):
                sizes.setdefault(facts[entry.name].shape[axis], {}).setdefault(entry.name, axis)
    return [axes for axes in sizes.values() if len(axes) > 1]


# Largest relative change by rounding, when a change of one example does not affect another one.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class ExampleAxis:
    """The axis of the examples in a value."""

    axis: int  # index of the axis
    # Number of entries of each example along the axis; above one if it includes positions.
    repeats: int

    @property
    def comes_first(self) -> bool:
        """Whether the first axis contains the examples, without positions."""
        return self.axis == 0 and self.repeats == 1


def grown(
    shape: tuple[int, ...], other_shape: tuple[int, ...], size: int, other: int
) -> tuple[ExampleAxis, ...]:
    """Return the axes whose lengths are proportional to the number of examples, in their order.

    The shapes are those for ``size`` and for ``other`` examples. The result is empty if another
    axis changes as well.
    """
    if len(shape) != len(other_shape):
        return ()
    pairs = zip(shape, other_shape, strict=True)
    axes = [axis for axis, (before, after) in enumerate(pairs) if before != after]
    if any(shape[axis] * other != other_shape[axis] * size for axis in axes):
        return ()
    return tuple(ExampleAxis(axis, shape[axis] // size) for axis in axes)


def others_change(
    before: Array, after: Array, changed: int, size: int, place: ExampleAxis | None
) -> bool:
    """Return whether a change of one example changes an entry of another example, or of no example.

    ``changed`` is the index of the example, ``size`` the number of examples, and ``place`` their
    axis, which is None for a value without examples.
    """
    if before.shape != after.shape:
        return True
    moved = _changed_entries(before, after)
    return bool(moved.any()) if place is None else _others_changed(moved, changed, size, place)


def rest_changes(before: Array, after: Array, size: int, place: ExampleAxis) -> bool:
    """Return whether the results of examples differ in a batch without the first example.

    ``before`` is a value of the batch of ``size`` examples, ``after`` its value without the first
    one.
    """
    shape, axis = before.shape, place.axis
    rest = (*shape[:axis], shape[axis] // size * (size - 1), *shape[axis + 1 :])
    if after.shape != rest:
        return True
    orders = ((size, place.repeats), (place.repeats, size))
    return all(
        _changed_entries(
            before.reshape(*shape[:axis], *order, *shape[axis + 1 :])
            .take(np.arange(1, size), axis + later)
            .reshape(rest),
            after,
        ).any()
        for later, order in enumerate(orders)
    )


def unmoved_axes(before: Array, after: Array, changed: int, size: int) -> frozenset[int]:
    """Return the axes that can contain the examples.

    Along such an axis, a change of one example changes no entry of another example. The arguments
    are as for ``others_change``.
    """
    if before.shape != after.shape:
        return frozenset()
    moved = _changed_entries(before, after)
    return frozenset(
        axis
        for axis, length in enumerate(before.shape)
        if length % size == 0
        and not _others_changed(moved, changed, size, ExampleAxis(axis, length // size))
    )


def with_example(array: Array, axis: int, changed: int, new_id: Callable[[Array], Array]) -> Array:
    """Return a copy of an array with one example replaced by other valid data.

    The example ``changed`` is the first or the last. ``new_id`` returns other integers or truth
    values. Real numbers are copied from the example at the opposite end, or halved if both are
    equal.
    """
    moved = np.moveaxis(array.copy(), axis, 0)
    other = moved[-1 if changed == 0 else 0]
    if array.dtype.kind in "biu":
        other = new_id(other)
    elif array.dtype.kind == "f" and np.array_equal(other, moved[changed]):
        other = other / 2
    # Text is copied unchanged, because it may be a key of a table.
    moved[changed] = other
    return np.moveaxis(moved, 0, axis)


def _changed_entries(before: Array, after: Array) -> Array:
    if before.dtype.kind != "f":
        return np.asarray(before != after)
    scale = _ROUNDING * float(np.abs(before).max(initial=0))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs(before - after) > scale)


def _others_changed(moved: Array, changed: int, size: int, place: ExampleAxis) -> bool:
    """Return whether entries of other examples changed."""
    shape, others = moved.shape, [i for i in range(size) if i != changed]
    # Examples may come before or after the positions on their axis.
    orders = ((size, place.repeats), (place.repeats, size))
    return all(
        moved.reshape(*shape[: place.axis], *order, *shape[place.axis + 1 :])
        .take(others, place.axis + later)
        .any()
        for later, order in enumerate(orders)
    )
