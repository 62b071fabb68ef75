"""All parameters of a model as one vector, and the places of blocks in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kfac_engine._types import Array
from kfac_engine.backend.namespace import as_array, numeric
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.errors import InputError, NonFiniteError, ShapeError, UnknownNameError
from kfac_engine.layers.parameter_slices import ParameterSlice

Number = TypeVar("Number", np.float64, np.intp)


def packed(block: FisherBlock, arrays: tuple[NDArray[Number], ...]) -> NDArray[Number]:
    """Return arrays in the shapes of the parameters of a block as a stack, ``(g, d_in, d_out)``.

    A block of concatenated parameters has ``(1, entries, 1)``.
    """
    if block.packing is None:
        return np.concatenate([array.reshape(-1) for array in arrays]).reshape(1, -1, 1)
    stack = block.packing.pack(arrays, block.params, np)
    return stack.reshape(-1, *stack.shape[-2:])


Float = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class ParameterVector:
    """The concatenation of all parameters, each in row-major order.

    Attributes:
        shapes: Shapes by parameter name, in the order of the concatenation.
        slices: The slices that blocks use, by parameter name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    slices: Mapping[str, Sequence[ParameterSlice]]

    @cached_property
    def starts(self) -> dict[str, int]:
        """Places of the first entries, by parameter name."""
        ends = np.cumsum([0, *map(prod, self.shapes.values())]).tolist()
        return dict(zip(self.shapes, ends, strict=False))

    @cached_property
    def size(self) -> int:
        """Number of entries of all parameters."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def owners(self) -> dict[str, tuple[str, ParameterSlice]]:
        """Parameters and slices, by name of the slice."""
        return {
            part.name: (name, part) for name in self.shapes for part in self.slices.get(name, ())
        }

    def places(self, name: str) -> Places:
        """Return the places of the entries of a slice, in the shape of the slice."""
        parameter, part = self.owners[name]
        start, shape = self.starts[parameter], self.shapes[parameter]
        if part.index is not None:
            return start + part.index.astype(np.intp)
        return np.arange(start, start + prod(shape), dtype=np.intp).reshape(shape)

    def parameter_of(self, name: str) -> str:
        """Return the parameter to which a slice belongs."""
        return self.owners[name][0]

    def join(self, vectors: Mapping[str, Array]) -> tuple[Float, bool]:
        """Return vectors by parameter as rows ``(count, size)``, and whether there are several.

        An array has the shape of its parameter, or one more axis in front for several vectors.
        Entries of absent parameters are zero. Unknown names, wrong shapes, different numbers of
        vectors, NaN and infinity raise errors.
        """
        counts: dict[str, int | None] = {}
        arrays = {name: self._checked(name, value, counts) for name, value in vectors.items()}
        if not arrays:
            raise InputError("there is no vector; pass an array for one parameter at least.")
        if len(set(counts.values())) > 1:
            raise ShapeError(
                f"the arrays have different numbers of vectors: {counts}; give all of them the "
                f"same first axis, or none of them."
            )
        count = next(iter(counts.values()))
        rows = np.zeros((1 if count is None else count, self.size))
        for name, array in arrays.items():
            start = self.starts[name]
            rows[:, start : start + prod(self.shapes[name])] = array.reshape(len(rows), -1)
        return rows, count is not None

    def split(
        self, rows: Float, names: Sequence[str], dtypes: Mapping[str, np.dtype], several: bool
    ) -> dict[str, Array]:
        """Return rows ``(count, size)`` as new arrays by parameter; the inverse of ``join``.

        Arrays have the axis of the rows in front if there are ``several``.
        """
        vectors: dict[str, Array] = {}
        for name in names:
            start, shape = self.starts[name], self.shapes[name]
            array = rows[:, start : start + prod(shape)].astype(dtypes[name])
            vectors[name] = array.reshape((len(rows), *shape) if several else shape)
        return vectors

    def _checked(self, name: str, value: Array, counts: dict[str, int | None]) -> Float:
        """Return an array of a parameter in float64, and enter its number of vectors."""
        if name not in self.shapes:
            raise UnknownNameError(
                f"'{name}' is not a parameter of this curvature; they are: "
                f"{', '.join(self.shapes)}."
            )
        array = np.asarray(
            numeric(f"the vector of '{name}'", np.asarray(as_array(value))), np.float64
        )
        shape = self.shapes[name]
        if array.shape != shape and array.shape[1:] != shape:
            raise ShapeError(
                f"the vector of '{name}' has shape {array.shape}, not {shape} or (count, *{shape})."
            )
        if not np.isfinite(array).all():
            raise NonFiniteError(f"the vector of '{name}' holds NaN or infinity.")
        counts[name] = None if array.shape == shape else len(array)
        return array
