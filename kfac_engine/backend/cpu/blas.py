"""Calls SciPy's BLAS and LAPACK on views with any leading dimension, in place, without copies.

SciPy's public wrappers copy operands that are not contiguous and cannot write to part of a matrix.
Its Cython interface exports the routines. ``ctypes`` calls them with pointers and strides, and
releases the interpreter lock. Pointers have no shapes and types, so this module asserts them.
Large products are divided among threads.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

from kfac_engine._types import Array
from kfac_engine.backend.threads import WORTH_WAKING, Workers, equal_slices

# Indices of the operands among the arguments of GEMM.
_Y, _X = 6, 8
_LARGEST = 2**31 - 1  # largest size or stride in the 32-bit integers of BLAS


class MatrixLayout(NamedTuple):
    """Memory layout of a matrix that BLAS can read."""

    row_major: bool  # whether elements of a row are adjacent; otherwise elements of a column are
    leading: int  # number of elements from one row (or column) to the next


def layout(x: Array) -> MatrixLayout | None:
    """Return the layout of a matrix ``(m, k)``, or None if BLAS cannot read it without a copy.

    One axis must have unit stride, and the other a positive stride of whole elements.
    """
    flags = x.flags
    if not flags.aligned:
        return None
    if flags.forc:  # without gaps
        by_row = flags.c_contiguous
        return MatrixLayout(by_row, x.shape[int(by_row)] or 1)
    size, shape, strides = x.itemsize, x.shape, x.strides
    for inner, outer in ((1, 0), (0, 1)):
        # The stride of an axis of length one is not used.
        if strides[inner] == size or shape[inner] <= 1:
            least = shape[inner] or 1
            leading = strides[outer] // size if shape[outer] > 1 else least
            if leading >= least and (shape[outer] <= 1 or not strides[outer] % size):
                return MatrixLayout(inner == 1, leading)
    return None


def syrk(x: Array, out: Array, *, alpha: float, beta: float) -> None:
    """Compute the lower triangle of ``out ← beta·out + alpha·x xᵀ``, in place.

    The strict upper triangle does not change. ``x``, ``(d, k)``, has a ``layout``; ``out``,
    ``(d, d)``, has adjacent elements in each row. Both have the same type, float32 or float64. If
    ``beta`` is zero, ``out`` is overwritten, NaN included.
    """
    by_row, leading = _read(x, out)
    size, depth = x.shape
    assert out.shape == (size, size), f"{out.shape} cannot hold the product of {x.shape}"
    real = _REAL[out.dtype.char]
    # BLAS is column-major: a row-major lower triangle is an upper one, and x is transposed.
    _SYRK[out.dtype.char](
        b"U",
        b"T" if by_row else b"N",
        integer(size),
        integer(depth),
        ctypes.byref(real(alpha)),
        x.ctypes.data,
        integer(leading),
        ctypes.byref(real(beta)),
        out.ctypes.data,
        integer(leading_dimension(out)),
    )


def gemm(x: Array, y: Array, out: Array, *, alpha: float, beta: float) -> None:
    """Compute ``out ← beta·out + alpha·x yᵀ`` in place; arguments as in ``gemm_call``."""
    gemm_call(x, y, out, alpha=alpha, beta=beta)()


def gemm_call(x: Array, y: Array, out: Array, *, alpha: float, beta: float) -> partial[None]:
    """Return a function that computes ``out ← beta·out + alpha·x yᵀ`` from the current entries.

    Checks and conversions of the arguments take longer than a small product. They happen once,
    before the repeated calls. Arrays and scales are as for ``syrk``: ``x`` is ``(m, k)``, ``y``
    ``(n, k)`` and ``out`` ``(m, n)``. The function holds references to them.
    """
    x_by_row, x_leading = _read(x, out)
    y_by_row, y_leading = _read(y, out)
    (m, depth), n = x.shape, len(y)
    assert out.shape == (m, n), f"{out.shape} cannot hold the product of {x.shape}, {y.shape}"
    assert y.shape[1] == depth, f"{x.shape} and {y.shape} have no common depth"
    real = _REAL[out.dtype.char]
    # BLAS is column-major: outᵀ = y xᵀ.
    return partial(
        _GEMM[out.dtype.char],
        b"T" if y_by_row else b"N",
        b"N" if x_by_row else b"T",
        integer(n),
        integer(m),
        integer(depth),
        ctypes.byref(real(alpha)),
        _address(y),
        integer(y_leading),
        _address(x),
        integer(x_leading),
        ctypes.byref(real(beta)),
        _address(out),
        integer(leading_dimension(out)),
    )


def gemm_sum(x: Array, y: Array, out: Array) -> None:
    """Compute ``out ← out + Σ_i x_iᵀ y_i`` over stacks of matrices, in place.

    ``x`` is ``(…, k, m)``, ``y`` ``(…, k, n)`` and ``out`` ``(m, n)``, with adjacent elements in
    each row.
    """
    if not x.size:
        return
    first = (0,) * (x.ndim - 2)
    call = gemm_call(x[first].T, y[first].T, out, alpha=1.0, beta=1.0)
    multiply, arguments = call.func, list(call.args)  # calls differ in addresses only
    for x_address, y_address in zip(_addresses(x), _addresses(y), strict=True):
        arguments[_Y], arguments[_X] = y_address, x_address
        multiply(*arguments)


def trmm(lower: Array, out: Array, *, right: bool, transposed: bool, alpha: float) -> None:
    """Compute ``out ← alpha·L out``, or ``alpha·out L`` from the right, in place.

    If ``transposed``, ``Lᵀ`` replaces ``L``. The upper triangle of ``lower`` is not read. Both
    arrays are float64 with adjacent elements in each row.
    """
    size = len(lower)
    assert lower.shape == (size, size), f"a triangle of shape {lower.shape} is not square"
    assert out.shape[1 if right else 0] == size, f"{lower.shape} and {out.shape} do not match"
    assert lower.dtype == out.dtype == "d", f"{lower.dtype} and {out.dtype} are not float64"
    # BLAS is column-major: L is the upper triangle Lᵀ, on the other side of outᵀ.
    _TRMM(
        b"L" if right else b"R",
        b"U",
        b"T" if transposed else b"N",
        b"N",
        integer(out.shape[1]),
        integer(len(out)),
        ctypes.byref(ctypes.c_double(alpha)),
        lower.ctypes.data,
        integer(leading_dimension(lower)),
        out.ctypes.data,
        integer(leading_dimension(out)),
    )


def _read(x: Array, out: Array) -> MatrixLayout:
    """Return the layout of an operand, which must have the type of ``out``."""
    assert x.ndim == 2, f"an operand of shape {x.shape} is not a matrix"
    assert x.dtype == out.dtype, f"{x.dtype} and {out.dtype} differ"
    view_layout = layout(x)
    assert view_layout is not None, f"strides {x.strides} of {x.shape} need a copy first"
    return view_layout


def leading_dimension(out: Array) -> int:
    """Return the leading dimension of a result with adjacent elements in each row."""
    view_layout = layout(out)
    assert view_layout is not None, f"BLAS cannot write a result with strides {out.strides}"
    assert view_layout.row_major, "elements in a row of a result must be adjacent"
    assert out.flags.writeable, "a result must be writeable"
    return view_layout.leading


def _address(x: Array) -> ctypes.c_void_p:
    """Return the address of an array; the object holds a reference to the array."""
    return x.ctypes.data_as(ctypes.c_void_p)


def _addresses(stack: Array) -> list[int]:
    """Return the addresses of the matrices of a stack."""
    offsets = sum(
        np.arange(length).reshape(-1, *[1] * (stack.ndim - 3 - axis)) * stack.strides[axis]
        for axis, length in enumerate(stack.shape[:-2])
    )
    return (stack.ctypes.data + np.ravel(offsets)).tolist()


@lru_cache(maxsize=1024)
def integer(value: int) -> Any:
    """Return a pointer to an integer, as routines of BLAS take their sizes."""
    assert value <= _LARGEST, f"{value} exceeds the largest integer of BLAS, {_LARGEST}"
    return ctypes.byref(_INTEGER(value))


def _capsule(module: ModuleType, name: str) -> tuple[bytes, int]:
    """Return the C signature and the address of a routine that SciPy exports to Cython."""
    capsule = module.__pyx_capi__[name]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature: bytes = get_name(capsule)
    return signature, get_pointer(capsule, signature)


def routine(module: ModuleType, name: str, arguments: int) -> Callable[..., None]:
    """Return a routine of BLAS or LAPACK as a function of addresses.

    It releases the interpreter lock. ``module`` is SciPy's ``cython_blas`` or ``cython_lapack``,
    ``arguments`` the number of arguments.
    """
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)
    return prototype(_capsule(module, name)[1])


# The signature shows whether SciPy was built with 32-bit or 64-bit BLAS integers.
_INTEGER = ctypes.c_int if b" int *" in _capsule(cython_blas, "ssyrk")[0] else ctypes.c_int64
_SYRK = {"f": routine(cython_blas, "ssyrk", 10), "d": routine(cython_blas, "dsyrk", 10)}
_GEMM = {"f": routine(cython_blas, "sgemm", 13), "d": routine(cython_blas, "dgemm", 13)}
_TRMM = routine(cython_blas, "dtrmm", 11)
_REAL = {"f": ctypes.c_float, "d": ctypes.c_double}


def lapack(matrix: Array, *names: str) -> int:
    """Call LAPACK routines in turn on the lower triangle of a matrix; stop at the first failure.

    Elements of the matrix, float64, are adjacent in each row. The result is zero or a code of:

    - ``potrf``, which replaces a matrix with its Cholesky factor ``L``: the order of the first
      leading minor that is not positive;
    - ``trtri``, which replaces ``L`` with its inverse: the index of the first zero on the diagonal,
      counted from one;
    - ``lauum``, which replaces ``L`` with ``Lᵀ L``, and never fails.
    """
    size, info = len(matrix), ctypes.c_int64(0)
    assert matrix.shape == (size, size), f"a triangle of shape {matrix.shape} is not square"
    assert matrix.dtype == "d", f"{matrix.dtype} is not float64"
    # LAPACK is column-major: a row-major lower triangle L is the upper triangle Lᵀ.
    leading, data = integer(leading_dimension(matrix)), matrix.ctypes.data
    for name in names:
        routine, options = _ROUTINES[name]
        routine(*options, integer(size), data, leading, ctypes.byref(info))
        if info.value:
            break
    return int(info.value)


_ROUTINES = {
    "potrf": (routine(cython_lapack, "dpotrf", 5), (b"U",)),
    "trtri": (routine(cython_lapack, "dtrtri", 6), (b"U", b"N")),
    "lauum": (routine(cython_lapack, "dlauum", 5), (b"U",)),
}


def matmul(x: Array, y: Array, out: Array | None, workers: Workers) -> Array:
    """Return the product ``x y`` of matrices, stacks of matrices, or vectors.

    It is written to ``out`` unless this is None. Threads compute a large product of two matrices,
    or a stack.
    """
    if min(x.ndim, y.ndim) < 2 or x.size * y.shape[-1] < WORTH_WAKING:
        product: Array = np.matmul(x, y, out=out)
        return product
    if out is None:
        stack = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        out = np.empty((*stack, x.shape[-2], y.shape[-1]), np.result_type(x, y))
    if out.ndim == 2 and out.shape[0] < out.shape[1]:
        matmul(y.T, x.T, out.T, workers)
        return out
    calls = [
        partial(np.matmul, _part(x, rows, out), _part(y, rows, out), out=out[rows])
        if out.ndim > 2
        else partial(np.matmul, x[rows], y, out=out[rows])
        for rows in equal_slices(len(out), workers.free)
    ]
    workers.run(calls)
    return out


def _part(operand: Array, rows: slice, out: Array) -> Array:
    """Return the part of an operand for ``out[rows]``, or the operand if it is broadcast."""
    stacked = operand.ndim == out.ndim and len(operand) == len(out)
    return operand[rows] if stacked else operand
