"""The interface of a device that runs kernels, and the sources of the kernels."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kfac_engine.kernels.variants import options

# An array of the library of the device.
Array: TypeAlias = Any

BLOCK = 256


class Launch(Protocol):
    """A compiled kernel."""

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[object, ...]
    ) -> None:
        """Launch the kernel; arrays are passed as pointers, NumPy scalars and structs by value."""


class Device(Protocol):
    """A device that runs kernels, which is a GPU, or the CPU in tests.

    Attributes:
        processors: Number of multiprocessors.
    """

    processors: int

    def function(self, source: str, name: str, options: tuple[str, ...]) -> Launch:
        """Return the kernel ``name`` of a source; each set of options is compiled once."""

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return a copy of a host array on the device."""

    def address(self, array: Array) -> int:
        """Return the address of an array in device memory."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array."""


@cache
def source(name: str) -> str:
    """Return the text of ``name.cu`` after the prelude of all sources."""
    folder = files(__package__)
    parts = [(folder / part).read_text("utf-8") for part in ("prelude.cuh", f"{name}.cu")]
    return "\n".join(parts)


def kernel(device: Device, file: str, name: str, **macros: int) -> Launch:
    """Return the kernel ``name`` of ``file.cu``, compiled with these macros."""
    return device.function(source(file), name, options(file, **macros))


def blocks_for(numbers: int, device: Device) -> int:
    """Return the number of blocks of a grid-stride loop over ``numbers`` entries."""
    return max(1, min(-(-numbers // BLOCK), 16 * device.processors))


def int32(value: int) -> np.int32:
    """Return a number as an ``int`` argument of a kernel."""
    return np.int32(value)


def float32(value: float) -> np.float32:
    """Return a number as a ``float`` argument of a kernel."""
    return np.float32(value)
