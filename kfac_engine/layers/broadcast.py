"""Gradients of parameters that are broadcast to the data: sums over axes of the data."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError, ShapeError


class Reduction(Protocol):
    """The axes of the data along which a parameter is broadcast."""

    @property
    def batch_axis(self) -> int:
        """Axis of the data that holds the examples."""

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes that are summed for each example, for data of this shape."""


@dataclass(frozen=True, slots=True)
class ScaleShiftForm:
    """The broadcast of a scale, a shift or both against the data.

    Attributes:
        scale: Sums for the scale; None without a scale.
        shift: Sums for the shift; None without a shift.
    """

    scale: Reduction | None
    shift: Reduction | None


@dataclass(frozen=True, slots=True)
class SummedAxes:
    """The broadcast axes as the caller lists them.

    Attributes:
        axes: Positive numbers of axes; the batch is axis 0.
    """

    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the axes are positive and different."""
        if len(set(self.axes)) < len(self.axes) or any(axis < 1 for axis in self.axes):
            raise InputError(
                f"broadcast axes {self.axes} must be different and positive: axis 0 is the batch."
            )

    @property
    def batch_axis(self) -> int:
        return 0

    def summed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.axes and max(self.axes) >= len(shape):
            raise ShapeError(f"broadcast axes {self.axes} do not exist in data of shape {shape}.")
        return self.axes


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


def per_example(gradient: Array, reduction: Reduction) -> Array:
    """Return the gradient of a parameter for each example, ``(n, entries)``: sums over the data."""
    summed, batch = reduction.summed(gradient.shape), reduction.batch_axis
    rows = gradient.sum(axis=summed)
    moved: Array = array_module(rows).moveaxis(rows, batch - sum(a < batch for a in summed), 0)
    return moved.reshape(gradient.shape[batch], -1)


def entries(shape: tuple[int, ...], reduction: Reduction) -> int:
    """Return the number of entries of the parameter, from the shape of the data."""
    left_out = (*reduction.summed(shape), reduction.batch_axis)
    return prod(size for axis, size in enumerate(shape) if axis not in left_out)
