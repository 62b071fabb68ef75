"""Cholesky factors and inverses of stacks of matrices by cuSOLVER, on several streams.

Only this file and ``device`` contain calls that need a GPU. CuPy has a binding for the
factorisation, but none for ``potri``, which computes the inverse. This file calls ``potri`` in the
library that CuPy has loaded, after a trial on a matrix with a known inverse.
"""

import ctypes
import os
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from kfac_engine.errors import BackendError

# An array of the device.
_Array: TypeAlias = Any

# The largest size for one call on a whole stack, and the number of streams: docs/inverses.md has
# measurements of others.
STACKED_SIZE = 256
STREAMS = 4

# File names of cuSOLVER in CUDA 13 and 12.
_LIBRARIES = ("libcusolver.so.12", "libcusolver.so.11")
_UPPER = 1  # CUBLAS_FILL_MODE_UPPER: cuSOLVER reads rows as columns, so lower is upper
_TRIAL = ((4.0, 2.0), (2.0, 3.0))
_TRIAL_INVERSE = ((0.375, -0.25), (-0.25, 0.5))


class Solvers:
    """Computes factorisations on one device.

    If ``has_potri``, ``potri`` computes inverses; otherwise triangular solves do.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._calls: Any = import_module("cupy_backends.cuda.libs.cusolver")
        self._streams = [xp.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self._library = loaded_library()
        self.has_potri = self._library is not None and self._proven()

    def cholesky(self, work: _Array) -> _Array:
        """Replace a stack of matrices with their Cholesky factors, and return the error codes.

        ``work`` is ``(n, d, d)``, float64, C-contiguous and symmetric; its upper triangles become
        unspecified. The codes ``(n,)`` are on the device, zero where the factor exists.
        """
        count, size, _ = work.shape
        info = self._xp.zeros(count, np.int32)
        if size <= STACKED_SIZE and count > 1:
            first, step = work.data.ptr, work.strides[0]
            addresses = self._xp.arange(first, first + count * step, step, dtype=np.uintp)
            self._calls.dpotrfBatched(
                self._handle(), _UPPER, size, addresses.data.ptr, size, info.data.ptr, count
            )
            return info
        for matrix, code in zip(work, self._each(info), strict=True):
            at = self._handle(), _UPPER, size, matrix.data.ptr, size
            size = self._calls.dpotrf_bufferSize(*at)
            space = self._xp.empty(size, np.float64)
            self._calls.dpotrf(*at, space.data.ptr, size, code.data.ptr)
        return info

    def inverse(self, roots: _Array) -> _Array:
        """Return the inverses ``(L Lᵀ)⁻¹`` of a stack of Cholesky factors; overwrite the factors.

        Only the lower triangles are defined. The inverse is unspecified for a factor that does not
        exist.
        """
        xp = self._xp
        if self.has_potri and (roots.shape[1] > STACKED_SIZE or len(roots) == 1):
            info = xp.zeros(len(roots), np.int32)
            for matrix, code in zip(roots, self._each(info), strict=True):
                self._potri(matrix, code)
            return roots
        inverses = self.solve_lower(roots)
        product: _Array = xp.ascontiguousarray(inverses.swapaxes(1, 2) @ inverses)
        return product

    def solve_lower(self, lowers: _Array) -> _Array:
        """Return ``L⁻¹`` of each matrix of a stack ``(n, d, d)``, with zeros above the diagonal."""
        xp = self._xp
        solve = import_module("cupyx.scipy.linalg").solve_triangular
        eye = xp.broadcast_to(xp.eye(lowers.shape[1], dtype=lowers.dtype), lowers.shape)
        solved: _Array = xp.tril(solve(xp.tril(lowers), xp.ascontiguousarray(eye), lower=True))
        return solved

    def fork(self, streams: int) -> list[Any]:
        """Return streams whose work starts after all earlier work of the current stream.

        If ``streams`` is zero, the list contains the current stream alone.
        """
        current = self._xp.cuda.get_current_stream()
        if not streams:
            return [current]
        begun = current.record()
        for stream in self._streams[:streams]:
            stream.wait_event(begun)
        return self._streams[:streams]

    def join(self, streams: Sequence[Any]) -> None:
        """Delay later work of the current stream until the other streams have finished."""
        current = self._xp.cuda.get_current_stream()
        for stream in streams:
            if stream is not current:
                current.wait_event(stream.record())

    # -- private ----------------------------------------------------------------------------------

    def _handle(self) -> int:
        handle: int = self._xp.cuda.device.get_cusolver_handle()
        return handle

    def _each(self, info: _Array) -> Sequence[_Array]:
        return [info[index : index + 1] for index in range(len(info))]

    def _potri(self, root: _Array, code: _Array) -> None:
        """Replace a Cholesky factor with the lower triangle of the inverse."""
        handle = self._handle()
        self._calls.setStream(handle, self._xp.cuda.get_current_stream().ptr)
        size, workspace = len(root), ctypes.c_int()
        at = ctypes.c_void_p(handle), _UPPER, size, ctypes.c_void_p(root.data.ptr), size
        status = self._library.cusolverDnDpotri_bufferSize(*at, ctypes.byref(workspace))
        space = self._xp.empty(max(1, workspace.value), np.float64)
        pointers = ctypes.c_void_p(space.data.ptr), workspace.value, ctypes.c_void_p(code.data.ptr)
        status = status or self._library.cusolverDnDpotri(*at, *pointers)
        if status:
            raise BackendError(
                f"potri of cuSOLVER failed on a {size} × {size} matrix with status {status}."
            )

    def _proven(self) -> bool:
        """Return whether ``potri`` computes the correct inverse of a small matrix."""
        work = self._xp.asarray([_TRIAL], dtype=np.float64)
        self.cholesky(work)
        try:
            self._potri(work[0], self._xp.zeros(1, np.int32))
        except (BackendError, AttributeError):  # the library refuses, or has no such function
            return False
        inverse = self._xp.asnumpy(self._xp.tril(work[0]))
        return bool(np.allclose(inverse, np.tril(_TRIAL_INVERSE), rtol=0, atol=1e-12))


def loaded_library() -> Any:
    """Return the cuSOLVER library that CuPy has loaded; None if it has an unknown file name."""
    # A second version must not be loaded, because its functions would receive a handle of the first
    # version.
    only_loaded: int | None = getattr(os, "RTLD_NOLOAD", None)
    for name in _LIBRARIES if only_loaded is not None else ():
        try:
            return ctypes.CDLL(name, mode=only_loaded or 0)
        except OSError:
            continue
    return None
