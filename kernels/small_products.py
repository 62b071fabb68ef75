"""Launches products of many small matrices at once (``small_products.cu``)."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from kfac_engine.kernels.geometry import words
from kfac_engine.kernels.launch import Array, Device, int32, kernel

_TILE = 32
_THIN_BLOCK = (_TILE, 8)
_MATRIX = np.dtype(
    [("address", "i8")] + [(name, "i4") for name in ("inner", "outer", "step", "column")]
)
_PRODUCT = np.dtype(
    [(name, _MATRIX) for name in ("left", "right", "plus", "out")]
    + [(name, "i4") for name in ("rows", "columns", "depth", "first")]
    + [(name, "f4") for name in ("alpha", "beta")]
)


class Product(NamedTuple):
    """The product ``out ← alpha·left·right + beta·plus`` of float32 matrices.

    The matrices have any strides. A matrix with three axes has rows of two axes, and columns.

    Attributes:
        left: Left factor.
        right: Right factor.
        out: Receives the product, in the memory of neither factor.
        alpha: Scale of the product.
        beta: Scale of ``plus``.
        plus: Is added; may be ``out``. None for nothing.
    """

    left: Array
    right: Array
    out: Array
    alpha: float = 1.0
    beta: float = 0.0
    plus: Array = None


def small_products(device: Device, products: Sequence[Product]) -> Callable[[], None]:
    """Return a function that computes products of matrices of any shapes in one launch.

    It may be called again while the matrices have their memory.
    """
    rows, blocks = [], 0
    for each in products:
        count, columns = prod(each.out.shape[:-1]), each.out.shape[-1]
        sizes = count, columns, each.left.shape[-1], blocks
        plus = each.out if each.plus is None else each.plus
        matrices = (_matrix(device, x) for x in (each.left, each.right, plus, each.out))
        rows.append((*matrices, *sizes, each.alpha, 0.0 if each.plus is None else each.beta))
        blocks += -(-count // _TILE) * -(-columns // _TILE)
    table = device.upload(words(np.array(rows, _PRODUCT)))
    multiply = kernel(device, "small_products", "small_products")
    return partial(multiply, (blocks,), _THIN_BLOCK, (table, int32(len(rows))))


def _matrix(device: Device, array: Array) -> tuple[int, int, int, int, int]:
    """Return the address of a matrix, and its strides in numbers."""
    *outer, step, column = (stride // array.itemsize for stride in array.strides)
    inner = array.shape[-2]
    return device.address(array), inner, outer[0] if outer else 0, step, column
