"""The interface of a device that runs kernels, and the kernel sources with their variants."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

# An array of the library of the device.
Array: TypeAlias = Any

BLOCK = 256

# Values of the macro INPUT of prelude.cuh, by the element type of images.
INPUTS = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}

_IMAGES = (0, 1, 2)  # input types for which kernels accumulate in float32

# Macros of each source with their values. All launches use options of this table.
MACROS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "patch_products": {"ALIGNED": (0, 1), "INPUT": _IMAGES},
    "pair_stage": {"INPUT": _IMAGES},
    "pair_products": {"COLUMNS": (1, 2), "PRODUCTS": (1, 3)},
    "pair_rows": {"SIDE": (1, 2), "PRODUCTS": (1, 3), "INPUT": _IMAGES},
    "moment": {},
    "patch_sums": {"SQUARED": (0, 1), "INPUT": _IMAGES},
    "patches": {"INPUT": tuple(INPUTS.values())},
    "spans": {"INPUT": (0, 3)},
    "small_products": {},
    "symmetric": {"INPUT": (0, 3)},
    "leaf_inverse": {},
    "averages": {"INPUT": _IMAGES},
    "group_products": {"SQUARE": (0, 1), "SIDE": (16, 64), "INPUT": _IMAGES},
    "few_products": {"ROWS": (5, 10), "INPUT": _IMAGES},
    "example_sums": {"ACROSS": (0, 1), "INPUT": _IMAGES},
    "classes": {"LANES": (1, 32), "INPUT": _IMAGES},
}


class Launch(Protocol):
    """A compiled kernel."""

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[object, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        """Launch the kernel; arrays are passed as pointers, NumPy scalars and structs by value.

        ``shared_mem`` is the number of bytes of dynamic shared memory.
        """


class Device(Protocol):
    """A device that runs kernels, which is a GPU, or the CPU in tests.

    Attributes:
        processors: Number of multiprocessors.
    """

    processors: int

    def function(
        self, source: str, name: str, options: tuple[str, ...], shared_bytes: int = 0
    ) -> Launch:
        """Return the kernel ``name`` of a source; each set of options is compiled once.

        Launches may have ``shared_bytes`` of dynamic shared memory.
        """

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return a copy of a host array on the device."""

    def address(self, array: Array) -> int:
        """Return the address of an array in device memory."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array."""


@cache
def source(name: str) -> str:
    """Return the text of ``name.cu`` after the prelude of all sources, and that of its kind."""
    folder = files(__package__)
    heads = ("prelude.cuh", "pairs.cuh") if name.startswith("pair_") else ("prelude.cuh",)
    return "\n".join((folder / part).read_text("utf-8") for part in (*heads, f"{name}.cu"))


def kernel(device: Device, file: str, name: str, *, shared_bytes: int = 0, **macros: int) -> Launch:
    """Return the kernel ``name`` of ``file.cu``, compiled with these macros."""
    return device.function(source(file), name, options(file, **macros), shared_bytes)


def options(name: str, **macros: int) -> tuple[str, ...]:
    """Return macros of a source as compiler options; they must be values of ``MACROS``."""
    listed = MACROS[name]
    assert macros.keys() == listed.keys(), (name, macros)
    assert all(macros[macro] in values for macro, values in listed.items()), (name, macros)
    return tuple(f"-D{macro}={macros[macro]}" for macro in listed)


def variants(name: str) -> Iterator[tuple[str, ...]]:
    """Yield all sets of compiler options of a source."""
    macros = MACROS[name]
    for values in product(*macros.values()):
        yield options(name, **dict(zip(macros, values, strict=True)))


def blocks_for(numbers: int, device: Device) -> int:
    """Return the number of blocks of a grid-stride loop over ``numbers`` entries."""
    return max(1, min(-(-numbers // BLOCK), 16 * device.processors))


def int32(value: int) -> np.int32:
    """Return a number as an ``int`` argument of a kernel."""
    return np.int32(value)


def float32(value: float) -> np.float32:
    """Return a number as a ``float`` argument of a kernel."""
    return np.float32(value)
