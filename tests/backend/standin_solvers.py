"""cuSOLVER for the stand-in: what CuPy binds of it, and the library itself, on addresses.

Both work in place on whatever memory they are told, in columns, as the real one does.
"""

from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
from scipy.linalg import lapack

HANDLE = 77
LOWER = 0
CALLS: Counter[str] = Counter()


def _memory(address: int, dtype: type, *shape: int) -> np.ndarray:
    count = int(np.prod(shape))
    kind = np.ctypeslib.as_ctypes_type(np.dtype(dtype))
    found: np.ndarray = np.ctypeslib.as_array((kind * count).from_address(address))
    return found.reshape(shape)


def _factor(address: int, side: int) -> int:
    # Columns of the lower triangle are rows of the upper one.
    rows = _memory(address, np.float64, side, side)
    root, info = lapack.dpotrf(rows.T, lower=1, clean=0)
    rows[...] = root.T
    return int(info)


def dpotrf_bufferSize(handle: int, uplo: int, n: int, a: int, lda: int) -> int:  # noqa: N802
    assert (handle, uplo, lda) == (HANDLE, LOWER, n)
    return 3 * n


def dpotrf(
    handle: int, uplo: int, n: int, a: int, lda: int, space: int, size: int, info: int
) -> None:
    assert (handle, uplo, lda, size) == (HANDLE, LOWER, n, 3 * n)
    CALLS["dpotrf"] += 1
    _memory(space, np.float64, size)[...] = np.nan
    _memory(info, np.int32, 1)[0] = _factor(a, n)


def dpotrfBatched(  # noqa: N802
    handle: int, uplo: int, n: int, places: int, lda: int, info: int, count: int
) -> None:
    assert (handle, uplo, lda) == (HANDLE, LOWER, n)
    CALLS["dpotrfBatched"] += 1
    codes = _memory(info, np.int32, count)
    for index, address in enumerate(_memory(places, np.uintp, count)):
        codes[index] = _factor(int(address), n)


def setStream(handle: int, stream: int) -> None:  # noqa: N802
    assert handle == HANDLE
    assert stream


class Library:
    """The library as ``ctypes`` shows it.

    Args:
        broken: Whether its inverses are wrong, and say nothing.
    """

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def cusolverDnDpotri_bufferSize(  # noqa: N802
        self, handle: Any, uplo: int, n: int, a: Any, lda: int, size: Any
    ) -> int:
        assert (handle.value, uplo, lda) == (HANDLE, LOWER, n)
        size._obj.value = 2 * n
        return 0

    def cusolverDnDpotri(  # noqa: N802
        self, handle: Any, uplo: int, n: int, a: Any, lda: int, space: Any, size: int, info: Any
    ) -> int:
        assert (handle.value, uplo, lda, size) == (HANDLE, LOWER, n, 2 * n)
        CALLS["dpotri"] += 1
        rows = _memory(a.value, np.float64, n, n)
        _memory(space.value, np.float64, size)[...] = np.nan
        inverse, code = lapack.dpotri(rows.T, lower=1)
        rows[...] = inverse.T * (2 if self.broken else 1)
        _memory(info.value, np.int32, 1)[0] = code
        return 0


def module() -> ModuleType:
    """What ``import cupy_backends.cuda.libs.cusolver`` finds."""
    found = ModuleType("cupy_backends.cuda.libs.cusolver")
    for function in (dpotrf_bufferSize, dpotrf, dpotrfBatched, setStream):
        setattr(found, function.__name__, function)
    return found
