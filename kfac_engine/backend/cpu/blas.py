"""Rank-k products of SciPy's BLAS on views: any leading dimension, in place, without copies.

SciPy's public wrappers copy every operand that is not contiguous and cannot write into part of a
matrix. Its Cython interface exports the routines themselves; ``ctypes`` calls them with pointers
and strides, without the interpreter lock. What a pointer cannot say is asserted here.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cython_blas

from kfac_engine._types import Array

# Where GEMM takes the addresses of its operands.
_Y, _X = 6, 8
_LARGEST = 2**31 - 1  # a side or stride, where BLAS counts in 32 bits


class Layout(NamedTuple):
    """How BLAS, which thinks in columns, reads a matrix.

    Attributes:
        row_major: Whether elements of a row are adjacent; else those of a column are.
        leading: Elements from one row (or column) to the next.
    """

    row_major: bool
    leading: int


def layout(x: Array) -> Layout | None:
    """How BLAS can read a matrix where it lies, or None if it must be copied first.

    Args:
        x: ``(m, k)``, any strides.

    Returns:
        Its layout, if one axis has unit stride and the other steps forward over whole elements.
    """
    if not x.flags.aligned:
        return None
    for inner, outer in ((1, 0), (0, 1)):
        # The stride of an axis of length one is never used and may be anything.
        adjacent = x.strides[inner] == x.itemsize or x.shape[inner] <= 1
        step, rest = divmod(x.strides[outer], x.itemsize)
        leading = step if x.shape[outer] > 1 else max(x.shape[inner], 1)
        if adjacent and leading >= max(x.shape[inner], 1) and (not rest or x.shape[outer] <= 1):
            return Layout(inner == 1, leading)
    return None


def syrk(x: Array, out: Array, *, alpha: float, beta: float) -> None:
    """Lower triangle of ``out ← beta·out + alpha·x xᵀ``; the rest of ``out`` stays as it is.

    Args:
        x: ``(d, k)``, float32 or float64, with a ``layout``.
        out: ``(d, d)``, of the same dtype, with adjacent elements in each row.
        alpha: Scale of the product.
        beta: Scale of the old matrix; zero overwrites, NaN included.
    """
    by_row, leading = _read(x, out)
    side, depth = x.shape
    assert out.shape == (side, side), f"{out.shape} cannot hold the product of {x.shape}"
    real = _REAL[out.dtype.char]
    # Column by column, a row-major lower triangle is an upper one, and x is transposed.
    _SYRK[out.dtype.char](
        b"U",
        b"T" if by_row else b"N",
        integer(side),
        integer(depth),
        ctypes.byref(real(alpha)),
        x.ctypes.data,
        integer(leading),
        ctypes.byref(real(beta)),
        out.ctypes.data,
        integer(written(out)),
    )


def gemm(x: Array, y: Array, out: Array, *, alpha: float, beta: float) -> None:
    """``out ← beta·out + alpha·x yᵀ``; arguments as for ``gemm_call``."""
    gemm_call(x, y, out, alpha=alpha, beta=beta)()


def gemm_call(x: Array, y: Array, out: Array, *, alpha: float, beta: float) -> partial[None]:
    """A call that does ``out ← beta·out + alpha·x yᵀ`` each time, on what the arrays then hold.

    Checking and wrapping the arguments takes longer than a small product; this does it once.

    Args:
        x: ``(m, k)``, float32 or float64, with a ``layout``.
        y: ``(n, k)``, of the same dtype, with a ``layout``.
        out: ``(m, n)``, of the same dtype, with adjacent elements in each row.
        alpha: Scale of the product.
        beta: Scale of the old matrix; zero overwrites, NaN included.

    Returns:
        The call; it keeps the arrays alive.
    """
    x_by_row, x_leading = _read(x, out)
    y_by_row, y_leading = _read(y, out)
    (m, depth), n = x.shape, len(y)
    assert out.shape == (m, n), f"{out.shape} cannot hold the product of {x.shape}, {y.shape}"
    assert y.shape[1] == depth, f"{x.shape} and {y.shape} have no common depth"
    real = _REAL[out.dtype.char]
    # Column by column, outᵀ = y xᵀ.
    return partial(
        _GEMM[out.dtype.char],
        b"T" if y_by_row else b"N",
        b"N" if x_by_row else b"T",
        integer(n),
        integer(m),
        integer(depth),
        ctypes.byref(real(alpha)),
        _held(y),
        integer(y_leading),
        _held(x),
        integer(x_leading),
        ctypes.byref(real(beta)),
        _held(out),
        integer(written(out)),
    )


def gemm_sum(x: Array, y: Array, out: Array) -> None:
    """``out ← out + Σ_i x_iᵀ y_i`` over stacks of matrices, one call of BLAS for each.

    Args:
        x: ``(…, k, m)``, float32 or float64; adjacent elements in each row.
        y: ``(…, k, n)``, likewise.
        out: ``(m, n)``, likewise.
    """
    if not x.size:
        return
    first = (0,) * (x.ndim - 2)
    call = gemm_call(x[first].T, y[first].T, out, alpha=1.0, beta=1.0)
    multiply, arguments = call.func, list(call.args)  # one beside the other, only addresses differ
    for x_address, y_address in zip(_addresses(x), _addresses(y), strict=True):
        arguments[_Y], arguments[_X] = y_address, x_address
        multiply(*arguments)


def trmm(lower: Array, out: Array, *, right: bool, transposed: bool, alpha: float) -> None:
    """``out ← alpha·L out``, or ``alpha·out L`` from the right, in place.

    Args:
        lower: ``L``, ``(k, k)``, float64, with adjacent elements in each row; what stands above
            the diagonal is not read.
        out: ``(k, n)``, or ``(m, k)`` from the right, likewise.
        right: On which side of ``out`` the triangle stands.
        transposed: Whether ``Lᵀ`` stands there.
        alpha: Scale of the product.
    """
    side = len(lower)
    assert lower.shape == (side, side), f"a triangle of shape {lower.shape} is not square"
    assert out.shape[1 if right else 0] == side, f"{lower.shape} and {out.shape} do not match"
    assert lower.dtype == out.dtype == "d", f"{lower.dtype} and {out.dtype} are not float64"
    # Column by column, L is an upper triangle Lᵀ, and stands on the other side of outᵀ.
    _TRMM(
        b"L" if right else b"R",
        b"U",
        b"T" if transposed else b"N",
        b"N",
        integer(out.shape[1]),
        integer(len(out)),
        ctypes.byref(ctypes.c_double(alpha)),
        lower.ctypes.data,
        integer(written(lower)),
        out.ctypes.data,
        integer(written(out)),
    )


def _read(x: Array, out: Array) -> Layout:
    """Layout of an operand that fits ``out``."""
    assert x.ndim == 2, f"an operand of shape {x.shape} is no matrix"
    assert x.dtype == out.dtype, f"{x.dtype} and {out.dtype} differ"
    found = layout(x)
    assert found is not None, f"strides {x.strides} of {x.shape} need a copy first"
    return found


def written(out: Array) -> int:
    """Leading dimension of a result."""
    found = layout(out)
    assert found is not None, f"strides {out.strides} of a result are not BLAS's"
    assert found.row_major, "a result is written row by row"
    assert out.flags.writeable, "a result must be writeable"
    return found.leading


def _held(x: Array) -> ctypes.c_void_p:
    """The address of an array, which lives as long as the address."""
    return x.ctypes.data_as(ctypes.c_void_p)


def _addresses(stack: Array) -> list[int]:
    """Where the matrices of a stack begin."""
    offsets = sum(
        np.arange(length).reshape(-1, *[1] * (stack.ndim - 3 - axis)) * stack.strides[axis]
        for axis, length in enumerate(stack.shape[:-2])
    )
    return (stack.ctypes.data + np.ravel(offsets)).tolist()


def integer(value: int) -> Any:
    """The address of a number, as BLAS takes every scalar."""
    assert value <= _LARGEST, f"{value} is more than BLAS counts to"
    return ctypes.byref(_INTEGER(value))


def _capsule(module: ModuleType, name: str) -> tuple[bytes, int]:
    """C signature and address of a routine that SciPy exports to Cython."""
    capsule = module.__pyx_capi__[name]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature: bytes = get_name(capsule)
    return signature, get_pointer(capsule, signature)


def routine(module: ModuleType, name: str, arguments: int) -> Callable[..., None]:
    """A routine that takes everything by address.

    Args:
        module: SciPy's ``cython_blas`` or ``cython_lapack``.
        name: As there.
        arguments: How many.

    Returns:
        The function; it lets go of the interpreter lock.
    """
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)
    return prototype(_capsule(module, name)[1])


# A SciPy built for 64-bit BLAS says so in the signatures.
_INTEGER = ctypes.c_int if b" int *" in _capsule(cython_blas, "ssyrk")[0] else ctypes.c_int64
_SYRK = {"f": routine(cython_blas, "ssyrk", 10), "d": routine(cython_blas, "dsyrk", 10)}
_GEMM = {"f": routine(cython_blas, "sgemm", 13), "d": routine(cython_blas, "dgemm", 13)}
_TRMM = routine(cython_blas, "dtrmm", 11)
_REAL = {"f": ctypes.c_float, "d": ctypes.c_double}
