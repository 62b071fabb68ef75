"""What the wrappers of kernels ask of a device, and the sources themselves."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kfac_engine.kernels.variants import options

# An array of the device's library.
Array: TypeAlias = Any

BLOCK = 256


class Launch(Protocol):
    """A compiled kernel."""

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[object, ...]
    ) -> None:
        """Run it: arrays of the device go as pointers, NumPy's scalars and structs by value."""


class Device(Protocol):
    """Where kernels run: a GPU, or the CPU in tests.

    Attributes:
        processors: Multiprocessors, which share out the blocks of a launch.
    """

    processors: int

    def function(self, source: str, name: str, options: tuple[str, ...]) -> Launch:
        """Kernel ``name`` of a source, compiled once for each set of options."""

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """A copy of a host array on the device."""

    def address(self, array: Array) -> int:
        """Where an array begins in the device's memory."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An array with arbitrary content."""


@cache
def source(name: str) -> str:
    """The text of ``name.cu`` behind the prelude that all sources share."""
    folder = files(__package__)
    parts = [(folder / part).read_text("utf-8") for part in ("prelude.cuh", f"{name}.cu")]
    return "\n".join(parts)


def kernel(device: Device, file: str, name: str, **macros: int) -> Launch:
    """Kernel ``name`` of ``file.cu``, compiled with these macros."""
    return device.function(source(file), name, options(file, **macros))


def blocks_for(numbers: int, device: Device) -> int:
    """Blocks of a kernel that strides over its numbers: enough to fill the device."""
    return max(1, min(-(-numbers // BLOCK), 16 * device.processors))


def int32(value: int) -> np.int32:
    """An ``int`` of a kernel."""
    return np.int32(value)


def float32(value: float) -> np.float32:
    """A ``float`` of a kernel."""
    return np.float32(value)
