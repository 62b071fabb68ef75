"""Where a runtime beside an array library computes, and where its values lie: host or device.

A place makes arrays of one library. Runtimes take them by address and hand theirs over by DLPack,
so that nothing is copied on the way.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.reductions import all_finite
from kfac_engine.backend.namespace import as_array


class Place(Protocol):
    """The memory of the host, or that of a device.

    Attributes:
        kind: What DLPack and runtimes call it: ``"cpu"`` or ``"cuda"``.
        index: Which of its kind.
        stream: Address of the stream that a runtime is to work on; 0 for none.
        tf32: Whether products may round float32 numbers to TF32.
        name: For messages.
    """

    kind: str
    index: int
    stream: int
    tf32: bool
    name: str

    def __hash__(self) -> int:
        """By identity."""

    def take(self, value: Any) -> Array:
        """An array of any library as one that lies here, C-contiguous; the same one if it is.

        On a device, small integers and text stay on the host.
        """

    def own(self, value: Any) -> Array:
        """``take``, but with small integers at the place as well."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An array with arbitrary content, C-contiguous."""

    def adopt(self, value: Any, dtype: DType) -> Array:
        """A view of what a runtime made here, in an element type of equal size."""

    def address(self, array: Array) -> int:
        """Where an array begins, for a runtime that reads or writes there."""

    def on_host(self, array: Array) -> Array:
        """A host copy or view; waits for a device."""

    def finite(self, arrays: Sequence[Array]) -> list[bool]:
        """Whether each holds numbers alone; a device is read once if all do."""

    def ordered(self) -> AbstractContextManager[object]:
        """What a runtime does inside follows all that was begun before, and precedes the rest."""

    def release(self) -> bool:
        """Give unused memory back; whether a runtime that found none may try again."""


class Host:
    """The host's memory, as arrays of NumPy."""

    kind = "cpu"
    index = 0
    stream = 0
    tf32 = False
    name = "the CPU"

    def take(self, value: Any) -> Array:
        array = np.asarray(as_array(value))
        return np.ascontiguousarray(array).reshape(array.shape)

    def own(self, value: Any) -> Array:
        return self.take(value)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        return np.empty(tuple(shape), dtype)

    def adopt(self, value: Any, dtype: DType) -> Array:
        return np.from_dlpack(value).view(dtype)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def on_host(self, array: Array) -> Array:
        return array

    def finite(self, arrays: Sequence[Array]) -> list[bool]:
        return [all_finite(array) for array in arrays]

    def ordered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def release(self) -> bool:
        return False


HOST: Final[Place] = Host()


def stays_on_host(dtype: DType, rank: int) -> bool:
    """Whether a value is left to the host: counts and sides, which operators read there.

    Args:
        dtype: Its element type.
        rank: Its axes.

    Returns:
        True for integers and truth values of one axis at most.
    """
    return dtype.kind in "biu" and rank <= 1
