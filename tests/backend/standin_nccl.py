"""NCCL for the stand-in: CuPy's bindings of it, on addresses, between threads of one process.

A rank that makes another call than the others is an error, and so is an argument that NCCL would
refuse or misread. Calls have the parameters that CuPy documents. ``CALLS`` lists the operations of
each group by rank; an operation outside of groups is a group of one.
"""

from collections.abc import Callable
from threading import Barrier, Lock, local
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tests.backend import standin_streams

SECONDS = 60.0
IDENTIFIER = 128
LARGEST_GROUP = 2048
SUM = 0
FLOATS = {7: np.float32, 8: np.float64}
INVALID_USAGE = 5

CALLS: list[tuple[int, list[str]]] = []
# Ranks whose next communicator NCCL refuses, as it does for two ranks on one device.
REFUSED: set[int] = set()
_CLIQUES: dict[bytes, "_Clique | None"] = {}
_LOCK = Lock()
_THREAD = local()


class NcclError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR_INVALID_USAGE: status {status}")
        self.status = status


class Operation(NamedTuple):
    """A call; ranks must agree in all but the addresses."""

    name: str
    sent: int
    received: int
    count: int
    datatype: int
    root: int


class _Clique:
    """The ranks that have one identifier."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, Barrier(size)
        self.slots: list[list[Operation]] = [[] for _ in range(size)]

    def meet(self) -> None:
        self.barrier.wait(SECONDS)


class NcclCommunicator:
    """One rank."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
        assert type(ndev) is type(rank) is int
        assert type(commId) is bytes
        assert commId in _CLIQUES, "not an identifier that get_unique_id has returned"
        with _LOCK:
            clique = _CLIQUES[commId] = _CLIQUES[commId] or _Clique(ndev)
        assert clique.size == ndev
        self.rank, self._clique = rank, clique
        self._clique.meet()
        self.failure, self.aborted = 0, False
        if rank in REFUSED:
            raise NcclError(INVALID_USAGE)

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        assert op == SUM
        self._start("allReduce", (sendbuf, recvbuf, count, datatype), stream)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        assert op == SUM
        self._start("reduce", (sendbuf, recvbuf, count, datatype), stream, root)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._start("broadcast", (sendbuff, recvbuff, count, datatype), stream, root)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        assert op == SUM
        self._start("reduceScatter", (sendbuf, recvbuf, recvcount, datatype), stream)

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        self._start("allGather", (sendbuf, recvbuf, count, datatype), stream)

    def check_async_error(self) -> None:
        if self.failure:
            raise NcclError(self.failure)

    def abort(self) -> None:
        self.aborted = True

    def _start(
        self, name: str, arguments: tuple[int, int, int, int], stream: int, root: int = 0
    ) -> None:
        sent, received, count, datatype = arguments
        assert all(type(argument) is int for argument in (*arguments, stream, root))
        assert stream == standin_streams.current().ptr
        assert sent
        assert received
        assert count > 0
        assert 0 <= root < self._clique.size
        assert not self.aborted
        operation = Operation(name, sent, received, count, datatype, root)
        if getattr(_THREAD, "depth", 0):
            _THREAD.pending.append((self, operation))
            assert len(_THREAD.pending) <= LARGEST_GROUP
        else:
            self._run([operation])

    def _run(self, operations: list[Operation]) -> None:
        clique = self._clique
        with _LOCK:
            CALLS.append((self.rank, [operation.name for operation in operations]))
        clique.slots[self.rank] = operations
        clique.meet()
        alike = [
            [operation._replace(sent=0, received=0) for operation in slot] for slot in clique.slots
        ]
        assert all(slot == alike[0] for slot in alike), f"ranks make different calls: {alike}"
        results = [
            _RESULTS[operation.name](self.rank, list(others))
            for operation, others in zip(operations, zip(*clique.slots, strict=True), strict=True)
        ]
        clique.meet()  # all have read
        for operation, result in zip(operations, results, strict=True):
            if result is not None:
                _memory(operation.received, operation, len(result))[...] = result
        clique.meet()


def _all_reduce(rank: int, operations: list[Operation]) -> np.ndarray:
    total = _memory(operations[0].sent, operations[0]).copy()
    for operation in operations[1:]:
        total += _memory(operation.sent, operation)
    return total


def _reduce(rank: int, operations: list[Operation]) -> np.ndarray | None:
    return _all_reduce(rank, operations) if rank == operations[0].root else None


def _broadcast(rank: int, operations: list[Operation]) -> np.ndarray:
    sender = operations[operations[0].root]
    return _memory(sender.sent, sender).copy()


def _reduce_scatter(rank: int, operations: list[Operation]) -> np.ndarray:
    count = operations[0].count
    whole = count * len(operations)
    total = _memory(operations[0].sent, operations[0], whole).copy()
    for operation in operations[1:]:
        total += _memory(operation.sent, operation, whole)
    return total[rank * count : (rank + 1) * count]


def _all_gather(rank: int, operations: list[Operation]) -> np.ndarray:
    return np.concatenate([_memory(operation.sent, operation) for operation in operations])


_RESULTS: dict[str, Callable[[int, list[Operation]], np.ndarray | None]] = {
    "allReduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduceScatter": _reduce_scatter,
    "allGather": _all_gather,
}


def _memory(address: int, operation: Operation, count: int | None = None) -> np.ndarray:
    kind = np.ctypeslib.as_ctypes_type(np.dtype(FLOATS[operation.datatype]))
    length = operation.count if count is None else count
    array: np.ndarray = np.ctypeslib.as_array((kind * length).from_address(address))
    return array


def get_unique_id() -> bytes:
    with _LOCK:
        identifier = bytes((37 * len(_CLIQUES) + 11 * i) % 256 for i in range(IDENTIFIER))
        _CLIQUES[identifier] = None
    return identifier


def groupStart() -> None:  # noqa: N802
    if not getattr(_THREAD, "depth", 0):
        _THREAD.depth, _THREAD.pending = 0, []
    _THREAD.depth += 1


def groupEnd() -> None:  # noqa: N802
    _THREAD.depth -= 1
    if _THREAD.depth or not _THREAD.pending:
        return
    (communicator,) = {communicator for communicator, _ in _THREAD.pending}
    communicator._run([operation for _, operation in _THREAD.pending])


def module() -> ModuleType:
    """``cupy.cuda.nccl``."""
    CALLS.clear()
    REFUSED.clear()
    names: dict[str, Any] = {
        "NCCL_SUM": SUM,
        "NCCL_FLOAT32": 7,
        "NCCL_FLOAT64": 8,
        "NcclCommunicator": NcclCommunicator,
        "NcclError": NcclError,
        "available": True,
        "get_unique_id": get_unique_id,
        "groupStart": groupStart,
        "groupEnd": groupEnd,
    }
    nccl = ModuleType("cupy.cuda.nccl")
    vars(nccl).update(names)
    return nccl
