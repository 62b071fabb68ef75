"""Triangles of SciPy's LAPACK, in place on views and without the interpreter lock."""

import ctypes

from scipy.linalg import cython_lapack

from kfac_engine._types import Array
from kfac_engine.backend.cpu import blas


def potrf(matrix: Array) -> int:
    """Cholesky's ``L`` in the lower triangle, in place; the rest of the matrix stays as it is.

    Args:
        matrix: ``(d, d)``, symmetric, float64, with adjacent elements in each row.

    Returns:
        Zero, or the order of the first leading minor that is not positive.
    """
    return _in_place("potrf", matrix)


def trtri(lower: Array) -> int:
    """``L⁻¹`` in place of a lower triangle; the rest of the matrix stays as it is.

    Args:
        lower: ``(d, d)``, float64, with adjacent elements in each row.

    Returns:
        Zero, or the place of the first zero on the diagonal, counted from one.
    """
    return _in_place("trtri", lower)


def lauum(lower: Array) -> int:
    """Lower triangle of ``Lᵀ L`` in place of ``L``; the rest of the matrix stays as it is.

    Args:
        lower: ``(d, d)``, float64, with adjacent elements in each row.

    Returns:
        Zero.
    """
    return _in_place("lauum", lower)


def _in_place(name: str, matrix: Array) -> int:
    """Calls a routine that takes one triangle and what it says of it."""
    side, info = len(matrix), ctypes.c_int64(0)
    assert matrix.shape == (side, side), f"a triangle of shape {matrix.shape} is not square"
    assert matrix.dtype == "d", f"{matrix.dtype} is not float64"
    routine, options = _ROUTINES[name]
    # Column by column, a row-major lower triangle L is the upper one Lᵀ.
    routine(
        *options,
        blas.integer(side),
        matrix.ctypes.data,
        blas.integer(blas.written(matrix)),
        ctypes.byref(info),
    )
    return int(info.value)


_ROUTINES = {
    "potrf": (blas.routine(cython_lapack, "dpotrf", 5), (b"U",)),
    "trtri": (blas.routine(cython_lapack, "dtrtri", 6), (b"U", b"N")),
    "lauum": (blas.routine(cython_lapack, "dlauum", 5), (b"U",)),
}
