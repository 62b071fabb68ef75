"""Finds the axis of the examples in a value, by two batch sizes or by changing one example."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array

# Changing an example changes the others by rounding errors at most, relative to the largest entry.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class ExampleAxis:
    """The axis of the examples in a value.

    Attributes:
        axis: The axis.
        repeats: Entries along it for each example: more than one where positions are folded in.
    """

    axis: int
    repeats: int

    @property
    def comes_first(self) -> bool:
        """Whether the examples lie alone on the first axis."""
        return self.axis == 0 and self.repeats == 1


def grown(
    shape: tuple[int, ...], other_shape: tuple[int, ...], size: int, other: int
) -> ExampleAxis | None:
    """The axis that grows with the batch, if it is one and grows in proportion.

    Args:
        shape: Of the value for ``size`` examples.
        other_shape: Of the value for ``other`` examples.
        size: A number of examples.
        other: Another number of examples.

    Returns:
        The place, or None.
    """
    if len(shape) != len(other_shape):
        return None
    axes = [
        axis for axis, pair in enumerate(zip(shape, other_shape, strict=True)) if pair[0] != pair[1]
    ]
    if len(axes) != 1:
        return None
    (axis,) = axes
    proportional = shape[axis] * other == other_shape[axis] * size
    return ExampleAxis(axis, shape[axis] // size) if proportional else None


def others_move(
    before: Array, after: Array, changed: int, size: int, place: ExampleAxis | None
) -> bool:
    """Whether changing one example changes entries of others.

    Args:
        before: The value.
        after: The value with one example changed.
        changed: Which one.
        size: Examples.
        place: Where the examples lie; None if all entries belong to none.

    Returns:
        Whether any does.
    """
    if before.shape != after.shape:
        return True
    moved = _moved(before, after)
    return bool(moved.any()) if place is None else _beside(moved, changed, size, place)


def unmoved_axes(before: Array, after: Array, changed: int, size: int) -> frozenset[int]:
    """The axes along which only the changed example differs; arguments as of ``others_move``."""
    if before.shape != after.shape:
        return frozenset()
    moved = _moved(before, after)
    return frozenset(
        axis
        for axis, side in enumerate(before.shape)
        if side % size == 0 and not _beside(moved, changed, size, ExampleAxis(axis, side // size))
    )


def with_example(array: Array, axis: int, changed: int, new_id: Callable[[Array], Array]) -> Array:
    """The array with one example replaced by another valid one.

    Args:
        array: Of all examples.
        axis: That of the examples.
        changed: Which one.
        new_id: Makes other identifiers of identifiers.

    Returns:
        A copy. Numbers become those of the example at the other end, or half of them if equal.
    """
    moved = np.moveaxis(array.copy(), axis, 0)
    other = moved[-1 if changed == 0 else 0]
    if array.dtype.kind in "biu":
        other = new_id(other)
    elif array.dtype.kind == "f" and np.array_equal(other, moved[changed]):
        other = other / 2
    # Text may be a key of a table: no other valid text is known.
    moved[changed] = other
    return np.moveaxis(moved, 0, axis)


def _moved(before: Array, after: Array) -> Array:
    if before.dtype.kind != "f":
        return np.asarray(before != after)
    scale = _ROUNDING * float(np.abs(before).max(initial=0))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs(before - after) > scale)


def _beside(moved: Array, changed: int, size: int, place: ExampleAxis) -> bool:
    """Whether entries beside the changed example are among those that moved."""
    sides, others = moved.shape, [i for i in range(size) if i != changed]
    # Examples may come before or after the positions that are folded into their axis.
    orders = ((size, place.repeats), (place.repeats, size))
    return all(
        moved.reshape(*sides[: place.axis], *order, *sides[place.axis + 1 :])
        .take(others, place.axis + later)
        .any()
        for later, order in enumerate(orders)
    )
