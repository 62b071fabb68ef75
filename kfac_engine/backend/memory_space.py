"""Allocates and copies arrays in the memory of the host or of a device.

A memory space creates arrays of one library. ONNX Runtime reads and writes them by address and
returns its own arrays through DLPack, both without copies.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.reductions import all_finite
from kfac_engine.backend.namespace import as_array


class Finite(NamedTuple):
    """Whether arrays are finite, and numbers that were read with them."""

    each: list[bool]  # whether each array is finite
    numbers: list[float]  # further numbers, which were read with the arrays
    norm: float | None = None  # norm of all arrays together; None if it is not known


class MemorySpace(Protocol):
    """The memory of the host, or of a device."""

    kind: str  # device type, as in DLPack: ``"cpu"`` or ``"cuda"``
    index: int  # number of the device among the devices of its kind
    stream: int  # address of the stream of ONNX Runtime; 0 without streams
    tf32: bool  # whether products may round float32 numbers to TF32
    name: str  # device name, for messages

    def __hash__(self) -> int:
        """Return a hash of the identity."""

    def as_feed(self, value: Any) -> Array:
        """Convert an array of any library, or nested numbers, to an array that sessions can read.

        The result is C-contiguous in this memory space, and may be ``value``. Text and small
        integers (``stays_on_host``) become arrays of the host.
        """

    def to_device(self, value: Any) -> Array:
        """Convert an array of any library to a C-contiguous array in this memory space.

        Unlike ``as_feed``, this method copies small integers to the device, too.
        """

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Allocate a C-contiguous array without initializing its entries."""

    def adopt(self, value: Any, dtype: DType) -> Array:
        """Return a view of a result of ONNX Runtime, in an element type of equal size."""

    def address(self, array: Array) -> int:
        """Return the address of the first entry of an array."""

    def on_host(self, array: Array) -> Array:
        """Return a host copy or view of an array, after the device has computed it."""

    def finite(self, arrays: Sequence[Array], numbers: Sequence[Any] = ()) -> Finite:
        """Return whether each array is finite, and ``numbers`` on the host.

        The host reads once if all arrays are finite.
        """

    def ordered(self) -> AbstractContextManager[object]:
        """Return a context whose work runs after all earlier work and before all later work."""

    def wait(self) -> None:
        """Wait until the device has done the work of ONNX Runtime."""

    def release(self) -> bool:
        """Release unused memory; return whether a failed allocation may be repeated."""


class HostMemory:
    """The memory of the host, as arrays of NumPy."""

    kind = "cpu"
    index = 0
    stream = 0
    tf32 = False
    name = "the CPU"

    def as_feed(self, value: Any) -> Array:
        array = value if type(value) is np.ndarray else np.asarray(as_array(value))
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    to_device = as_feed

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        return np.empty(tuple(shape), dtype)

    def adopt(self, value: Any, dtype: DType) -> Array:
        return np.from_dlpack(value).view(dtype)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def on_host(self, array: Array) -> Array:
        return array

    def finite(self, arrays: Sequence[Array], numbers: Sequence[Any] = ()) -> Finite:
        return Finite([*map(all_finite, arrays)], [*map(float, numbers)])

    def ordered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        return

    def release(self) -> bool:
        return False


HOST: Final[MemorySpace] = HostMemory()


def stays_on_host(dtype: DType, rank: int) -> bool:
    """Return whether a value stays on the host, where operators read counts and shapes.

    These are integers and truth values with at most one axis.
    """
    return dtype.kind in "biu" and rank <= 1
