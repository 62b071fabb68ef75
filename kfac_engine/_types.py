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
