"""Packs many arrays into one flat buffer for a message.

Of symmetric and triangular matrices, a buffer has the lower triangle only. Arrays are summed over
all ranks, one message for each element type, or each array has an owner among the ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from scipy.linalg.lapack import dtpttr, dtrttp, stpttr, strttp

from kfac_engine._types import Array, DType
from kfac_engine.backend.namespace import array_module
from kfac_engine.backend.protocol import Backend
from kfac_engine.distributed.protocol import Communicator

# LAPACK packs a triangle about as fast as memory is copied; NumPy's indices take 20 times as long.
_PACK = {np.dtype(np.float32): strttp, np.dtype(np.float64): dtrttp}
_UNPACK = {np.dtype(np.float32): stpttr, np.dtype(np.float64): dtpttr}


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and type of an array, and the part of it that a buffer contains."""

    shape: tuple[int, ...]  # shape; ``(…, d, d)`` for triangles
    dtype: DType  # element type
    # ``"lower"`` if only the lower triangles are packed, ``"symmetric"`` if the upper ones then
    # follow by symmetry; None if all entries are packed.
    triangle: Literal["symmetric", "lower"] | None = None

    @property
    def size(self) -> int:
        """Number of packed entries."""
        if self.triangle is None:
            return prod(self.shape)
        d = self.shape[-1]
        return prod(self.shape[:-2]) * (d * (d + 1) // 2)


def pack(array: Array, form: Form, buffer: Array) -> None:
    """Write an array to a flat buffer ``(form.size,)``."""
    if form.triangle is None:
        buffer.reshape(form.shape)[...] = array
        return
    matrices = array.reshape(-1, *array.shape[-2:])
    for matrix, part in zip(matrices, buffer.reshape(len(matrices), -1), strict=True):
        pack_triangle = _PACK.get(matrix.dtype) if array_module(matrix) is np else None
        if pack_triangle is None:
            part[...] = matrix[_lower_indices(matrix)]
        else:  # the upper triangle of the transpose, which has LAPACK's order in memory
            part[...] = pack_triangle(np.ascontiguousarray(matrix).T, uplo="U")[0]


def unpack(buffer: Array, form: Form, *, copy: bool = True) -> Array:
    """Return the array that ``pack`` has written.

    It is a new array. Without ``copy``, an array without triangles in the type of the buffer is a
    view. The entries above the diagonals of triangles are zero. Symmetric arrays of CuPy have both
    triangles, as second moments of that library do.
    """
    if form.triangle is None:
        return buffer.reshape(form.shape).astype(form.dtype, copy=copy)
    xp = array_module(buffer)
    array: Array = xp.zeros(form.shape, form.dtype)
    matrices = array.reshape(-1, *form.shape[-2:])
    for matrix, part in zip(matrices, buffer.reshape(len(matrices), -1), strict=True):
        unpack_triangle = _UNPACK.get(part.dtype) if xp is np else None
        if unpack_triangle is not None:
            matrix[...] = unpack_triangle(len(matrix), part, uplo="U")[0].T
            continue
        rows, columns = _lower_indices(matrix)
        matrix[rows, columns] = part
        if form.triangle == "symmetric" and xp is not np:
            matrix[columns, rows] = part
    return array


def _lower_indices(matrix: Array) -> tuple[Array, Array]:
    # Both libraries walk a triangle row by row, which is LAPACK's order for the transpose.
    indices: tuple[Array, Array] = array_module(matrix).tril_indices(len(matrix))
    return indices


# -- sums over all ranks ---------------------------------------------------------------------------


def sum_arrays(communicator: Communicator, arrays: Sequence[Array]) -> None:
    """Replace arrays by their sums over all ranks, in place.

    The arrays belong to one library. Each rank passes arrays of the same shapes and element types.
    """
    if communicator.size > 1:
        for array, total in zip(arrays, summed(communicator, arrays), strict=True):
            array[...] = total


def summed(communicator: Communicator, arrays: Sequence[Array]) -> list[Array]:
    """Return the sums over all ranks in new memory; ``arrays`` are as for ``sum_arrays``."""
    sums: dict[int, Array] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        together = {i: array for i, array in enumerate(arrays) if array.dtype == dtype}
        xp = array_module(next(iter(together.values())))
        buffer = xp.empty(sum(array.size for array in together.values()), dtype)
        start = 0
        for index, array in together.items():
            sums[index] = buffer[start : start + array.size].reshape(array.shape)
            sums[index][...] = array
            start += array.size
        communicator.allreduce(buffer)
    return [sums[index] for index in range(len(arrays))]


# -- arrays with an owner --------------------------------------------------------------------------


class OwnedArrays:
    """Arrays that have owners, in one message whatever their number.

    The forms of the arrays are the same on all ranks. ``owners`` has the rank that owns each array,
    ascending.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        forms: Sequence[Form],
        owners: Sequence[int],
    ) -> None:
        self._communicator, self._backend = communicator, backend
        self._forms, self._owners = tuple(forms), tuple(owners)
        # Without arrays, such as of a model without factors, nothing is sent.
        self._dtype = np.result_type(*(form.dtype for form in forms)) if forms else np.dtype("f4")

    def sum(self, arrays: Sequence[Array]) -> list[Array | None]:
        """Return the sums over all ranks of the arrays that this rank owns, and None for others.

        The sums are new arrays.
        """
        if not self._forms:
            return []
        counts = self._counts()
        buffer = self._packed(arrays, self._forms, sum(counts))
        received = self._communicator.reduce_scatter(buffer, counts)
        sums: list[Array | None] = []
        start = 0
        for form, owner in zip(self._forms, self._owners, strict=True):
            if owner != self._communicator.rank:
                sums.append(None)
                continue
            sums.append(unpack(received[start : start + form.size], form))
            start += form.size
        return sums

    def gather(self, arrays: Sequence[Array], *, views: bool = False) -> list[Array]:
        """Send the arrays that this rank owns to all ranks, and return all arrays.

        ``arrays`` are those that this rank owns, in order. All ranks return the same bits in the
        same memory order. With ``views``, the results may share the memory of the message.
        """
        if not self._forms:
            return []
        counts, rank = self._counts(), self._communicator.rank
        pairs = zip(self._forms, self._owners, strict=True)
        forms = [form for form, owner in pairs if owner == rank]
        buffer = self._packed(arrays, forms, sum(counts), start=sum(counts[:rank]))
        self._communicator.allgather(buffer, counts)
        received: list[Array] = []
        start = 0
        for form in self._forms:
            received.append(unpack(buffer[start : start + form.size], form, copy=not views))
            start += form.size
            if form.triangle == "symmetric":
                self._backend.mirror(received[-1])
        return received

    def _packed(
        self, arrays: Sequence[Array], forms: Sequence[Form], size: int, start: int = 0
    ) -> Array:
        """Return a buffer of ``size`` entries that has arrays from ``start`` on."""
        buffer: Array = self._backend.xp.empty(size, self._dtype)
        for array, form in zip(arrays, forms, strict=True):
            pack(array.astype(self._dtype, copy=False), form, buffer[start : start + form.size])
            start += form.size
        return buffer

    def _counts(self) -> list[int]:
        """Return the number of entries of each rank's part."""
        counts = [0] * self._communicator.size
        for form, owner in zip(self._forms, self._owners, strict=True):
            counts[owner] += form.size
        return counts


def broadcast_arrays(
    communicator: Communicator, root: int, arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the host arrays of the rank ``root`` on all ranks, with their element types.

    The arrays of other ranks are not read.
    """
    header = json.dumps([[n, a.shape, a.dtype.str] for n, a in arrays.items()]).encode()
    size = np.array([len(header)], np.float64)
    communicator.broadcast(size, root)
    text = np.zeros(int(size[0]), np.float32)  # a byte in each number
    if communicator.rank == root:
        text[:] = np.frombuffer(header, np.uint8)
    communicator.broadcast(text, root)
    received: dict[str, Array] = {}
    for name, shape, dtype in json.loads(text.astype(np.uint8).tobytes()):
        buffer = np.zeros(prod(shape), np.float64 if np.dtype(dtype).kind != "f" else dtype)
        if communicator.rank == root:
            buffer[:] = arrays[name].reshape(-1)
        communicator.broadcast(buffer, root)
        received[name] = buffer.reshape(shape).astype(dtype)
    return received
