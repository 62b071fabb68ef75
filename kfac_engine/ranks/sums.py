"""Sums of many arrays over all ranks, in one message for each element type."""

from collections.abc import Sequence

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.ranks.protocol import Communicator


def sum_arrays(communicator: Communicator, arrays: Sequence[Array]) -> None:
    """Replace arrays by their sums over all ranks, in place.

    Args:
        communicator: The ranks; each passes arrays of the same shapes and element types.
        arrays: Arrays of one library.
    """
    if communicator.size == 1:
        return
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        together = [array for array in arrays if array.dtype == dtype]
        xp = array_module(together[0])
        buffer = xp.concatenate([array.reshape(-1) for array in together])
        communicator.allreduce(buffer)
        start = 0
        for array in together:
            array[...] = buffer[start : start + array.size].reshape(array.shape)
            start += array.size
