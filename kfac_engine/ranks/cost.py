"""Traffic, memory and work of one rank, computed from the sizes of layers and factors.

The bytes and operations follow from the sizes. ``machines`` predicts times from them.

With ``P`` bytes of parameters, ``S`` bytes of packed triangles of all factors, results of a refresh
of the same size, ``T`` calls from one refresh to the next and ``R`` ranks:

=============  ===========================  =======================
distribution   bytes handed over in a step  traffic of a rank
=============  ===========================  =======================
plain SGD      P                            2P (R - 1)/R
replicate      P + 2S/T                     (2P + 2S/T)(R - 1)/R
shard          2P + S/T                     (2P + S/T)(R - 1)/R
=============  ===========================  =======================

An average that only refreshes read is divided: each rank adds up its share, and ranks meet before a
refresh. Other averages, such as diagonals, are whole; their statistics are sent with each update.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

from kfac_engine.arguments import one_of, whole
from kfac_engine.ranks.owners import Load, owners, together

Distribution: TypeAlias = Literal["sgd", "replicate", "shard"]

_WIDE = 8  # bytes of a float64
# Passes of a buffer over the network, by collective: an all-reduce is a reduce-scatter, then an
# all-gather. A rank sends (R - 1)/R of the buffer in each pass.
PASSES: Mapping[str, int] = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1}


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
    """

    shape: tuple[int, ...]
    stored: int = 0
    refresh: float = 0.0
    symmetric: bool = False
    divided: bool = False
    needed: bool = False
    wide: bool = False

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
        """Number of entries of the results of a refresh that are sent."""
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
        rows: Number of rows of its statistics in the batch of one rank.
        forward: Number of operations of its forward pass for this batch.
        products: Number of operations to precondition its gradient.
    """

    numbers: int
    factors: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    rows: float = 0.0
    forward: float = 0.0
    products: float = 0.0


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model.

    Attributes:
        blocks: Name of a block to its sizes.
        factors: Name of a factor to its sizes. Blocks may share a factor.
        itemsize: Bytes of an entry.
        sources: Backward passes of a batch for statistics alone.
    """

    blocks: Mapping[str, BlockSize]
    factors: Mapping[str, FactorSize]
    itemsize: int = 4
    sources: float = 1.0

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
        factors = self.factors.values()
        return self.itemsize * sum(factor.numbers for factor in factors if not factor.divided)


@dataclass(frozen=True, slots=True)
class Periods:
    """Numbers of calls, as in ``Schedule``.

    Attributes:
        refresh_every: From one refresh of all inverses to the next.
        covariance_every: From one update of the statistics to the next.
    """

    refresh_every: int = 10
    covariance_every: int = 1

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A period is not a positive whole number.
        """
        whole("refresh_every", self.refresh_every, least=1)
        whole("covariance_every", self.covariance_every, least=1)


@dataclass(frozen=True, slots=True)
class Message:
    """A buffer that every rank hands to a collective.

    Attributes:
        collective: A row of ``PASSES``.
        bytes: Bytes of the buffer.
        every: Number of calls from one such message to the next.
        largest: Bytes of the largest part that one rank owns.
    """

    collective: str
    bytes: float
    every: int
    largest: float


@dataclass(frozen=True, slots=True)
class RankCost:
    """Traffic, memory and work of one rank.

    Attributes:
        distribution: ``"sgd"`` (gradients are averaged, and nothing else), ``"replicate"`` (every
            rank has all inverses) or ``"shard"`` (the owner of a block preconditions its gradient).
        ranks: Number of ranks.
        messages: The buffers that a rank hands to collectives, without votes of a few bytes.
        memory: Bytes of averages and inverses on the rank that has most.
        refresh: Multiplications of a refresh of all inverses on the rank that has most.
        products: Operations of preconditioning on the rank that has most, in a step.
        factor_owners: Name of a factor to the rank that computes its inverses.
        block_owners: Name of a block to the rank that preconditions its gradient; empty if every
            rank preconditions all.
    """

    distribution: Distribution
    ranks: int
    messages: tuple[Message, ...]
    memory: int
    refresh: float
    products: float
    factor_owners: Mapping[str, int]
    block_owners: Mapping[str, int]

    @property
    def handed_over(self) -> float:
        """Bytes that a rank hands to collectives in a step, the mean over a period."""
        return sum(message.bytes / message.every for message in self.messages)

    @property
    def traffic(self) -> float:
        """Bytes that a rank sends in a step, the mean over a period and over ranks."""
        passes = (PASSES[m.collective] * m.bytes / m.every for m in self.messages)
        return sum(passes) * (self.ranks - 1) / self.ranks


def rank_cost(
    model: ModelSize, distribution: Distribution, ranks: int, periods: Periods | None = None
) -> RankCost:
    """Return traffic, memory and work of one rank.

    Args:
        model: Sizes of the model.
        distribution: The distribution.
        ranks: Number of ranks.
        periods: Periods of refreshes and of updates; by default those of ``Schedule``.

    Returns:
        The cost. One rank has no messages.

    Raises:
        InputError: The distribution is unknown, or the number of ranks is not positive.
    """
    one_of("distribution", distribution, tuple(DISTRIBUTIONS))
    whole("ranks", ranks, least=1)
    return DISTRIBUTIONS[distribution](model, ranks, periods or Periods())


def _sgd(model: ModelSize, ranks: int, periods: Periods) -> RankCost:
    """Plain SGD: an all-reduce of the gradients."""
    del periods
    gradients = _to_all(model.parameter_bytes, 1, ranks)
    return RankCost("sgd", ranks, _sent((gradients,), ranks), 0, 0.0, 0.0, {}, {})


def _replicate(model: ModelSize, ranks: int, periods: Periods) -> RankCost:
    """Each factor has an owner, which receives its statistic and sends its inverse to all."""
    item, every, results = model.itemsize, periods.refresh_every, model.result_bytes
    works = {name: Load(f.refresh, results[name]) for name, f in model.inverted.items()}
    assigned = owners(works, ranks)
    messages = (
        *_sgd(model, ranks, periods).messages,
        _to_owners("reduce_scatter", model.divided_bytes, assigned, every),
        _to_owners("allgather", results, assigned, every),
        _to_all(model.whole_bytes, periods.covariance_every, ranks),
    )
    return RankCost(
        "replicate",
        ranks,
        _sent(messages, ranks),
        item * sum(factor.numbers + factor.stored for factor in model.factors.values()),
        _most({name: factor.refresh for name, factor in model.inverted.items()}, assigned),
        sum(block.products for block in model.blocks.values()),
        assigned,
        {},
    )


def _shard(model: ModelSize, ranks: int, periods: Periods) -> RankCost:
    """Each block has an owner, which receives its statistics and gradients."""
    item, blocks = model.itemsize, model.blocks
    assigned = block_owners(model, ranks, periods.refresh_every)
    of_factor = {name: assigned[key] for key, block in blocks.items() for name in block.factors}
    gradients = {key: item * block.numbers for key, block in blocks.items()}
    needed = {n: count for n, count in model.result_bytes.items() if model.factors[n].needed}
    messages = (
        _to_owners("reduce_scatter", gradients, assigned, 1),
        _to_owners("allgather", gradients, assigned, 1),
        _to_owners("reduce_scatter", model.divided_bytes, of_factor, periods.refresh_every),
        _to_owners("allgather", needed, of_factor, periods.refresh_every),
        _to_all(model.whole_bytes, periods.covariance_every, ranks),
    )
    # Every rank has each average: its share of it, or the whole.
    everywhere = sum(f.numbers + f.needed * f.stored for f in model.factors.values())
    of_owner = {name: f.stored for name, f in model.inverted.items() if not f.needed}
    return RankCost(
        "shard",
        ranks,
        _sent(messages, ranks),
        item * (everywhere + int(_most(of_owner, of_factor))),
        _most({name: factor.refresh for name, factor in model.inverted.items()}, of_factor),
        _most({key: block.products for key, block in blocks.items()}, assigned),
        of_factor,
        assigned,
    )


DISTRIBUTIONS: Mapping[Distribution, Callable[[ModelSize, int, Periods], RankCost]] = {
    "sgd": _sgd,
    "replicate": _replicate,
    "shard": _shard,
}


def block_owners(model: ModelSize, ranks: int, refresh_every: int = 10) -> dict[str, int]:
    """Return the owner of each block under ``"shard"``, by its work in a step.

    The work is the share of a refresh in one step, and the preconditioning. Blocks that share a
    factor or a parameter have one owner.

    Args:
        model: Sizes of the model.
        ranks: Number of ranks.
        refresh_every: Number of calls from one refresh to the next.

    Returns:
        Name of a block to its rank.
    """
    groups = together(
        {
            key: [*block.factors, *(f"parameter {name}" for name in block.parameters)]
            for key, block in model.blocks.items()
        }
    )
    works = {group[0]: _group_load(model, group, refresh_every) for group in groups}
    assigned = owners(works, ranks)
    return {key: assigned[group[0]] for group in groups for key in group}


def _group_load(model: ModelSize, group: Iterable[str], refresh_every: int) -> Load:
    blocks = [model.blocks[key] for key in group]
    names = dict.fromkeys(name for block in blocks for name in block.factors)
    refresh = sum(model.factors[name].refresh for name in names)
    # A multiplication of a refresh counts as one of a product, with the addition after it.
    products = sum(block.products for block in blocks) / 2
    return Load(
        refresh / refresh_every + products, model.itemsize * sum(block.numbers for block in blocks)
    )


def _to_all(count: int, every: int, ranks: int) -> Message:
    """Return the message of a sum that all ranks receive."""
    return Message("allreduce", count, every, count / ranks)


def _to_owners(
    collective: str, parts: Mapping[str, int], assigned: Mapping[str, int], every: int
) -> Message:
    """Return the message of parts that have owners."""
    return Message(collective, sum(parts.values()), every, _most(parts, assigned))


def _most(amounts: Mapping[str, float], assigned: Mapping[str, int]) -> float:
    """Return the largest sum of amounts over the ranks."""
    sums: dict[int, float] = {}
    for key, amount in amounts.items():
        sums[assigned[key]] = sums.get(assigned[key], 0) + amount
    return max(sums.values(), default=0)


def _sent(messages: Iterable[Message], ranks: int) -> tuple[Message, ...]:
    """Return the messages that are not empty; one rank sends none."""
    return tuple(message for message in messages if message.bytes and ranks > 1)
