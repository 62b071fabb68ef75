"""Communicates by mpi4py between ranks that MPI started.

If a rank ends while others would wait for it forever, it ends the whole job.
"""

import atexit
import signal
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.distributed.job import end_job
from kfac_engine.distributed.protocol import Alone, Communicator
from kfac_engine.errors import BackendError
from kfac_engine.system.signals import Handling

# What a rank tells its neighbour.
_ENTERS, _ENDS = 0, 1
_FAILURE = 1  # exit status


class ExitWatch:
    """Messages by which a rank that ends learns whether others wait for it.

    The ranks form a ring. Before each collective a rank sends a byte to the next rank, and receives
    one from the rank before it. Another byte tells that the rank ends. If some ranks have ended and
    others wait in a collective, a rank that has ended receives the byte of a rank that waits.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm.Dup()
        self._before = (comm.rank - 1) % comm.size
        self._sent, self._received = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        self._messages = [
            self._comm.Send_init(self._sent, (comm.rank + 1) % comm.size),
            self._comm.Recv_init(self._received, self._before),
        ]

    def enter(self) -> None:
        """Tell that this rank is about to enter a collective."""
        self._tell(_ENTERS)

    def end(self) -> Any:
        """Tell the next rank that this one ends; return the request that receives."""
        self._tell(_ENDS)
        return self._messages[1]

    def end_job_if_awaited(self) -> None:
        """End all ranks if the rank before this one has not ended, but entered a collective."""
        if self._received[0] == _ENDS:
            return
        print(
            f"error: rank {self._comm.rank} of {self._comm.size} has ended, but rank "
            f"{self._before} waits for it; all ranks are ended.",
            file=sys.stderr,
        )
        end_job(_FAILURE)

    def _tell(self, what: int) -> None:
        # Those before the last collective: the neighbours have entered it as well.
        self._mpi.Request.Waitall(self._messages)
        self._sent[0] = what
        self._mpi.Prequest.Startall(self._messages)


# The watches of this process, in the order in which all ranks create them.
_watches: list[ExitWatch] = []


def end_job_if_a_rank_ends_alone(mpi: Any, watch: ExitWatch) -> None:
    """Register a function that ends all ranks if this rank ends while others wait for it.

    Without it, ``sys.exit`` on one rank only leaves the job without an end: the rank waits in
    ``MPI_Finalize`` for ranks that wait for this rank in a collective. ``mpi`` is the module
    ``mpi4py.MPI``.
    """
    _watches.append(watch)
    if len(_watches) == 1:
        atexit.register(_end_together, mpi)


def end_job_on_errors() -> None:
    """End all ranks after an exception that nothing catches; its traceback is printed first."""
    before = sys.excepthook
    if getattr(before, "ends_all_ranks", False):
        return

    def end(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        end_job(_FAILURE)

    end.ends_all_ranks = True  # type: ignore[attr-defined] # a mark of the function
    sys.excepthook = end


def _end_together(mpi: Any) -> None:
    """Wait until the other ranks end; end the job if one of them waits for this rank instead."""
    # ``python -m mpi4py`` has a rule of its own: it ends all ranks after this function.
    if mpi.Is_finalized() or "mpi4py.run" in sys.modules:
        return
    ends = [watch.end() for watch in _watches]
    for _ in _watches:
        _watches[mpi.Request.Waitany(ends)].end_job_if_awaited()


if TYPE_CHECKING:
    from mpi4py import MPI

# Entries of a message: MPI libraries before version 4 of the standard count in 32 bits.
_LARGEST_MESSAGE = 2**30


# -- the communicator ------------------------------------------------------------------------------


class OverMPI:
    """The ranks of an MPI communicator, which is duplicated: its messages do not meet the caller's.

    With ``device_buffers``, MPI reads arrays of a GPU; otherwise they are copied to the host.
    """

    def __init__(self, comm: "MPI.Intracomm", *, device_buffers: bool = False) -> None:
        mpi = _load()
        self._comm = comm.Dup()
        self._in_place: Any = mpi.IN_PLACE
        self._device_buffers = device_buffers
        self.watch = ExitWatch(mpi, self._comm)
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        node = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_size: int = node.size
        node.Free()

    def allreduce(self, buffer: Array) -> None:
        """Replace a buffer by its sum over all ranks."""
        whole = self._enter(buffer)
        for start in range(0, len(whole), _LARGEST_MESSAGE):
            self._comm.Allreduce(self._in_place, whole[start : start + _LARGEST_MESSAGE])
        _copy_back(whole, buffer)

    def reduce_scatter(self, buffer: Array, counts: list[int]) -> Array:
        """Return this rank's part of the sum of a buffer over all ranks."""
        whole = self._enter(buffer)
        part = array_module(whole).empty(counts[self.rank], whole.dtype)
        if len(whole) <= _LARGEST_MESSAGE:
            self._comm.Reduce_scatter(whole, part, counts)
        else:
            for owner, piece, place in _pieces(whole, counts):
                receives = part[place] if owner == self.rank else None
                self._comm.Reduce(piece, receives, root=owner)
        received: Array = array_module(buffer).asarray(part)
        return received

    def allgather(self, buffer: Array, counts: list[int]) -> None:
        """Fill a buffer, in which a rank has written its own part, with the parts of all ranks."""
        whole = self._enter(buffer)
        if len(whole) <= _LARGEST_MESSAGE:
            self._comm.Allgatherv(self._in_place, [whole, counts])
        else:
            for owner, piece, _ in _pieces(whole, counts):
                self._comm.Bcast(piece, root=owner)
        _copy_back(whole, buffer)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Replace a buffer with the buffer of the rank ``root``."""
        whole = self._enter(buffer)
        for start in range(0, len(whole), _LARGEST_MESSAGE):
            self._comm.Bcast(whole[start : start + _LARGEST_MESSAGE], root=root)
        _copy_back(whole, buffer)

    def _enter(self, buffer: Array) -> Array:
        """Begin a collective; return a buffer that MPI can read: itself, or a copy on the host."""
        self.watch.enter()
        xp = array_module(buffer)
        if xp is np:
            return buffer
        if self._device_buffers:
            xp.cuda.get_current_stream().synchronize()
            return buffer
        on_host: Array = xp.asnumpy(buffer)
        return on_host


def over_mpi(comm: "MPI.Intracomm | None" = None, *, device_buffers: bool = False) -> Communicator:
    """Return the ranks of a program that ``mpirun`` has started.

    If a rank does not catch an exception, all ranks end with the exit status 1; otherwise, the
    other ranks would wait forever. All ranks also end if one rank ends, by ``sys.exit`` or after
    its last line, while other ranks wait for it in a collective call of the communicator.

    Args:
        comm: A communicator of mpi4py; ``MPI.COMM_WORLD`` by default.
        device_buffers: Whether the MPI library reads arrays of a GPU ("CUDA-aware"). If False, they
            are copied to the host.

    Returns:
        A communicator; one rank if ``mpirun`` has not started the program.

    Raises:
        BackendError: mpi4py, or an MPI library, is not installed.
    """
    mpi = _load()
    members = mpi.COMM_WORLD if comm is None else comm
    if members.size == 1:
        return Alone()
    with _ended_by_signals():
        ranks = OverMPI(members, device_buffers=device_buffers)
    end_job_on_errors()
    end_job_if_a_rank_ends_alone(mpi, ranks.watch)
    return ranks


def _ended_by_signals() -> Handling:
    """Return a context in which a signal ends the process.

    Python calls no handler while MPI waits for the other processes.
    """
    return Handling(handler=int(signal.SIG_DFL))


def _load() -> Any:
    try:
        with _ended_by_signals():
            from mpi4py import MPI
    except ImportError as error:
        if error.name == "mpi4py":
            raise BackendError(
                "several processes need mpi4py and an MPI library: pip install 'kfac-engine[mpi]', "
                "and the MPI of the cluster or pip install mpich."
            ) from None
        raise BackendError(_without_library(error)) from None
    except RuntimeError as error:
        raise BackendError(_without_library(error)) from None
    return MPI


def _without_library(error: Exception) -> str:
    return (
        f"mpi4py finds no MPI library ({error}); load the MPI of the cluster, or pip install mpich."
    )


def _pieces(whole: Array, counts: list[int]) -> list[tuple[int, Array, slice]]:
    """Return the pieces of all parts: rank of the part, piece, and place in the part."""
    pieces, start = [], 0
    for owner, count in enumerate(counts):
        for low in range(0, count, _LARGEST_MESSAGE):
            place = slice(low, min(low + _LARGEST_MESSAGE, count))
            pieces.append((owner, whole[start + place.start : start + place.stop], place))
        start += count
    return pieces


def _copy_back(whole: Array, buffer: Array) -> None:
    """Copy a result into the buffer, unless it is the buffer."""
    if whole is not buffer:
        buffer[...] = array_module(buffer).asarray(whole)
