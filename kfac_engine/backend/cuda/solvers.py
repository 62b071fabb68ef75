"""Cholesky's factorisation and inverses of stacks of matrices by cuSOLVER, and streams to run on.

Like ``device``, this file holds calls that only a GPU can answer. CuPy binds the
factorisation, but not ``potri``, the inverse from it: that is called in the library CuPy has
loaded, after one trial on a matrix whose inverse is known.
"""

import ctypes
import os
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from kfac_engine.errors import BackendError

# An array of the device: with an address, unlike one of NumPy's.
_Array: TypeAlias = Any

# Predictions, not measured: up to this side one call for a whole stack beats a call a matrix.
STACKED_SIZE = 256
STREAMS = 4

# Names of the library in CUDA 13 and 12.
_LIBRARIES = ("libcusolver.so.12", "libcusolver.so.11")
_UPPER = 1  # CUBLAS_FILL_MODE_UPPER: of the transposed matrix, as rows are read as columns
_TRIAL = ((4.0, 2.0), (2.0, 3.0))
_TRIAL_INVERSE = ((0.375, -0.25), (-0.25, 0.5))


class Solvers:
    """Factorisations on one device.

    Args:
        xp: CuPy.

    Attributes:
        has_potri: Whether inverses are taken by ``potri``; otherwise by triangular solves.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._calls: Any = import_module("cupy_backends.cuda.libs.cusolver")
        self._streams = [xp.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self._library = loaded_library()
        self.has_potri = self._library is not None and self._proven()

    def cholesky(self, work: _Array) -> _Array:
        """Lower-triangular roots of a stack, in place; the upper triangles become anything.

        Args:
            work: ``(n, d, d)``, float64, C-contiguous, symmetric.

        Returns:
            ``(n,)``: zero where the root exists. Not read here.
        """
        count, side, _ = work.shape
        info = self._xp.zeros(count, np.int32)
        if side <= STACKED_SIZE and count > 1:
            first, step = work.data.ptr, work.strides[0]
            places = self._xp.arange(first, first + count * step, step, dtype=np.uintp)
            self._calls.dpotrfBatched(
                self._handle(), _UPPER, side, places.data.ptr, side, info.data.ptr, count
            )
            return info
        for matrix, code in zip(work, self._each(info), strict=True):
            at = self._handle(), _UPPER, side, matrix.data.ptr, side
            size = self._calls.dpotrf_bufferSize(*at)
            space = self._xp.empty(size, np.float64)
            self._calls.dpotrf(*at, space.data.ptr, size, code.data.ptr)
        return info

    def inverse(self, roots: _Array) -> _Array:
        """Inverses ``(L Lᵀ)⁻¹`` of a stack; the roots are lost.

        Args:
            roots: What ``cholesky`` left.

        Returns:
            ``(n, d, d)``, of which the lower triangles count; anything for a root that does not
            exist.
        """
        xp = self._xp
        if self.has_potri and (roots.shape[1] > STACKED_SIZE or len(roots) == 1):
            info = xp.zeros(len(roots), np.int32)
            for matrix, code in zip(roots, self._each(info), strict=True):
                self._potri(matrix, code)
            return roots
        upside = self.solve_lower(roots)
        product: _Array = xp.ascontiguousarray(upside.swapaxes(1, 2) @ upside)
        return product

    def solve_lower(self, lowers: _Array) -> _Array:
        """``L⁻¹`` of each matrix of a stack ``(n, d, d)``; zero above the diagonal."""
        xp = self._xp
        solve = import_module("cupyx.scipy.linalg").solve_triangular
        eye = xp.broadcast_to(xp.eye(lowers.shape[1], dtype=lowers.dtype), lowers.shape)
        solved: _Array = xp.tril(solve(xp.tril(lowers), xp.ascontiguousarray(eye), lower=True))
        return solved

    def fork(self, streams: int) -> list[Any]:
        """Streams that begin after what the current one was given; itself alone for zero."""
        current = self._xp.cuda.get_current_stream()
        if not streams:
            return [current]
        begun = current.record()
        for stream in self._streams[:streams]:
            stream.wait_event(begun)
        return self._streams[:streams]

    def join(self, streams: Sequence[Any]) -> None:
        """Let the current stream wait for what these were given."""
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
        """The lower triangle of the inverse, in place of a root."""
        handle = self._handle()
        self._calls.setStream(handle, self._xp.cuda.get_current_stream().ptr)
        side, size = len(root), ctypes.c_int()
        at = ctypes.c_void_p(handle), _UPPER, side, ctypes.c_void_p(root.data.ptr), side
        status = self._library.cusolverDnDpotri_bufferSize(*at, ctypes.byref(size))
        space = self._xp.empty(max(1, size.value), np.float64)
        places = ctypes.c_void_p(space.data.ptr), size.value, ctypes.c_void_p(code.data.ptr)
        status = status or self._library.cusolverDnDpotri(*at, *places)
        if status:
            raise BackendError(f"cuSOLVER's inverse of a {side} × {side} matrix gave {status}.")

    def _proven(self) -> bool:
        """Whether ``potri`` inverts a small matrix."""
        work = self._xp.asarray([_TRIAL], dtype=np.float64)
        self.cholesky(work)
        try:
            self._potri(work[0], self._xp.zeros(1, np.int32))
        except (BackendError, AttributeError):  # the library refuses, or has no such function
            return False
        found = self._xp.asnumpy(self._xp.tril(work[0]))
        return bool(np.allclose(found, np.tril(_TRIAL_INVERSE), rtol=0, atol=1e-12))


def loaded_library() -> Any:
    """The cuSOLVER that CuPy has loaded, whichever version; None where it goes by another name."""
    # Never a second version: its functions would be given a handle of the first.
    only_loaded: int | None = getattr(os, "RTLD_NOLOAD", None)
    for name in _LIBRARIES if only_loaded is not None else ():
        try:
            return ctypes.CDLL(name, mode=only_loaded or 0)
        except OSError:
            continue
    return None
