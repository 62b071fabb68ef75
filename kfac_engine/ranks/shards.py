"""The rows of a batch that one rank has, and a generator that draws their random numbers.

Ranks that draw through a ``RowGenerator`` draw the numbers that one process with the same seed
draws for the whole batch, each rank those of its rows. The generators of all ranks end in the state
of that process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from kfac_engine.arguments import whole
from kfac_engine.errors import InputError, ShapeError, UnsupportedError

# Numbers of other ranks that are drawn at a time, where they cannot be skipped: 512 KiB.
_PIECE = 1 << 16

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive examples of a batch: the shard of one rank.

    Attributes:
        start: Index of the first example in the batch.
        count: Number of examples; 0 for an empty shard.
        whole: Number of examples of the batch.

    Raises:
        InputError: The examples are not part of the batch.
    """

    start: int
    count: int
    whole: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("start", "count", "whole"):
            whole(name, getattr(self, name), least=0)
        if self.start + self.count > self.whole:
            raise InputError(
                f"a batch of {self.whole} examples has no {self.count} examples from index "
                f"{self.start} on."
            )

    @classmethod
    def of(cls, counts: Sequence[int], rank: int) -> "Rows":
        """Return the rows of a rank if the shards of a batch are in the order of the ranks.

        Args:
            counts: Number of examples of each rank.
            rank: Index of the rank.
        """
        return cls(sum(counts[:rank]), counts[rank], sum(counts))


class RowGenerator:
    """Draws the numbers of some rows, where ``numpy.random.Generator`` draws those of all rows.

    The first axis of a draw contains the examples, or the examples and the positions of each. The
    generator advances past the numbers of all rows.

    Uniform numbers and random signs of other rows are skipped in logarithmic time. Normal numbers
    of other rows are drawn, in pieces, because each takes a varying number of random words.

    Args:
        rng: Generator with the state of one process; advanced by each draw.
        rows: The rows to draw.
    """

    def __init__(self, rng: np.random.Generator, rows: Rows) -> None:
        self._rng, self._rows = rng, rows

    @property
    def bit_generator(self) -> np.random.BitGenerator:
        """The bit generator, which has the state."""
        return self._rng.bit_generator

    def random(self, size: Sequence[int]) -> npt.NDArray[np.float64]:
        """Draw uniform numbers in [0, 1)."""
        return self._draw(size, self._rng.random, self._skip_words)

    def standard_normal(self, size: Sequence[int]) -> npt.NDArray[np.float64]:
        """Draw standard normal numbers."""
        return self._draw(size, self._rng.standard_normal)

    def integers(self, low: int, high: int, size: Sequence[int]) -> npt.NDArray[np.int64]:
        """Draw integers from ``low`` to below ``high``."""

        def draw(count: int) -> npt.NDArray[np.int64]:
            return self._rng.integers(low, high, count)

        return self._draw(size, draw, self._skip_bits if (low, high) == (0, 2) else None)

    def __getattr__(self, name: str) -> Callable[..., object]:
        """Refuse the other methods of a generator, which would draw the same on all ranks.

        Raises:
            UnsupportedError: The attribute is a method of ``numpy.random.Generator``.
            AttributeError: It is not.
        """
        if not hasattr(np.random.Generator, name):
            raise AttributeError(name)
        raise UnsupportedError(
            f"a loss draws with rng.{name}, which several ranks cannot divide; draw with random, "
            f"integers or standard_normal."
        )

    def _draw(
        self,
        size: Sequence[int],
        draw: Callable[[int], npt.NDArray[Number]],
        skip: Callable[[int], None] | None = None,
    ) -> npt.NDArray[Number]:
        """Draw the numbers of the rows; without ``skip``, draw those of the others as well."""
        rows, numbers = self._rows, self._numbers_per_example(tuple(size))

        def advance(examples: int) -> None:
            if skip is not None:
                skip(examples * numbers)
            else:
                _discard(draw, examples * numbers)

        advance(rows.start)
        drawn = draw(rows.count * numbers)
        advance(rows.whole - rows.start - rows.count)
        return drawn.reshape(size)

    def _numbers_per_example(self, size: tuple[int, ...]) -> int:
        length, count = size[0], self._rows.count
        # Without an example, the number of positions on the axis cannot be determined.
        positions, rest = divmod(length, count) if count else (1, length)
        if rest:
            raise ShapeError(
                f"random numbers of shape {size} are drawn for {count} examples, but {length} is "
                f"no multiple of {count}; the first axis must contain the examples of this rank."
            )
        return positions * prod(size[1:])

    def _skip_words(self, count: int) -> None:
        """Advance past 64-bit words: one for each uniform number."""
        bits = cast("np.random.PCG64", self.bit_generator)
        state = bits.state
        bits.advance(count)
        # Uniform numbers do not change the unused half of a word, which ``advance`` deletes.
        state["state"] = bits.state["state"]
        bits.state = state

    def _skip_bits(self, count: int) -> None:
        """Advance past 32-bit halves of words: one for each integer below a power of two."""
        bits = cast("np.random.PCG64", self.bit_generator)
        if count and bits.state["has_uint32"]:
            self._rng.integers(0, 2)
            count -= 1
        if count:
            # The last word is drawn, because its second half may remain for the next draw.
            bits.advance((count - 1) // 2)
            self._rng.integers(0, 2, 2 - count % 2)


def _discard(draw: Callable[[int], object], count: int) -> None:
    """Draw numbers in pieces without a reference to them."""
    for start in range(0, count, _PIECE):
        draw(min(_PIECE, count - start))
