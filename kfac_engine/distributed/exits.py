"""The end of a rank: it ends the whole job if other ranks would wait for this one forever."""

import atexit
import sys
from types import TracebackType
from typing import Any

import numpy as np

from kfac_engine.distributed.job import end_job

# What a rank tells its neighbour.
_ENTERS, _ENDS = 0, 1
_FAILURE = 1  # exit status


class ExitWatch:
    """Messages by which a rank that ends learns whether others wait for it.

    The ranks form a ring. Before each collective a rank sends a byte to the next rank, and receives
    one from the rank before it. Another byte tells that the rank ends. If some ranks have ended and
    others wait in a collective, one that has ended receives the byte of one that waits.

    Args:
        mpi: The module ``mpi4py.MPI``.
        comm: The communicator.
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
        """Tell that this rank ends.

        Returns:
            The request for the message of the rank before this one.
        """
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
    """Have a rank that ends while others wait for it end all ranks.

    Without it, ``sys.exit`` on one rank only leaves the job without an end: the rank waits for the
    others in ``MPI_Finalize``, and they wait for the rank in a collective.

    Args:
        mpi: The module ``mpi4py.MPI``.
        watch: The watch of a communicator.
    """
    _watches.append(watch)
    if len(_watches) == 1:
        atexit.register(_end_together, mpi)


def end_job_on_errors() -> None:
    """Have an exception that nothing catches end all ranks, after its traceback is printed."""
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
