"""The sizes of a model: its layers, its factors and the periods of its updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

from kfac_engine.arguments import whole

# Parts of a product that several ranks can compute: rows, from the same rows of the gradient;
# columns, from the whole gradient.
Divisible: TypeAlias = Literal["rows", "columns"]

_WIDE = 8  # bytes of a float64


@dataclass(frozen=True, slots=True)
class FactorSize:
    """The sizes of a factor.

    Attributes:
        shape: Shape of its average: ``(d, d)``, ``(m, d, d)`` for a stack, or any other.
        stored: Number of entries that a refresh stores; 0 if it has no inverse.
        refresh: Number of multiplications of a refresh, d³ for each matrix.
        symmetric: Whether the average is symmetric, and the results of a refresh as well.
        divided: Whether the average is divided among the ranks between refreshes.
        needed: Whether measurements need the results of a refresh on all ranks.
        wide: Whether the results of a refresh are sent as float64, such as eigenvectors.
        precise: Whether the average is float64 for all types of parameters, such as frequencies of
            token ids.
    """

    shape: tuple[int, ...]
    stored: int = 0
    refresh: float = 0.0
    symmetric: bool = False
    divided: bool = False
    needed: bool = False
    wide: bool = False
    precise: bool = False

    @property
    def numbers(self) -> int:
        """Number of entries of the average."""
        return prod(self.shape)

    @property
    def packed(self) -> int:
        """Number of entries of the average that are sent: a triangle if it is symmetric."""
        return self._sent(self.numbers)

    @property
    def results(self) -> int:
        """Number of entries that are sent after a refresh."""
        return self._sent(self.stored)

    def _sent(self, entries: int) -> int:
        if not self.symmetric:
            return entries
        side = self.shape[-1]
        return entries * (side + 1) // (2 * side)


@dataclass(frozen=True, slots=True)
class BlockSize:
    """The sizes of a layer with its block.

    Attributes:
        numbers: Number of entries of its parameters.
        factors: Names of its factors.
        parameters: Names of its parameters. Blocks of slices of one parameter share it.
        products: Number of operations to precondition its gradient.
        divisible: The parts of a product that several ranks can compute; None if one rank computes
            the whole product.
        extent: Number of these rows or columns.
        most_owners: Largest number of ranks that own columns.
    """

    numbers: int
    factors: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    products: float = 0.0
    divisible: Divisible | None = None
    extent: int = 1
    most_owners: int = 1


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model.

    Attributes:
        blocks: Sizes of the blocks, by name.
        factors: Sizes of the factors, by name. Blocks may share a factor.
        itemsize: Bytes of an entry.
    """

    blocks: Mapping[str, BlockSize]
    factors: Mapping[str, FactorSize]
    itemsize: int = 4

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, ``P``."""
        return self.itemsize * sum(block.numbers for block in self.blocks.values())

    @cached_property
    def inverted(self) -> Mapping[str, FactorSize]:
        """The factors that store inverses."""
        return {name: factor for name, factor in self.factors.items() if factor.stored}

    @cached_property
    def result_bytes(self) -> Mapping[str, int]:
        """Bytes of the results of each refresh, as they are sent."""
        return {
            name: (_WIDE if factor.wide else self.itemsize) * factor.results
            for name, factor in self.inverted.items()
        }

    @cached_property
    def divided_bytes(self) -> Mapping[str, int]:
        """Bytes of each average that is divided among the ranks, as it is sent."""
        factors = self.factors.items()
        return {name: self.itemsize * factor.packed for name, factor in factors if factor.divided}

    @property
    def whole_bytes(self) -> int:
        """Bytes of all averages that are whole."""
        return sum(
            (_WIDE if factor.precise else self.itemsize) * factor.numbers
            for factor in self.factors.values()
            if not factor.divided
        )


@dataclass(frozen=True, slots=True)
class Periods:
    """Numbers of calls from one refresh or update of statistics to the next, as in ``Schedule``."""

    refresh_every: int = 10
    covariance_every: int = 1

    def __post_init__(self) -> None:
        """Check that both periods are positive whole numbers."""
        whole("refresh_every", self.refresh_every, least=1)
        whole("covariance_every", self.covariance_every, least=1)
