"""Parts of parameters whose gradients different ranks precondition."""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from kfac_engine.distributed.layer_owners import Part
from kfac_engine.distributed.sizes import Divisible


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A part of a parameter, or the whole, with the rank that preconditions its gradient.

    Attributes:
        owner: The rank.
        divisible: Whether the part has rows or columns; None for the whole parameter.
        axis: The axis of the parameter that is divided.
        start: First index along this axis.
        stop: Index behind the last one.
    """

    owner: int
    divisible: Divisible | None = None
    axis: int = 0
    start: int = 0
    stop: int = 0

    def of(self, array: Array) -> Array:
        """Return the part of an array in the shape of the parameter; a view."""
        return array[(slice(None),) * self.axis + (self.indices,)] if self.divisible else array

    def needed(self, gradient: Array) -> Array:
        """Return the part of the gradient that the owner needs; a view."""
        return gradient if self.divisible == "columns" else self.of(gradient)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of an array."""
        if self.divisible is None:
            return whole
        return *whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :]

    @property
    def indices(self) -> slice:
        """The indices along the axis."""
        return slice(self.start, self.stop)


def parameter_parts(
    block: FisherBlock, shapes: Sequence[tuple[int, ...]], parts: Sequence[Part]
) -> list[tuple[ParameterPart, ...]]:
    """Return the parts of each parameter of a block.

    Args:
        block: The block.
        shapes: Shapes of its parameters: of a weight, and of a bias if there is one.
        parts: Rows or columns of its packed gradient.
    """
    if len(parts) == 1:
        return [(ParameterPart(parts[0].owner),)] * len(shapes)
    axes = [0] * len(shapes)
    if block.divisible == "columns":
        assert isinstance(block, KroneckerProductFB), "other blocks are not divided into columns"
        outputs = block.form.packing.matrix_shape(shapes[0])[1]
        axes = [block.form.packing.column_axis or 0, *(s.index(outputs) for s in shapes[1:])]
    return [
        tuple(ParameterPart(p.owner, block.divisible, axis, p.start, p.stop) for p in parts)
        for axis in axes
    ]
