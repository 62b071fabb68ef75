"""Launches arithmetic on many arrays at once: checks, inner products and sums (``spans.cu``)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kfac_engine.kernels.geometry import words
from kfac_engine.kernels.launch import BLOCK, INPUTS, Array, Device, blocks_for, int32, kernel

# Largest number of arrays of one launch, which is the bound of a grid axis.
_MOST = 65535

_SPAN = np.dtype([(name, "i8") for name in ("address", "numbers")])
_PAIR = np.dtype([(name, "i8") for name in ("left", "right", "numbers")])
_COMBINATION = np.dtype(
    [(name, "i8") for name in ("out", "x", "y", "numbers")]
    + [(name, "f8") for name in ("a", "b", "exponent")]
    + [("row", "i8")]
)


class Combination(NamedTuple):
    """The sum ``out ← sᵉ (a·x + b·y)`` of arrays of one type and size, contiguous.

    Attributes:
        out: Receives the sum; may be ``x`` or ``y``.
        a: First coefficient.
        x: First array.
        b: Second coefficient.
        y: Second array; None without a second term.
        row: Row of the inner product s in parts; -1 for a factor of one.
        exponent: The exponent e. The factor is one for s = 0.
    """

    out: Array
    a: float
    x: Array
    b: float = 0.0
    y: Array = None
    row: int = -1
    exponent: float = 0.0


def find_infinite(device: Device, arrays: Sequence[Array], flags: Array) -> None:
    """Set the flags of arrays that contain NaN or infinity to zero.

    The arrays are contiguous, of one type, float32 or float64. ``flags`` has an int32 one for each
    of them.
    """
    rows = [(device.address(array), array.size) for array in arrays]
    for start, table in _tables(rows, _SPAN):
        find = kernel(device, "spans", "find_infinite", INPUT=INPUTS[arrays[0].dtype.name])
        grid = _blocks(device, arrays), len(table)
        find(grid, (BLOCK,), (device.upload(table), flags[start : start + len(table)]))


def pair_products(
    device: Device, pairs: Sequence[tuple[Array, Array]]
) -> tuple[Array, Callable[[], None]]:
    """Return an array for inner products in float64, and a function that computes them.

    The arrays are contiguous, of one type, float32 or float64; those of a pair have equal sizes.
    A row of the result ``(pairs, parts)`` adds up to the product of a pair. The function may be
    called again while the arrays have their memory.
    """
    lefts = [left for left, _ in pairs]
    blocks = _blocks(device, lefts)
    parts = device.empty((len(pairs), blocks), np.float64)
    rows = [(device.address(x), device.address(y), x.size) for x, y in pairs]
    multiply = kernel(device, "spans", "multiply_pairs", INPUT=INPUTS[lefts[0].dtype.name])
    launches = [
        partial(
            multiply,
            (blocks, len(table)),
            (BLOCK,),
            (device.upload(table), parts[start : start + len(table)]),
        )
        for start, table in _tables(rows, _PAIR)
    ]
    return parts, partial(_run, launches)


def multiply_pairs(device: Device, pairs: Sequence[tuple[Array, Array]]) -> Array:
    """Return the inner products of ``pair_products``."""
    parts, multiply = pair_products(device, pairs)
    multiply()
    return parts


def combine(
    device: Device,
    combinations: Sequence[Combination],
    parts: Array | None = None,
    *,
    choose: bool = False,
) -> Callable[[], None]:
    """Return a function that computes sums of arrays of one type, float32 or float64.

    It may be called again while the arrays have their memory.

    Args:
        device: Device of the arrays.
        combinations: The sums.
        parts: The inner products that rows refer to, a result of ``pair_products``.
        choose: Whether ``out`` receives ``x`` if the inner product is positive, else ``y``.
    """
    outs = [each.out for each in combinations]
    rows = [
        (
            device.address(each.out), device.address(each.x),
            0 if each.y is None else device.address(each.y), each.out.size,
            each.a, each.b, each.exponent, each.row,
        )
        for each in combinations
    ]  # fmt: skip
    parts = device.empty((1, 1), np.float64) if parts is None else parts
    name = "choose_arrays" if choose else "combine_arrays"
    launch = kernel(device, "spans", name, INPUT=INPUTS[outs[0].dtype.name])
    blocks, scalars = _blocks(device, outs), (parts, int32(parts.shape[1]))
    launches = [
        partial(launch, (blocks, len(table)), (BLOCK,), (device.upload(table), *scalars))
        for _, table in _tables(rows, _COMBINATION)
    ]
    return partial(_run, launches)


def _run(launches: Sequence[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


def _blocks(device: Device, arrays: Sequence[Array]) -> int:
    """Return the number of blocks of the longest array; surplus blocks of others return at once."""
    longest: int = max(array.size for array in arrays)
    blocks: int = min(blocks_for(longest, device), 2 * device.processors)
    return blocks


def _tables(
    rows: Sequence[tuple[Any, ...]], struct: np.dtype[Any]
) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """Yield tables of structs for launches, each with the number of its first row."""
    table = words(np.array(rows, struct))
    for start in range(0, len(rows), _MOST):
        yield start, table[start : start + _MOST]
