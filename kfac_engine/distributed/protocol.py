"""Defines the collectives that all communication between processes uses."""

from typing import Protocol, runtime_checkable

from kfac_engine._types import Array


@runtime_checkable
class Communicator(Protocol):
    """The processes of a program, called ranks.

    Any object with these members is a communicator, such as an adapter of ``torch.distributed``.
    All ranks make the same calls in the same order. Buffers are flat, contiguous arrays of NumPy or
    of the engine's array library, of the element types float32 and float64. A reduction is a sum,
    and all ranks receive the same bits of it.

    An optional attribute ``local_size`` is the number of ranks on the node of this rank; threads
    are divided by it.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def allreduce(self, buffer: Array, /) -> None:
        """Replace a buffer by its sum over all ranks."""

    def reduce_scatter(self, buffer: Array, counts: list[int], /) -> Array:
        """Return this rank's part of the sum of a buffer over all ranks.

        Args:
            buffer: The parts of all ranks, one after the other; its contents are lost.
            counts: Number of entries of each part, by rank.

        Returns:
            A part, ``(counts[rank],)``.
        """

    def allgather(self, buffer: Array, counts: list[int], /) -> None:
        """Fill a buffer, in which a rank has written its own part, with the parts of all ranks.

        Args:
            buffer: The parts of all ranks, one after the other.
            counts: Number of entries of each part, by rank.
        """

    def broadcast(self, buffer: Array, root: int, /) -> None:
        """Replace a buffer with the buffer of the rank ``root``."""


class Alone:
    """The communicator of a single process."""

    rank = 0
    size = 1
    local_size = 1

    def allreduce(self, buffer: Array) -> None:
        """Do nothing: the sum over one rank is the buffer."""

    def reduce_scatter(self, buffer: Array, counts: list[int]) -> Array:
        """Return the buffer."""
        return buffer

    def allgather(self, buffer: Array, counts: list[int]) -> None:
        """Do nothing: the buffer has one part."""

    def broadcast(self, buffer: Array, root: int) -> None:
        """Do nothing: there is one rank."""
