"""Messages of many arrays, of which each has an owner among the ranks."""

import json
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.distributed.packing import Form, pack, unpack
from kfac_engine.distributed.protocol import Communicator


class OwnedArrays:
    """Arrays that have owners, in one message whatever their number.

    Args:
        communicator: The ranks.
        backend: The library of the arrays.
        forms: Forms of the arrays, the same on all ranks.
        owners: The rank that owns each array, ascending.
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
        self._dtype = np.result_type(*(form.dtype for form in forms))

    def sum(self, arrays: Sequence[Array]) -> list[Array | None]:
        """Return the sums over all ranks of the arrays that this rank owns.

        Args:
            arrays: The arrays of this rank; they do not change.

        Returns:
            For each array its sum, in a new array, or None if another rank owns it.
        """
        counts = self._counts()
        buffer = self._backend.xp.empty(sum(counts), self._dtype)
        start = 0
        for array, form in zip(arrays, self._forms, strict=True):
            pack(array.astype(self._dtype, copy=False), form, buffer[start : start + form.size])
            start += form.size
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
        """Send the arrays that this rank owns to all ranks, and receive the others.

        All ranks return the same bits in the same memory order.

        Args:
            arrays: The arrays that this rank owns, in order.
            views: Whether the results may share the memory of the message.

        Returns:
            All arrays, new.
        """
        counts = self._counts()
        buffer = self._backend.xp.empty(sum(counts), self._dtype)
        start = sum(counts[: self._communicator.rank])
        forms = (
            form
            for form, owner in zip(self._forms, self._owners, strict=True)
            if owner == self._communicator.rank
        )
        for array, form in zip(arrays, forms, strict=True):
            pack(array.astype(self._dtype, copy=False), form, buffer[start : start + form.size])
            start += form.size
        self._communicator.allgather(buffer, counts)
        received: list[Array] = []
        start = 0
        for form in self._forms:
            received.append(unpack(buffer[start : start + form.size], form, copy=not views))
            start += form.size
            if form.triangle == "symmetric":
                self._backend.mirror(received[-1])
        return received

    def _counts(self) -> list[int]:
        """Return the number of entries of each rank's part."""
        counts = [0] * self._communicator.size
        for form, owner in zip(self._forms, self._owners, strict=True):
            counts[owner] += form.size
        return counts


def broadcast_arrays(
    communicator: Communicator, root: int, arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the arrays of one rank on all ranks.

    Args:
        communicator: The ranks.
        root: The rank that sends its arrays.
        arrays: Name to host array; those of other ranks are not read.

    Returns:
        Name to array, with the element types of the sender.
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
