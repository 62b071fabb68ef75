"""Ranks as threads of one process; a collective that not all ranks enter is an error."""

from threading import Barrier, BrokenBarrierError, Thread

import numpy as np

SECONDS = 60.0


class DesynchronizedError(AssertionError):
    """Ranks are in different collectives."""


class ThreadRank:
    """A communicator between threads; ``log`` counts its calls: names and bytes."""

    def __init__(self, shared, rank):
        self._shared, self.rank, self.size = shared, rank, shared.size
        self.log = []

    def allreduce(self, buffer):
        buffers = self._meet("allreduce", buffer, (buffer.size,))
        total = _sum(buffers)
        self._leave()
        buffer[...] = total
        self._leave()

    def reduce_scatter(self, buffer, counts):
        buffers = self._meet("reduce_scatter", buffer, tuple(counts))
        assert buffer.size == sum(counts)
        start = sum(counts[: self.rank])
        part = _sum([b[start : start + counts[self.rank]] for b in buffers])
        self._leave()
        return part

    def allgather(self, buffer, counts):
        buffers = self._meet("allgather", buffer, tuple(counts))
        assert buffer.size == sum(counts)
        edges = np.cumsum([0, *counts])
        whole = np.concatenate([b[edges[r] : edges[r + 1]] for r, b in enumerate(buffers)])
        self._leave()
        buffer[...] = whole
        self._leave()

    def broadcast(self, buffer, root):
        buffers = self._meet("broadcast", buffer, (buffer.size, root))
        received = buffers[root].copy()
        self._leave()
        buffer[...] = received
        self._leave()

    def _meet(self, call, buffer, sizes):
        assert buffer.ndim == 1
        assert buffer.flags.c_contiguous
        self.log.append((call, buffer.nbytes))
        self._shared.slots[self.rank] = ((call, sizes, str(buffer.dtype)), buffer)
        self._leave()
        calls, buffers = zip(*self._shared.slots, strict=True)
        if len(set(calls)) > 1:
            raise DesynchronizedError(f"ranks are in different collectives: {calls}")
        return buffers

    def _leave(self):
        self._shared.barrier.wait(SECONDS)


class Ranks:
    def __init__(self, size):
        self.size, self.barrier, self.slots = size, Barrier(size), [None] * size


def _sum(buffers):
    """Add in the order of ranks, so that all ranks receive the same bits."""
    total = buffers[0].copy()
    for buffer in buffers[1:]:
        total += buffer
    return total


def run(size, work):
    """Call ``work(communicator)`` on each rank; return the results, or raise the first error."""
    shared = Ranks(size)
    results, errors = [None] * size, [None] * size

    def go(rank):
        try:
            results[rank] = work(ThreadRank(shared, rank))
        except BaseException as error:
            errors[rank] = error
            shared.barrier.abort()

    threads = [Thread(target=go, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * SECONDS)
    raised = [error for error in errors if error is not None]
    first = [error for error in raised if not isinstance(error, BrokenBarrierError)]
    if raised:
        raise (first or raised)[0]
    return results


def rows_of(communicator, cuts):
    """The rows of a batch that a rank has; ``cuts`` are those of each number of ranks."""
    return slice(*cuts[communicator.size][communicator.rank :][:2])
