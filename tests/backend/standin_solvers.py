"""cuSOLVER and cuBLAS for the stand-in: what CuPy binds of them, on addresses.

They work in place on whatever memory they are told, in columns, as the real ones do.
"""

from collections import Counter
from types import ModuleType

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


def dgemmStridedBatched(  # noqa: N802
    handle: int,
    transa: int,
    transb: int,
    m: int,
    n: int,
    k: int,
    alpha: int,
    a: int,
    lda: int,
    stride_a: int,
    b: int,
    ldb: int,
    stride_b: int,
    beta: int,
    c: int,
    ldc: int,
    stride_c: int,
    count: int,
) -> None:
    """``C ← αAB + βC`` of stacks of columns; ``C`` is not read where β is zero."""
    assert handle == HANDLE
    CALLS["dgemmStridedBatched"] += 1
    scales = [_memory(place, np.float64, 1)[0] for place in (alpha, beta)]
    # Columns as rows: the transposed matrices.
    x = _stack(a, lda, stride_a, (m, k) if transa else (k, m), count)
    y = _stack(b, ldb, stride_b, (k, n) if transb else (n, k), count)
    out = _stack(c, ldc, stride_c, (n, m), count)
    x, y = x.swapaxes(1, 2) if transa else x, y.swapaxes(1, 2) if transb else y
    with np.errstate(all="ignore"):  # of matrices whose inverse does not exist
        product = scales[0] * (y @ x)
        out[...] = product + scales[1] * out if scales[1] else product


def _stack(address: int, ld: int, stride: int, shape: tuple[int, int], count: int) -> np.ndarray:
    rows, columns = shape
    assert ld >= columns
    size = (count - 1) * stride + (rows - 1) * ld + columns
    flat = _memory(address, np.float64, size)
    return np.lib.stride_tricks.as_strided(flat, (count, *shape), (8 * stride, 8 * ld, 8))


def modules() -> dict[str, ModuleType]:
    """What ``import`` finds of CuPy's bindings."""
    libraries = {
        "cusolver": (dpotrf_bufferSize, dpotrf, dpotrfBatched),
        "cublas": (dgemmStridedBatched,),
    }
    found = {}
    for library, functions in libraries.items():
        name = f"cupy_backends.cuda.libs.{library}"
        found[name] = ModuleType(name)
        for function in functions:
            setattr(found[name], function.__name__, function)
    return found
