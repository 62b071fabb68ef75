"""Traffic, memory and work of one rank, computed from the sizes of layers and factors.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kfac_engine.arguments import one_of, whole
from kfac_engine.distributed.owners import Load, Part, layer_owners, owners
from kfac_engine.distributed.sizes import ModelSize, Periods

Distribution: TypeAlias = Literal["sgd", "replicate", "shard"]

# Passes of a buffer over the network, by collective: an all-reduce is a reduce-scatter, then an
# all-gather. A rank sends (R - 1)/R of the buffer in each pass.
PASSES: Mapping[str, int] = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1}


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
        factor_owners: Ranks that compute the inverses of each factor, by name: several if they own
            parts of one layer.
        block_owners: Parts of each block, by name, each with the rank that preconditions it; empty
            if every rank preconditions all.
    """

    distribution: Distribution
    ranks: int
    messages: tuple[Message, ...]
    memory: int
    refresh: float
    products: float
    factor_owners: Mapping[str, tuple[int, ...]]
    block_owners: Mapping[str, tuple[Part, ...]]

    @property
    def handed_over(self) -> float:
        """Bytes that a rank hands to collectives in a step, the mean over a period."""
        return sum(message.bytes / message.every for message in self.messages)

    @property
    def traffic(self) -> float:
        """Bytes that a rank sends in a step, the mean over a period and over ranks."""
        passes = (PASSES[m.collective] * m.bytes / m.every for m in self.messages)
        return sum(passes) * (self.ranks - 1) / self.ranks


def rank_costs(
    model: ModelSize, ranks: int, periods: Periods | None = None
) -> dict[Distribution, RankCost]:
    """Return the cost of one rank by distribution; the arguments are as for ``rank_cost``."""
    return {name: rank_cost(model, name, ranks, periods) for name in DISTRIBUTIONS}


def rank_cost(
    model: ModelSize, distribution: Distribution, ranks: int, periods: Periods | None = None
) -> RankCost:
    """Return traffic, memory and work of one rank; one rank alone has no messages.

    By default the periods are as in ``Schedule``. ``InputError`` is raised if the distribution is
    unknown, or if the number of ranks is not positive.
    """
    one_of("distribution", distribution, tuple(DISTRIBUTIONS))
    whole("ranks", ranks, least=1)
    return DISTRIBUTIONS[distribution](model, ranks, periods or Periods())


def _sgd(model: ModelSize, ranks: int, periods: Periods) -> RankCost:
    """Return the cost of plain SGD: an all-reduce adds the gradients of all ranks."""
    del periods
    gradients = _to_all(model.parameter_bytes, 1, ranks)
    return RankCost("sgd", ranks, _sent((gradients,), ranks), 0, 0.0, 0.0, {}, {})


def _replicate(model: ModelSize, ranks: int, periods: Periods) -> RankCost:
    """Return the cost if each factor has an owner, which computes its inverse for all ranks."""
    item, every, results = model.itemsize, periods.refresh_every, model.result_bytes
    works = {name: Load(f.refresh, results[name]) for name, f in model.inverted.items()}
    assigned = {name: (rank,) for name, rank in owners(works, ranks).items()}
    messages = (
        *_sgd(model, ranks, periods).messages,
        _to_owners("reduce_scatter", _copies(model.divided_bytes, assigned), every),
        _to_owners("allgather", _copies(results, assigned), every),
        _to_all(model.whole_bytes, periods.covariance_every, ranks),
    )
    refreshes = {name: factor.refresh for name, factor in model.inverted.items()}
    return RankCost(
        "replicate",
        ranks,
        _sent(messages, ranks),
        item * sum(factor.numbers + factor.stored for factor in model.factors.values()),
        _most(_copies(refreshes, assigned)),
        sum(block.products for block in model.blocks.values()),
        assigned,
        {},
    )


def _shard(model: ModelSize, ranks: int, periods: Periods) -> RankCost:
    """Return the cost if each block has owners, which receive its statistics and gradients."""
    item, every = model.itemsize, periods.refresh_every
    assigned = layer_owners(model, ranks, every)
    ranks_of = {key: tuple(part.owner for part in parts) for key, parts in assigned.items()}
    of_factor = {n: ranks_of[key] for key, block in model.blocks.items() for n in block.factors}
    sizes = {key: item * block.numbers for key, block in model.blocks.items()}
    whole = {key: sizes[key] for key, b in model.blocks.items() if b.divisible == "columns"}
    rest = {key: size for key, size in sizes.items() if key not in whole}
    needed = {n: count for n, count in model.result_bytes.items() if model.factors[n].needed}
    first = {name: ranks_of_factor[:1] for name, ranks_of_factor in of_factor.items()}
    gradients = [*_copies(whole, ranks_of), *_shares(rest, assigned)]
    messages = (
        _to_owners("reduce_scatter", gradients, 1),
        _to_owners("allgather", _shares(sizes, assigned), 1),
        _to_owners("reduce_scatter", _copies(model.divided_bytes, of_factor), every),
        _to_owners("allgather", _copies(needed, first), every),
        _to_all(model.whole_bytes, periods.covariance_every, ranks),
    )
    # Every rank has each average: its share of it, or the whole.
    everywhere = sum(f.numbers + f.needed * f.stored for f in model.factors.values())
    of_owner = {name: f.stored for name, f in model.inverted.items() if not f.needed}
    refreshes = {name: factor.refresh for name, factor in model.inverted.items()}
    products = {key: block.products for key, block in model.blocks.items()}
    return RankCost(
        "shard",
        ranks,
        _sent(messages, ranks),
        item * (everywhere + int(_most(_copies(of_owner, of_factor)))),
        _most(_copies(refreshes, of_factor)),
        _most(_shares(products, assigned)),
        of_factor,
        assigned,
    )


DISTRIBUTIONS: Mapping[Distribution, Callable[[ModelSize, int, Periods], RankCost]] = {
    "sgd": _sgd,
    "replicate": _replicate,
    "shard": _shard,
}


def _to_all(count: int, every: int, ranks: int) -> Message:
    """Return the message of a sum that all ranks receive."""
    return Message("allreduce", count, every, count / ranks)


def _to_owners(collective: str, amounts: Sequence[tuple[int, float]], every: int) -> Message:
    """Return the message of parts that have owners; ``amounts`` are pairs of rank and bytes."""
    return Message(collective, sum(amount for _, amount in amounts), every, _most(amounts))


def _copies(
    amounts: Mapping[str, float], assigned: Mapping[str, Sequence[int]]
) -> list[tuple[int, float]]:
    """Count each amount in full for each of its ranks; return pairs of rank and amount."""
    return [(rank, amount) for key, amount in amounts.items() for rank in assigned[key]]


def _shares(
    amounts: Mapping[str, float], assigned: Mapping[str, Sequence[Part]]
) -> list[tuple[int, float]]:
    """Divide each amount among its ranks in proportion to the rows or columns that they own."""
    return [
        (part.owner, amount * (part.stop - part.start) / assigned[key][-1].stop)
        for key, amount in amounts.items()
        for part in assigned[key]
    ]


def _most(amounts: Iterable[tuple[int, float]]) -> float:
    """Return the largest sum of amounts over the ranks."""
    sums: dict[int, float] = {}
    for rank, amount in amounts:
        sums[rank] = sums.get(rank, 0) + amount
    return max(sums.values(), default=0)


def _sent(messages: Iterable[Message], ranks: int) -> tuple[Message, ...]:
    """Return the messages that are not empty; one rank sends none."""
    return tuple(message for message in messages if message.bytes and ranks > 1)
