"""Type aliases shared by every package, and the few rows of a matrix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kfac_engine.errors import InputError, ShapeError

# Either library's array. CuPy arrays have NumPy's interface but no common base class.
Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]

# What a batch brings: name of a value (an activation, a target, an output gradient) to its array.
Values: TypeAlias = Mapping[str, Array]

Result = TypeVar("Result")
# What the specification calls an unevaluated tensor or an "Op": call it with the values of a batch.
Thunk: TypeAlias = Callable[[Values], Result]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A matrix that is zero but for a few rows: what a batch's gradient of an embedding is.

    Attributes:
        indices: Which rows, ``(k,)``, integers from zero; one that comes twice stands for the sum.
        values: The rows, ``(k, d)``.
        num_rows: Rows of the matrix.
    """

    indices: Array
    values: Array
    num_rows: int

    def __post_init__(self) -> None:
        """Check that the parts fit.

        Raises:
            ShapeError: There is not one row for each index.
            InputError: An index is not an integer of a row.
        """
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


# A vector over the parameters of one block: one array, or one for each parameter of a tuple; rows
# for blocks of embeddings.
Vector: TypeAlias = Array | tuple[Array, ...] | Rows
# The parameters of one block: one name or a tuple of names.
Params: TypeAlias = str | tuple[str, ...]
