"""The structs of ``prelude.cuh`` as NumPy types, with three spatial axes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

AXES = 3

Struct: TypeAlias = npt.NDArray[Any]

IMAGES = np.dtype(
    [
        ("image_stride", "i8"),
        ("channel_stride", "i8"),
        ("pixel_strides", "i8", AXES),
        ("images", "i4"),
        ("channels", "i4"),
        ("shape", "i4", AXES),
    ],
    align=True,
)
TAPS = np.dtype([(name, "i4", AXES) for name in ("kernel", "strides", "dilations")], align=True)
GRID = np.dtype([(name, "i4", AXES) for name in ("begins", "outputs")], align=True)
JOB = np.dtype(
    [(name, "i4") for name in ("layer", "grid", "begin", "end")]
    + [("tiles", "i4", 4), ("parts", "i4", 4)],
    align=True,
)
WORK = np.dtype(
    [(name, "i8") for name in ("units", "length")]
    + [(name, "i4") for name in ("groups", "rows", "columns", "ones")],
    align=True,
)
SUM = np.dtype(
    [(name, "i4") for name in ("row", "column", "rows", "columns", "begin", "end", "layer")],
    align=True,
)
# Of patch_products.cu. Pointers are addresses of the device.
UNIT_LAYER = np.dtype([("x", "u8"), ("images", IMAGES), ("taps", TAPS)], align=True)
# Of patch_sums.cu.
SUMMED_LAYER = np.dtype(
    [(name, "u8") for name in ("x", "totals", "out")]
    + [("images", IMAGES), ("taps", TAPS), ("grid", GRID)]
    + [(name, "i4") for name in ("features", "across", "pieces", "length")]
    + [(name, "i4") for name in ("first_totals", "first_features")]
    + [(name, "f4") for name in ("count", "alpha", "beta")],
    align=True,
)
# Of pair_stage.cu and pair_products.cu.
STAGED_LAYER = np.dtype(
    [(name, "u8") for name in ("x", "peaks", "exponents", "pairs")]
    + [("images", IMAGES), ("taps", TAPS), ("grid", GRID)]
    + [(name, "i4") for name in ("features", "across", "pieces", "length")]
    + [(name, "i4") for name in ("first_peaks", "first_pairs")],
    align=True,
)
PAIR_LAYER = np.dtype(
    [
        ("pairs", "u8"),
        ("exponents", "u8"),
        ("channels", "i4"),
        ("shape", "i4", AXES),
        ("taps", TAPS),
    ],
    align=True,
)
# Of pair_rows.cu.
ROW_LAYER = np.dtype(
    [("x", "u8"), ("peaks", "u8"), ("image_stride", "i8")]
    + [(name, "i4") for name in ("channel_stride", "pixels", "channels", "pieces")],
    align=True,
)
# Of moment.cu: the matrix of a layer.
TARGET = np.dtype(
    [("out", "u8"), ("side", "i4"), ("alpha", "f4"), ("beta", "f4")],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry of images and of a window, as structs that kernels receive by value.

    Attributes:
        images: Struct ``Images``.
        taps: Struct ``Taps``.
        grid: Struct ``Grid`` of all output positions.
        count: Number of images.
        channels: Number of channels of each image.
        pixels: Number of pixels of each channel.
        positions: Number of output positions of each image.
    """

    images: Struct
    taps: Struct
    grid: Struct
    count: int
    channels: int
    pixels: int
    positions: int

    @property
    def across(self) -> bool:
        """Whether channels are closer together in memory than pixels."""
        (images,) = self.images
        strides = [
            step
            for step, size in zip(images["pixel_strides"], images["shape"], strict=True)
            if size > 1
        ]
        return all(images["channel_stride"] < step for step in strides)

    @property
    def of_pixels(self) -> "Geometry":
        """The geometry of the same images with their pixels as patches."""
        (images,) = self.images
        shape = tuple(images["shape"])
        ones, zeros = (1,) * AXES, (0,) * AXES
        return replace(
            self,
            taps=np.array([(ones, ones, ones)], TAPS),
            grid=grid_struct(zeros, shape),
            positions=self.pixels,
        )


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The sizes of a window, with one entry for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    outputs: tuple[int, ...]


def geometry(shape: Sequence[int], strides: Sequence[int], window: WindowShape) -> Geometry:
    """Return the geometry of images ``(n, channels, *spatial_shape)``, with strides in elements."""
    count, channels, *spatial_shape = shape
    pixel_strides = _leading(strides[2:], 0)
    images = (strides[0], strides[1], pixel_strides, count, channels, _leading(spatial_shape, 1))
    taps = tuple(_leading(sizes, 1) for sizes in (window.kernel, window.strides, window.dilations))
    return Geometry(
        images=np.array([images], IMAGES),
        taps=np.array([taps], TAPS),
        grid=grid_struct(window.begins, window.outputs),
        count=count,
        channels=channels,
        pixels=prod(spatial_shape),
        positions=prod(window.outputs),
    )


def grid_struct(begins: Sequence[int], outputs: Sequence[int]) -> Struct:
    """Return the struct of a box of output positions."""
    return np.array([(_leading(begins, 0), _leading(outputs, 1))], GRID)


def one_to_one(shape: Sequence[int], strides: Sequence[int]) -> Geometry:
    """Return the geometry of images whose patches are their pixels."""
    axes = len(shape) - 2
    ones, zeros = (1,) * axes, (0,) * axes
    return geometry(shape, strides, WindowShape(ones, ones, ones, zeros, tuple(shape[2:])))


def words(structs: Struct) -> npt.NDArray[np.int32]:
    """Return structs as rows of 32-bit words, which every array library supports."""
    return structs.view(np.int32).reshape(structs.size, structs.itemsize // 4)


def _leading(values: Sequence[int], neutral: int) -> tuple[int, ...]:
    return (neutral,) * (AXES - len(values)) + tuple(values)
