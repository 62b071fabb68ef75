"""Finds the axis of the examples in a value from two runs of the model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array

# Largest relative change by rounding, when a change of one example does not affect another one.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class ExampleAxis:
    """The axis of the examples in a value.

    Attributes:
        axis: Index of the axis.
        repeats: Number of entries of each example along the axis; above one if it includes
            positions.
    """

    axis: int
    repeats: int

    @property
    def comes_first(self) -> bool:
        """Whether the first axis contains the examples, without positions."""
        return self.axis == 0 and self.repeats == 1


def grown(
    shape: tuple[int, ...], other_shape: tuple[int, ...], size: int, other: int
) -> ExampleAxis | None:
    """Return the axis whose length is proportional to the number of examples.

    The shapes are those for ``size`` and for ``other`` examples. The result is None if several axes
    or no axis changes in proportion.
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
