"""The rank that computes each work, decided from names and loads alone.

Every rank computes the same assignment from the same works, so that owners need no message.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapreplace
from math import isfinite

from kfac_engine.arguments import whole
from kfac_engine.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """The load of a work, or of a rank; a load is larger if its cost is, then if its bytes are.

    Attributes:
        cost: Number of operations, or another measure that adds up.
        bytes: Bytes that the owner stores or receives.
    """

    cost: float = 0.0
    bytes: int = 0

    def __add__(self, other: "Load") -> "Load":
        """Return the sum of two loads."""
        return Load(self.cost + other.cost, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Slot:
    """The rank that computes a work, and the phase of the period in which it does.

    Attributes:
        rank: The rank, from 0.
        phase: The phase, from 0.
    """

    rank: int
    phase: int


def owners(works: Mapping[str, Load], size: int) -> dict[str, int]:
    """Return the rank that computes each work, the same for every order of the works.

    The works are assigned one by one, the largest first, each to the rank with the least load
    (longest processing time first). The largest cost of a rank is at most ``4/3 - 1/(3·size)``
    times that of the best assignment (Graham 1969). Works of equal load are assigned in the order
    of their keys; of ranks of equal load, the one with the fewest works is next.

    Args:
        works: Key of a work to its load.
        size: Number of ranks.

    Returns:
        Key to rank, the largest work first.

    Raises:
        InputError: The size is not a positive whole number, or a load is negative or not finite.
    """
    whole("size", size, least=1)
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

    Ranks are assigned together with phases: the works of one phase are about as large as each
    other, so that no rank waits long for another one in any phase. If there are fewer works than
    slots, and all have a cost, each slot has at most one work, and the first phases have all
    of them.

    Args:
        works: Key of a work to its load.
        size: Number of ranks.
        period: Number of phases.

    Returns:
        Key to slot, the largest work first.

    Raises:
        InputError: As for ``owners``, or the period is not a positive whole number.
    """
    whole("size", size, least=1)
    whole("period", period, least=1)
    return {
        key: Slot(place % size, place // size)
        for key, place in owners(works, size * period).items()
    }


def loads(works: Mapping[str, Load], assigned: Mapping[str, int], size: int) -> list[Load]:
    """Return the load of each rank.

    Args:
        works: Key of a work to its load.
        assigned: Key to rank, as ``owners`` returns it.
        size: Number of ranks.

    Returns:
        The sum of the loads of the works of each rank.
    """
    sums = [Load()] * size
    for key, rank in assigned.items():
        sums[rank] += works[key]
    return sums


def together(members: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of works that need one owner, because they share members.

    Args:
        members: Key of a work to the names of its members, such as a block to its factors.

    Returns:
        The keys of each group, in the order of the works.
    """
    groups = {key: [key] for key in members}
    users: dict[str, str] = {}  # member to the first work that has it
    for key, names in members.items():
        for name in names:
            first, second = groups[users.setdefault(name, key)], groups[key]
            if first is not second:
                first += second
                groups.update(dict.fromkeys(second, first))
    places = {key: place for place, key in enumerate(members)}
    different = {id(group): group for group in groups.values()}.values()
    return [sorted(group, key=places.__getitem__) for group in different]
