"""Exchanges arrays between the GPUs of ranks by NCCL, through CuPy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cuda.device import load_nccl
from kfac_engine.backend.namespace import array_module
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Communicator
from kfac_engine.errors import InputError, RankError

# Operations of one group. NCCL refuses more than 2048.
_LARGEST_GROUP = 1024
# Bytes of the identifier that connects the ranks.
_IDENTIFIER = 128


class OverNCCL:
    """The ranks of another communicator, each with a GPU of its own.

    Arrays of CuPy are sent from GPU to GPU, in the order of CuPy's current stream. The host does
    not wait for them. Arrays of NumPy are sent by the other communicator, ``host``.
    """

    def __init__(self, host: Communicator) -> None:
        self._host = host
        self.rank, self.size = host.rank, host.size
        self.local_size: int = getattr(host, "local_size", 1)
        agreement = Agreement(host)
        # NCCL would wait for a rank that has failed.
        with agreement.operation("load NCCL", ends=True):
            self._nccl: Any = load_nccl()
        with agreement.operation("connect", ends=True):
            self._comm: Any = self._connect()
        self._types = {
            np.dtype(np.float32): self._nccl.NCCL_FLOAT32,
            np.dtype(np.float64): self._nccl.NCCL_FLOAT64,
        }

    def allreduce(self, buffer: Array) -> None:
        """Replace a buffer by its sum over all ranks."""
        if _is_on_host(buffer):
            self._host.allreduce(buffer)
            return
        place = _address(buffer)
        with self._checked():
            self._comm.allReduce(place, place, buffer.size, *self._sum(buffer), _stream(buffer))

    def reduce_scatter(self, buffer: Array, counts: list[int]) -> Array:
        """Return this rank's part of the sum of a buffer over all ranks, a view of the buffer."""
        if _is_on_host(buffer):
            return self._host.reduce_scatter(buffer, counts)
        parts, stream = _parts(buffer, counts), _stream(buffer)
        received, (kind, operation) = parts[self.rank], self._sum(buffer)

        def reduce(owner: int, part: Array) -> None:
            place = _address(part)
            self._comm.reduce(place, place, part.size, kind, operation, owner, stream)

        with self._checked():
            if len(set(counts)) == 1:
                places = _address(buffer), _address(received)
                self._comm.reduceScatter(*places, received.size, kind, operation, stream)
            else:
                self._in_groups(reduce, parts)
        return received

    def allgather(self, buffer: Array, counts: list[int]) -> None:
        """Fill a buffer, in which a rank has written its own part, with the parts of all ranks."""
        if _is_on_host(buffer):
            self._host.allgather(buffer, counts)
            return
        parts, kind, stream = _parts(buffer, counts), self._types[buffer.dtype], _stream(buffer)
        sent = parts[self.rank]

        def broadcast(owner: int, part: Array) -> None:
            place = _address(part)
            self._comm.broadcast(place, place, part.size, kind, owner, stream)

        with self._checked():
            if len(set(counts)) == 1:
                self._comm.allGather(_address(sent), _address(buffer), sent.size, kind, stream)
            else:
                self._in_groups(broadcast, parts)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Replace a buffer with the buffer of the rank ``root``."""
        if _is_on_host(buffer):
            self._host.broadcast(buffer, root)
            return
        place, kind = _address(buffer), self._types[buffer.dtype]
        with self._checked():
            self._comm.broadcast(place, place, buffer.size, kind, root, _stream(buffer))

    # -- private ----------------------------------------------------------------------------------

    def _connect(self) -> Any:
        """Return NCCL's communicator of the ranks."""
        numbers = np.zeros(_IDENTIFIER, np.float32)  # a byte in each number
        with self._errors():
            if self.rank == 0:
                numbers[:] = np.frombuffer(self._nccl.get_unique_id(), np.uint8)
        self._host.broadcast(numbers, 0)
        identifier = numbers.astype(np.uint8).tobytes()
        with self._errors():
            return self._nccl.NcclCommunicator(self.size, identifier, self.rank)

    def _sum(self, buffer: Array) -> tuple[int, int]:
        """Return the codes of an element type and of a sum."""
        return self._types[buffer.dtype], self._nccl.NCCL_SUM

    def _in_groups(self, operation: Callable[[int, Array], None], parts: Sequence[Array]) -> None:
        """Start an operation for each part with entries, many of them at once.

        ``operation`` takes the rank that owns a part, and the part. ``parts`` has the parts of all
        ranks.
        """
        owned = [(owner, part) for owner, part in enumerate(parts) if part.size]
        for start in range(0, len(owned), _LARGEST_GROUP):
            self._nccl.groupStart()
            try:
                for owner, part in owned[start : start + _LARGEST_GROUP]:
                    operation(owner, part)
            finally:
                self._nccl.groupEnd()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Check for errors of earlier operations, on the device or of other ranks, and of these."""
        try:
            with self._errors():
                self._comm.check_async_error()
                yield
                self._comm.check_async_error()
        except RankError:
            self._comm.abort()  # operations on the device that wait for other ranks
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of NCCL."""
        try:
            yield
        except self._nccl.NcclError as error:
            raise RankError(
                f"NCCL failed on rank {self.rank} ({error}); start the program again. Each rank "
                f"needs a GPU of its own, and NCCL_DEBUG=WARN prints the reason."
            ) from error


def over_nccl(communicator: Communicator) -> Communicator:
    """Return ranks that exchange arrays of their GPUs by NCCL.

    Arrays of CuPy are sent from GPU to GPU. Arrays of NumPy, and the identifier that connects the
    GPUs, are sent by the given communicator. Select a GPU of its own for each rank first: with the
    environment variable ``CUDA_VISIBLE_DEVICES``, or with ``cupy.cuda.Device(index).use()``.

    Args:
        communicator: The same ranks, such as ``over_mpi()``.

    Returns:
        A communicator; the given one if it has one rank.

    Raises:
        InputError: The object is not a communicator.
        BackendError: A rank has no GPU, or no NCCL library.
        RankError: NCCL cannot connect the GPUs.
    """
    if not isinstance(communicator, Communicator):
        raise InputError(
            f"over_nccl takes a communicator, such as over_mpi(), got {communicator!r:.80}."
        )
    return communicator if communicator.size == 1 else OverNCCL(communicator)


def _is_on_host(buffer: Array) -> bool:
    return array_module(buffer) is np


def _address(buffer: Array) -> int:
    address: int = buffer.data.ptr  # type: ignore[attr-defined] # CuPy's
    return address


def _stream(buffer: Array) -> int:
    """Return the address of the current stream."""
    stream: int = array_module(buffer).cuda.get_current_stream().ptr
    return stream


def _parts(buffer: Array, counts: Sequence[int]) -> list[Array]:
    """Return the parts of a buffer, by the rank that owns them."""
    ends = accumulate(counts)
    return [buffer[end - count : end] for count, end in zip(counts, ends, strict=True)]
