"""Chooses the rank that computes each task and the ranks that own each layer.

Every rank computes the same assignment from the names and loads of the same works, so that owners
need no message.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import groupby
from math import ceil, isfinite
from typing import TypeVar

from kfac_engine.arguments import check_int
from kfac_engine.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """The load of a work, or of a rank; a load is larger if its cost is, then if its bytes are."""

    cost: float = 0.0  # number of operations, or another measure that adds up
    bytes: int = 0  # bytes that the owner stores or receives

    def __add__(self, other: "Load") -> "Load":
        """Return the sum of two loads."""
        return Load(self.cost + other.cost, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Slot:
    """The rank that computes a work, and the phase of the period in which it does."""

    rank: int
    phase: int


def owners(works: Mapping[str, Load], size: int) -> dict[str, int]:
    """Return the rank that computes each work, the same for every order of the works.

    The works are assigned one by one, the largest first, each to the rank with the least load
    (longest processing time first). The largest cost of a rank is at most ``4/3 - 1/(3·size)``
    times the cost in the best assignment (Graham 1969). Works of equal load are assigned in the
    order of their keys; of ranks of equal load, the one with the fewest works is next. The largest
    work is first in the result.

    ``InputError`` is raised if the number of ranks ``size`` is not a positive whole number, or if a
    load is negative or not finite.
    """
    check_int("size", size, least=1)
    for key, work in works.items():
        if not (isfinite(work.cost) and work.cost >= 0 and work.bytes >= 0):
            raise InputError(f"the work '{key}' has the load {work}; both numbers must be >= 0.")
    # The first work is of rank 0, the second of one of the first two ranks, and so on.
    heap = [(Load(), 0, rank) for rank in range(min(size, len(works)))]
    assigned = {}
    for key in sorted(works, key=lambda key: (-works[key].cost, -works[key].bytes, key)):
        load, count, rank = heap[0]
        assigned[key] = rank
        heapreplace(heap, (load + works[key], count + 1, rank))
    return assigned


def slots(works: Mapping[str, Load], size: int, period: int) -> dict[str, Slot]:
    """Return the rank and the phase of each work, the same for every order of the works.

    Ranks are assigned together with phases: the works of one phase have about the same size, so
    that the ranks of a phase finish at about the same time. If there are at most as many works as
    slots, and every work has a cost, each work has a slot of its own, from the first phase on.
    ``size`` is the number of ranks, ``period`` the number of phases. Errors are as for ``owners``.
    """
    check_int("size", size, least=1)
    check_int("period", period, least=1)
    return {
        key: Slot(place % size, place // size)
        for key, place in owners(works, size * period).items()
    }


def loads(works: Mapping[str, Load], assigned: Mapping[str, int], size: int) -> list[Load]:
    """Return the load of each rank: the sum over its works."""
    sums = [Load()] * size
    for key, rank in assigned.items():
        sums[rank] += works[key]
    return sums


_Key = TypeVar("_Key", bound=Hashable)


def together(members: Mapping[_Key, Iterable[str]]) -> list[list[_Key]]:
    """Return the groups of works that need one owner, because they share members.

    ``members`` has the members of each work, such as the factors of a block. Groups, and the works
    of each, are in the order of the works.
    """
    groups = {key: [key] for key in members}
    users: dict[str, _Key] = {}  # member to the first work that has it
    for key, names in members.items():
        for name in names:
            first, second = groups[users.setdefault(name, key)], groups[key]
            if first is not second:
                first += second
                groups.update(dict.fromkeys(second, first))
    places = {key: place for place, key in enumerate(members)}
    different = {id(group): group for group in groups.values()}.values()
    return [sorted(group, key=places.__getitem__) for group in different]


# -- owners of layers under the distribution "shard" -----------------------------------------------
#
# A layer has one owner, unless it is a table that exceeds the share of a rank. The rows of the
# gradient of a table are independent of each other. Each owner receives its rows only, so that the
# bytes of a table are divided, too. Owners are added while the copies of the other factor, which
# all of them receive, have at most 2 % of the bytes of the table.

# Bytes of the copies of a factor, as a share of the bytes of the table that is divided.
_MOST_COPIED = 0.02


@dataclass(frozen=True, slots=True)
class LayerSize:
    """The sizes of a layer from which its owners follow."""

    bytes: int  # of its gradient
    products: float  # multiplications that precondition the gradient
    factors: tuple[str, ...]  # their names; layers may share a factor
    parameters: tuple[str, ...] = ()  # layers may read slices of one parameter
    rows: int = 1  # of a table, which several ranks may own


@dataclass(frozen=True, slots=True)
class FactorSize:
    """The sizes of a factor from which the owners of its layers follow."""

    refresh: float = 0.0  # multiplications
    bytes: int = 0  # that an owner receives before a refresh


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """Rows from ``start`` to before ``stop`` of a layer's gradient, with one owner.

    The owner is the rank that preconditions them.
    """

    owner: int
    start: int
    stop: int


def layer_owners(
    layers: Mapping[str, LayerSize],
    factors: Mapping[str, FactorSize],
    ranks: int,
    refresh_every: int = 10,
) -> dict[str, tuple[OwnedPart, ...]]:
    """Return the parts of each layer with their owners; all ranks compute the same result.

    A layer's parts are in the order of their rows. Its load is the cost of its preconditioning plus
    the cost of its refresh divided by the steps between refreshes. Layers that share a factor or a
    parameter have one owner.
    """
    members = {
        key: [*layer.factors, *(f"parameter {name}" for name in layer.parameters)]
        for key, layer in layers.items()
    }
    groups = {
        group[0]: _Group(group, [layers[key] for key in group], factors, refresh_every)
        for group in together(members)
    }
    counts = _counts(groups, ranks)
    works = {
        f"{key} {index:09d}": groups[key].part(count)
        for key, count in counts.items()
        for index in range(count)
    }
    assigned = owners(works, ranks)
    parts: dict[str, tuple[OwnedPart, ...]] = {}
    for key, count in counts.items():
        ordered = sorted(assigned[f"{key} {index:09d}"] for index in range(count))
        for member in groups[key].members:
            parts[member] = _cut(layers[member].rows, ordered)
    return {key: parts[key] for key in layers}


class _Group:
    """Layers with one owner, or one table that several ranks may own."""

    def __init__(
        self,
        members: Sequence[str],
        layers: Sequence[LayerSize],
        factors: Mapping[str, FactorSize],
        refresh_every: int,
    ) -> None:
        used = [factors[name] for name in dict.fromkeys(n for la in layers for n in la.factors)]
        self.members = members
        self.refresh = sum(factor.refresh for factor in used) / refresh_every
        self.products = sum(layer.products for layer in layers)
        self.bytes = sum(layer.bytes for layer in layers)
        copied = sum(factor.bytes for factor in used) / refresh_every
        most = 1 + int(_MOST_COPIED * self.bytes / max(copied, 1))
        self.most = min(most, layers[0].rows) if len(layers) == 1 else 1

    def part(self, count: int) -> Load:
        """Return the load of one of several equal parts; each owner refreshes the factors."""
        return Load(self.refresh + self.products / count, self.bytes // count)


def _counts(groups: Mapping[str, _Group], ranks: int) -> dict[str, int]:
    """Return the number of parts of each group.

    No part is smaller than the share of a rank, nor than the largest group with one owner, because
    the other ranks wait for that owner. The size of a part is its work or its bytes.
    """
    loads = {key: group.part(1) for key, group in groups.items()}
    whole = [load for key, load in loads.items() if groups[key].most == 1]
    cost = max([sum(load.cost for load in loads.values()) / ranks, *(w.cost for w in whole)])
    size = max([sum(load.bytes for load in loads.values()) / ranks, *(w.bytes for w in whole)])
    counts = {}
    for key, group in groups.items():
        parts = ceil(loads[key].cost / cost) if cost else 1, ceil(loads[key].bytes / size)
        counts[key] = max(1, min(group.most, ranks, max(parts)))
    return counts


def _cut(extent: int, ordered: Sequence[int]) -> tuple[OwnedPart, ...]:
    """Divide rows into equal parts; the parts of one owner are joined."""
    parts, start = [], 0
    for owner, same in groupby(ordered):
        stop = start + len(list(same))
        edges = (extent * edge // len(ordered) for edge in (start, stop))
        parts.append(OwnedPart(owner, *edges))
        start = stop
    return tuple(parts)
