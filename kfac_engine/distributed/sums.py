"""Sums of many arrays over all ranks, in one message for each element type."""

from collections.abc import Sequence

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.distributed.protocol import Communicator


def sum_arrays(communicator: Communicator, arrays: Sequence[Array]) -> None:
    """Replace arrays by their sums over all ranks, in place.

    Args:
        communicator: The ranks; each passes arrays of the same shapes and element types.
        arrays: Arrays of one library.
    """
    if communicator.size > 1:
        for array, total in zip(arrays, summed(communicator, arrays), strict=True):
            array[...] = total


def summed(communicator: Communicator, arrays: Sequence[Array]) -> list[Array]:
    """Return the sums of arrays over all ranks.

    Args:
        communicator: As for ``sum_arrays``.
        arrays: As for ``sum_arrays``; they do not change.

    Returns:
        The sums, which share memory that belongs to nothing else.
    """
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
