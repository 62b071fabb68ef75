"""Describes the rows of a batch on one rank, and draws the random numbers of these rows.

Ranks that draw through a ``RowGenerator`` draw the numbers that one process with the same seed
draws for the whole batch. Each rank draws the numbers of its rows. The generators of all ranks end
in the state of that process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kfac_engine.arguments import check_int
from kfac_engine.errors import InputError, ShapeError, UnsupportedError

# Numbers of other ranks that are drawn at a time, where they cannot be skipped: 512 KiB.
_PIECE = 1 << 16

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive examples of a batch: the shard of one rank."""

    start: int  # index of the first example in the batch
    count: int  # number of examples; 0 for an empty shard
    whole: int  # number of examples of the batch

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("start", "count", "whole"):
            check_int(name, getattr(self, name), least=0)
        if self.start + self.count > self.whole:
            raise InputError(
                f"a batch of {self.whole} examples has no {self.count} examples from index "
                f"{self.start} on."
            )

    @classmethod
    def of(cls, counts: Sequence[int], rank: int) -> "RowRange":
        """Return the rows of a rank if the shards of a batch are in the order of the ranks.

        ``counts`` has the number of examples of each rank.
        """
        return cls(sum(counts[:rank]), counts[rank], sum(counts))


@dataclass(frozen=True, slots=True)
class DrawAxis:
    """Axis and order of the examples in an array of random numbers."""

    # Index of the axis that contains the examples, or the examples and their positions; a negative
    # index counts from the last axis.
    axis: int = 0
    # Order on that axis. True: all examples at the first position, then all examples at the next
    # position. False: all positions of the first example, then all positions of the next example.
    # None: the order is unknown.
    positions_first: bool | None = False


class RowGenerator:
    """Draws random numbers for some rows of a batch, as one process draws them for all rows.

    The generator advances past the numbers of all rows.

    Uniform numbers and random signs of other rows are skipped in logarithmic time. Normal numbers
    of other rows are drawn, in pieces, because each takes a varying number of random words.

    Args:
        rng: Generator with the state of one process; advanced by each draw.
        rows: The rows to draw.
        placements: Axis of the examples in the draws of each loss, by name; without an entry, it
            is the first axis, and the positions of an example follow one another.
        loss: Name of the loss that draws.
        rows_of: The rows to draw for a loss with examples of its own, by its name.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        rows: RowRange,
        placements: Mapping[str, DrawAxis] | None = None,
        loss: str = "",
        rows_of: Mapping[str, RowRange] | None = None,
    ) -> None:
        self._rng, self._rows, self._loss = rng, rows, loss
        self._placements, self._rows_of = placements or {}, rows_of or {}

    def of(self, loss: str) -> np.random.Generator:
        """Return the generator of the draws of a loss."""
        rows = self._rows_of.get(loss, self._rows)
        generator = RowGenerator(self._rng, rows, self._placements, loss)
        return cast("np.random.Generator", generator)

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
        """Refuse the other methods of a generator, which would draw equal numbers on all ranks."""
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
        """Draw the numbers of the rows; without ``skip``, draw the numbers of other rows, too."""
        rows = self._rows
        runs, numbers = self._layout(tuple(size))

        def advance(examples: int) -> None:
            if skip is not None:
                skip(examples * numbers)
            else:
                _discard(draw, examples * numbers)

        drawn = []
        for run in range(runs):
            advance(rows.whole - rows.count if run else rows.start)
            drawn.append(draw(rows.count * numbers))
        if runs:
            advance(rows.whole - rows.start - rows.count)
        return (drawn[0] if runs == 1 else np.concatenate([draw(0), *drawn])).reshape(size)

    def _layout(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return how often the examples repeat in sequence, and how many numbers each one has."""
        placement = self._placements.get(self._loss, DrawAxis())
        axis, count = placement.axis % len(size), self._rows.count
        # Without an example, the number of positions on the axis cannot be determined.
        positions, rest = divmod(size[axis], count) if count else (1, size[axis])
        if rest:
            raise ShapeError(
                f"random numbers of shape {size} are drawn for {count} examples, but {size[axis]} "
                f"is not a multiple of {count}; axis {axis} must contain the examples of this rank."
            )
        if placement.positions_first is None and positions > 1:
            raise UnsupportedError(
                f"axis {axis} of the output of loss '{self._loss}' has positions and examples in "
                f"an unknown order, so that ranks cannot draw targets for it. Pass sample_inputs "
                f"with several different examples, or choose estimation_mode 'empirical'."
            )
        outer, inner = prod(size[:axis]), prod(size[axis + 1 :])
        if placement.positions_first:
            return outer * positions, inner
        return outer, positions * inner

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


AnyGenerator: TypeAlias = np.random.Generator | RowGenerator


def generator_of(rng: AnyGenerator, loss: str) -> np.random.Generator:
    """Return the generator of the draws of a loss, for a batch or for some of its rows."""
    return rng.of(loss) if isinstance(rng, RowGenerator) else rng


def _discard(draw: Callable[[int], object], count: int) -> None:
    """Draw numbers and discard them, in pieces that bound the memory."""
    for start in range(0, count, _PIECE):
        draw(min(_PIECE, count - start))
