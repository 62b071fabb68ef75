"""LAPACK routines of SciPy on triangles of views, in place and without the interpreter lock."""

import ctypes

from scipy.linalg import cython_lapack

from kfac_engine._types import Array
from kfac_engine.backend.cpu import blas


def potrf(matrix: Array) -> int:
    """Replace the lower triangle of a float64 matrix with its Cholesky factor ``L``.

    Elements are adjacent in each row. The result is zero, or the order of the first leading minor
    that is not positive.
    """
    return _in_place("potrf", matrix)


def trtri(lower: Array) -> int:
    """Replace a lower triangle, float64 with adjacent elements in each row, with its inverse.

    The result is zero, or the index of the first zero on the diagonal, counted from one.
    """
    return _in_place("trtri", lower)


def lauum(lower: Array) -> int:
    """Replace a lower triangle ``L``, float64, with the lower triangle of ``Lᵀ L``; return zero."""
    return _in_place("lauum", lower)


def _in_place(name: str, matrix: Array) -> int:
    """Call a routine of LAPACK on a lower triangle and return its code."""
    size, info = len(matrix), ctypes.c_int64(0)
    assert matrix.shape == (size, size), f"a triangle of shape {matrix.shape} is not square"
    assert matrix.dtype == "d", f"{matrix.dtype} is not float64"
    routine, options = _ROUTINES[name]
    # LAPACK is column-major: a row-major lower triangle L is the upper triangle Lᵀ.
    routine(
        *options,
        blas.integer(size),
        matrix.ctypes.data,
        blas.integer(blas.leading_dimension(matrix)),
        ctypes.byref(info),
    )
    return int(info.value)


_ROUTINES = {
    "potrf": (blas.routine(cython_lapack, "dpotrf", 5), (b"U",)),
    "trtri": (blas.routine(cython_lapack, "dtrtri", 6), (b"U", b"N")),
    "lauum": (blas.routine(cython_lapack, "dlauum", 5), (b"U",)),
}
