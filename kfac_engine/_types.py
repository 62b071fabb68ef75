"""Type aliases shared by every package."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

# Either library's array. CuPy arrays have NumPy's interface but no common base class.
Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]

# What a batch brings: name of a value (an activation, a target, an output gradient) to its array.
Values: TypeAlias = Mapping[str, Array]

Result = TypeVar("Result")
# What the specification calls an unevaluated tensor or an "Op": call it with the values of a batch.
Thunk: TypeAlias = Callable[[Values], Result]

# A vector over the parameters of one block: one array, or one for each parameter of a tuple.
Vector: TypeAlias = Array | tuple[Array, ...]
# The parameters of one block: one name or a tuple of names.
Params: TypeAlias = str | tuple[str, ...]
