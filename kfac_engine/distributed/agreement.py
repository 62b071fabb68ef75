"""Makes all ranks continue, or makes all of them raise the same error."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn
from zlib import crc32

import numpy as np

from kfac_engine import errors
from kfac_engine._types import Array
from kfac_engine.distributed.protocol import Communicator
from kfac_engine.errors import KfacError, RankError

_NOTHING = nullcontext()
# Numbers that a vote carries beside the mark of an error and the place in the program.
_NUMBERS = 8
# Bytes of the message of an error that other ranks receive.
_MESSAGE_BYTES = 2000
# Attribute of errors that all ranks raise.
_MARK = "_raised_by_all_ranks"
# Attribute of errors that one rank raises while other ranks wait in a message that is not a vote.
_ALONE = "_raised_by_one_rank"


def raised_by_all_ranks(error: BaseException) -> bool:
    """Return whether all ranks raise this error, in the same place."""
    return hasattr(error, _MARK)


class Agreement:
    """All ranks complete an operation, or all of them raise the same error.

    Ranks meet in votes: at the beginning or the end of an operation, and where they exchange
    numbers. An error of one rank reaches all ranks in the next vote. Code after the last vote of an
    operation must not fail. A message that is not a vote cannot exchange errors: a rank that fails
    before it raises the error alone, and its program has to end (``exchanging``).
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.rank = communicator, communicator.rank
        self.alone = communicator.size == 1
        self._operations: list[str] = []  # names of the operations that have begun

    def operation(
        self, name: str, *, begins: bool = False, ends: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which an error of one rank becomes an error of all ranks.

        All ranks raise the ``KfacError`` of the rank that has failed; another error becomes a
        ``RankError``. Ranks recognize by the names of their operations that they meet in the same
        vote.

        Args:
            name: Name of the operation.
            begins: Whether all ranks meet at the beginning, because messages without votes follow.
            ends: Whether all ranks meet at the end, so that all have succeeded. An operation that
                ends with numbers of all ranks, or with messages, does not need this vote.
        """
        return _NOTHING if self.alone else self._operation(name, begins=begins, ends=ends)

    @contextmanager
    def _operation(self, name: str, *, begins: bool, ends: bool) -> Iterator[None]:
        self._operations.append(name)
        try:
            if begins:
                self._vote()
            yield
            if ends:
                self._vote()
        except Exception as error:
            if raised_by_all_ranks(error) or hasattr(error, _ALONE):
                raise
            self._vote(error=error)
        finally:
            self._operations.pop()

    def of_all(self, *numbers: float) -> Array:
        """Return the numbers of all ranks, ``(ranks, len(numbers))``, float64.

        Raises:
            KfacError: A rank has failed. All ranks raise an error of the same class.
            RankError: Ranks are in different operations.
        """
        if self.alone:
            return np.array([numbers], np.float64)
        count, starts = len(numbers), range(0, len(numbers), _NUMBERS)
        tables = [self._vote(numbers[start : start + _NUMBERS], count=count) for start in starts]
        return np.concatenate(tables, axis=1)[:, :count]

    def sum(self, *numbers: float) -> tuple[float, ...]:
        """Return the sum of each number over all ranks, with the same bits on all of them."""
        return numbers if self.alone else tuple(map(float, self.of_all(*numbers).sum(axis=0)))

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return bool(self.of_all(flag).any())

    def exchanging(self) -> AbstractContextManager[None]:
        """Return a context for messages that are not votes, and for code right before them.

        Only this rank raises an error of the context. It does not vote on the error, because
        other ranks may be in another message. The context directly follows a vote of all ranks;
        only code that cannot fail is between them.
        """
        return _NOTHING if self.alone else self._exchanging()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not raised_by_all_ranks(error):
                setattr(error, _ALONE, True)
                error.add_note(
                    f"Rank {self.rank} of {self.communicator.size} has failed before a message in "
                    f"which the others wait; end all ranks."
                )
            raise

    def require_equal(self, values: Mapping[str, str]) -> None:
        """Raise ``RankError`` unless all ranks have equal values.

        The names of the values are part of the message.
        """
        if not self.alone:
            self.refuse_unequal(list(values), self.of_all(*checksums(values)))

    def refuse_unequal(self, names: Sequence[str], sums: Array) -> None:
        """Raise ``RankError`` for the first value that differs between ranks.

        ``sums`` are checksums of the values of all ranks, ``(ranks, values)``.
        """
        for name, column in zip(names, sums.T, strict=True):
            others = np.flatnonzero(column != column[0])
            if others.size:
                message = f"rank {others[0]} has other {name} than rank 0; start all ranks with"
                self.refuse(RankError(f"{message} the same {name}."))

    def refuse(self, error: KfacError) -> NoReturn:
        """Raise an error that all ranks raise in the same place."""
        setattr(error, _MARK, True)
        raise error

    def _vote(
        self, numbers: Sequence[float] = (), error: Exception | None = None, *, count: int = 0
    ) -> Array:
        """Return the numbers of all ranks, some of ``count``, or raise the error of a rank."""
        ranks, place = self.communicator, "/".join((*self._operations, str(count)))
        table = np.zeros((ranks.size, 2 + _NUMBERS))
        table[ranks.rank, :2] = error is not None, crc32(place.encode())
        table[ranks.rank, 2 : 2 + len(numbers)] = numbers
        flat = table.reshape(-1)
        ranks.allreduce(flat)
        failed = np.flatnonzero(table[:, 0])
        if failed.size:
            agreed = self._error_of(int(failed[0]), error)
            setattr(agreed, _MARK, True)
            raise agreed from error
        others = np.flatnonzero(table[:, 1] != table[0, 1])
        if others.size:
            self.refuse(
                RankError(
                    f"rank {others[0]} has called another method than rank 0; call the same "
                    f"methods in the same order on all ranks."
                )
            )
        return table[:, 2:]

    def _error_of(self, rank: int, error: Exception | None) -> KfacError:
        """Return the error of a rank, with its number, on all ranks."""
        buffer = np.zeros(_MESSAGE_BYTES, np.float32)  # a byte in each number
        if rank == self.communicator.rank and error is not None:
            name = type(error).__name__
            text = f"{name}\n{error}" if isinstance(error, KfacError) else f"\n{name}: {error}"
            encoded = np.frombuffer(text.encode(errors="replace")[:_MESSAGE_BYTES], np.uint8)
            buffer[: len(encoded)] = encoded
        self.communicator.broadcast(buffer, rank)
        text = buffer.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="ignore")
        name, _, message = text.partition("\n")
        kind = getattr(errors, name, RankError) if name else RankError
        return kind(f"rank {rank} of {self.communicator.size} refused: {message}")


def checksums(values: Mapping[str, str]) -> list[float]:
    """Return a number for each value; equal values have equal numbers."""
    return [float(crc32(value.encode())) for value in values.values()]
