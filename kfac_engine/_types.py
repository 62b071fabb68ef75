"""Defines type aliases that all packages share, and ``Rows``, an embedding's sparse gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kfac_engine.errors import InputError, ShapeError

# An array of NumPy or CuPy. CuPy arrays have NumPy's interface but no common base class.
Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]

# The values of a batch: name of an activation, target or output gradient to its array.
Values: TypeAlias = Mapping[str, Array]

Result = TypeVar("Result")
# A function of the values of a batch.
OfValues: TypeAlias = Callable[[Values], Result]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A matrix with few nonzero rows, such as the gradient of an embedding table.

    Attributes:
        indices: Row numbers, ``(k,)``, nonnegative integers; rows with equal numbers are added.
        values: Entries of these rows, ``(k, d)``.
        num_rows: Number of rows of the whole matrix.
    """

    indices: Array
    values: Array
    num_rows: int

    def __post_init__(self) -> None:
        """Check indices and values.

        Raises:
            ShapeError: ``values`` does not have one row for each index.
            InputError: The indices are not integers, or lie outside the matrix; or an argument has
                another type.
        """
        if not all(hasattr(array, "dtype") for array in (self.indices, self.values)):
            raise InputError("indices and values must be arrays of the shapes (k,) and (k, d).")
        if not isinstance(self.num_rows, Integral):
            raise InputError(f"num_rows must be a whole number, got {self.num_rows!r:.80}.")
        if self.values.ndim != 2 or self.indices.shape != self.values.shape[:1]:
            raise ShapeError(
                f"rows need indices (k,) and values (k, d), got {self.indices.shape} and "
                f"{self.values.shape}."
            )
        if self.indices.dtype.kind not in "iu":
            raise InputError(f"indices of rows must be integer, not {self.indices.dtype}.")
        if len(self.indices) and not (
            0 <= int(self.indices.min()) <= int(self.indices.max()) < self.num_rows
        ):
            raise InputError(
                f"indices of rows run from {int(self.indices.min())} to {int(self.indices.max())}; "
                f"the matrix has {self.num_rows} rows."
            )


def entries(vector: "Array | Rows") -> Array:
    """Return an array itself, or the array of the nonzero rows of ``Rows``."""
    return vector.values if isinstance(vector, Rows) else vector


def whole_arrays(vectors: "Mapping[str, Array | Rows]") -> dict[str, Array]:
    """Return the vectors that are arrays, without those that have only some rows."""
    return {name: v for name, v in vectors.items() if not isinstance(v, Rows)}


# A vector over the parameters of one block: an array, a tuple with an array for each parameter, or
# ``Rows`` for blocks of embeddings.
Vector: TypeAlias = Array | tuple[Array, ...] | Rows
# The parameters of one block: a name or a tuple of names.
Params: TypeAlias = str | tuple[str, ...]
