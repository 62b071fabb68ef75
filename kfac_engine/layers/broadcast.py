"""Gradients of parameters that are broadcast to the data: sums over axes of the data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import ShapeError


@dataclass(frozen=True, slots=True)
class BroadcastShape:
    """The axes along which a parameter of a given shape is broadcast.

    Attributes:
        shape: Shape of the parameter.
        feature_axis: Axis of the data with which the last axis of the parameter is aligned.
        batch_axis: Axis of the examples in the data.
    """

    shape: tuple[int, ...]
    feature_axis: int = -1
    batch_axis: int = 0

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rank = len(shape)
        for axis in (self.feature_axis, self.batch_axis):
            if not -rank <= axis < rank:
                raise ShapeError(f"data of shape {shape} has no axis {axis}.")
        trailing = rank - 1 - self.feature_axis % rank
        missing = rank - trailing - len(self.shape)
        aligned = (1,) * missing + self.shape + (1,) * trailing
        if missing < 0:
            raise ShapeError(
                f"a parameter of shape {self.shape} has too many axes for data of shape {shape}."
            )
        if aligned[self.batch_axis] != 1:
            raise ShapeError(
                f"a parameter of shape {self.shape} has several entries along the batch axis of "
                f"data of shape {shape}; it must have one entry there."
            )
        if any(entries not in (1, size) for entries, size in zip(aligned, shape, strict=True)):
            raise ShapeError(
                f"a parameter of shape {self.shape} cannot be broadcast to data of shape {shape}."
            )
        others = (axis for axis in range(rank) if axis != self.batch_axis)
        return tuple(axis for axis in others if aligned[axis] == 1)


@dataclass(frozen=True, slots=True)
class ScaleShiftForm:
    """The broadcast of a scale, a shift or both against the data.

    Attributes:
        scale: Axes that are summed for the scale; None without a scale.
        shift: Axes that are summed for the shift; None without a shift.
    """

    num_uses: ClassVar[int] = 1  # a block sums gradients over uses, however many

    scale: BroadcastShape | None
    shift: BroadcastShape | None

    @property
    def num_parameters(self) -> int:
        """Number of parameters: a scale, a shift or both."""
        return (self.scale is not None) + (self.shift is not None)

    def with_bias(self, has_bias: bool) -> Self:
        """Return the form with or without a shift after the scale."""
        return self if has_bias or self.scale is None else replace(self, shift=None)

    def with_uses(self, num_uses: int) -> Self:
        """Return the form itself: it is the same for any number of uses."""
        del num_uses
        return self

    def largest_side(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the number of rows of the matrix over all parameters with these shapes."""
        return sum(map(prod, shapes))


def per_example(gradient: Array, reduction: BroadcastShape) -> Array:
    """Return the gradient of a parameter for each example, ``(n, entries)``: sums over the data."""
    summed, batch = reduction.summed(gradient.shape), reduction.batch_axis
    rows = gradient.sum(axis=summed)
    moved: Array = array_module(rows).moveaxis(rows, batch - sum(a < batch for a in summed), 0)
    return moved.reshape(gradient.shape[batch], -1)


def entries(shape: tuple[int, ...], reduction: BroadcastShape) -> int:
    """Return the number of entries of the parameter, from the shape of the data."""
    left_out = (*reduction.summed(shape), reduction.batch_axis)
    return prod(size for axis, size in enumerate(shape) if axis not in left_out)
