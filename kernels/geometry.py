"""The structs of ``prelude.cuh`` as NumPy sees them: three spatial axes, missing ones first."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

AXES = 3

IMAGES = np.dtype(
    [
        ("image_stride", "i8"),
        ("channel_stride", "i8"),
        ("pixel_strides", "i8", AXES),
        ("images", "i4"),
        ("channels", "i4"),
        ("sides", "i4", AXES),
    ],
    align=True,
)
TAPS = np.dtype([(name, "i4", AXES) for name in ("kernel", "strides", "dilations")], align=True)
GRID = np.dtype([(name, "i4", AXES) for name in ("begins", "outputs")], align=True)
JOB = np.dtype([(name, "i4") for name in ("grid", "row", "column", "begin", "end")], align=True)
SUM = np.dtype([(name, "i4") for name in ("row", "column", "begin", "end")], align=True)

Struct = npt.NDArray[Any]


def images_struct(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Struct:
    """Images ``(n, channels, *sides)`` with strides in bytes, as CuPy and NumPy give them."""
    images, channels, *sides = shape
    steps = [stride // itemsize for stride in strides]
    pixels = _leading(steps[2:], 0)
    return np.array((steps[0], steps[1], pixels, images, channels, _leading(sides, 1)), IMAGES)


def taps_struct(kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Struct:
    """The geometry of a kernel, without where it starts."""
    return np.array(tuple(_leading(values, 1) for values in (kernel, strides, dilations)), TAPS)


def grid_struct(begins: Sequence[int], outputs: Sequence[int]) -> Struct:
    """A box of output positions."""
    return np.array((_leading(begins, 0), _leading(outputs, 1)), GRID)


def _leading(values: Sequence[int], neutral: int) -> tuple[int, ...]:
    return (neutral,) * (AXES - len(values)) + tuple(values)
