"""Plans the calls that update covariances and refresh inverses, from numbers only.

A refresh of all factors at once makes one call in ``refresh_every`` slow. The other policies
distribute the refreshes over the calls. A ``Planner`` reads names, costs and counters, and no
arrays. An engine has one for its calls, and an optimizer has one for its steps, whose periods grow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TypeAlias

from kfac_engine.arguments import check_bool, check_choice, check_int, is_count
from kfac_engine.distributed.owners import Load, slots
from kfac_engine.registry import Registry

# Number of the call of an update that has not taken place.
NEVER = -1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The calls of ``observe`` and ``step`` that update covariances and refresh inverses.

    The counter is the number of earlier calls. Call 0 updates all covariances and refreshes all
    inverses.

    Attributes:
        covariance_every: Number of calls from one update of the covariances to the next: they are
            updated when ``counter % covariance_every == 0``.
        refresh_every: Number of calls from one refresh of a factor to the next.
        policy: Which factors a call refreshes; each factor is refreshed once in ``refresh_every``
            calls. ``"all_at_once"`` refreshes all when ``counter % refresh_every == 0``,
            ``"round_robin"`` an equal number each call, ``"balanced"`` an equal cost each call, and
            ``"balanced_ranks"`` an equal cost each call on each of several processes, which then
            compute at the same time.
        overlap: Whether a refresh of one call is used from the next call on, so that a GPU computes
            inverses during the next batch. Inverses of call 0 are used at once. A CPU gives the
            same results, but the option saves no time there.
    """

    covariance_every: int = 1
    refresh_every: int = 10
    policy: str = "all_at_once"
    overlap: bool = False

    def __post_init__(self) -> None:
        """Raise ``InputError`` if a period, the policy or another value is not allowed."""
        check_int("covariance_every", self.covariance_every, least=1)
        check_int("refresh_every", self.refresh_every, least=1)
        check_bool("overlap", self.overlap)
        check_choice("policy", self.policy, POLICIES)


@dataclass(frozen=True, slots=True)
class Work:
    """The refresh of one factor."""

    key: str  # name of the refresh
    cost: float  # relative cost, for example the number of multiplications
    owner: int | None = None  # rank of the process that computes it; None if any process may
    ranks: int = 1  # number of processes


class Due(NamedTuple):
    """What is due in a call."""

    counter: int  # number of the call, from 0
    statistics: bool  # whether the call updates the covariances
    refreshes: tuple[str, ...]  # keys of the refreshes, in the order of the works
    # Whether the covariances replace the averages, as after ``GrowingPlanner.restart``.
    replaces: bool = False
    # Whether these covariances are the first ones in ``refresh_every`` calls.
    begins_period: bool = False


class Planner:
    """Plans the updates of the covariances and the refreshes, call by call.

    Equal inputs give equal plans.

    Attributes:
        works: All refreshes.
        schedule: The periods and the policy.
        refreshed: Counter of the latest refresh of each work, by key; a checkpoint stores it.
    """

    def __init__(self, works: Sequence[Work], schedule: Schedule) -> None:
        self.works = tuple(works)
        self._keys = tuple([work.key for work in self.works])
        self.schedule = schedule
        self.refreshed: dict[str, int] = {}
        # The phase of the period in which each work is refreshed.
        self._slots = POLICIES[schedule.policy](self.works, schedule.refresh_every)

    def due(self, counter: int) -> Due:
        """Return what is due in a call; calls are counted from 0."""
        statistics = counter % self.schedule.covariance_every == 0
        return Due(counter, statistics, self.refreshes(counter))

    def refreshes(self, counter: int, bound: int | None = None) -> tuple[str, ...]:
        """Return the keys of the refreshes of a call, in the order of the works.

        The number of the call counts from 0; call 0 refreshes everything. ``bound`` is the largest
        period in this call, for periods that grow: a work is then due as soon as so many calls have
        passed since its latest refresh, whatever the policy.
        """
        keys, period, last = self._keys, self.schedule.refresh_every, self.refreshed
        if counter == 0:
            return keys
        if bound is None:
            return tuple([key for key in keys if counter % period == self._slots[key]])
        period = min(period, bound)
        if len(last) == len(keys) and counter - min(last.values(), default=0) < period:
            return ()
        return tuple([key for key in keys if counter - last.get(key, -inf) >= period])

    def advance(self, due: Due) -> None:
        """Record that a call, in which so much was due, has succeeded."""
        self.refreshed.update(dict.fromkeys(due.refreshes, due.counter))

    def saved(self) -> dict[str, object]:
        """Return the state as plain values, for a checkpoint."""
        return {"refreshed": dict(self.refreshed)}

    def restore(self, saved: Mapping[str, object] | None) -> None:
        """Restore a state that ``saved`` returned; None for the state before the first call."""
        self.refreshed = dict((saved or {}).get("refreshed", {}))  # type: ignore[call-overload]


class GrowingPlanner(Planner):
    """A planner whose periods grow, because the curvature changes quickly when a run begins.

    In call number ``t`` of the run, an update is due as soon as ``min(period, max(1, t // 2))``
    calls have passed since the last one. Refreshes have a period of at least ``least_period``.

    Args:
        works: As for ``Planner``.
        schedule: As for ``Planner``.
        least_period: Returns the least number of calls between two refreshes, for the number of
            examples of a batch; None for one call.

    Attributes:
        observed: Call of the latest update of the covariances; −1 before the first one.
        start: Call from which the periods grow, and whose covariances replace the averages; −1 for
            the beginning of the run.
    """

    def __init__(
        self,
        works: Sequence[Work],
        schedule: Schedule,
        least_period: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(works, schedule)
        self._least_period = least_period
        self.observed = self.start = NEVER

    def due(self, counter: int, examples: int = 0) -> Due:
        """Return what is due in a call; ``examples`` is the size of its batch."""
        bound, first = max(1, (counter - max(self.start, 0)) // 2), self.observed == NEVER
        every, period = min(self.schedule.covariance_every, bound), self.schedule.refresh_every
        if self._least_period is not None and bound < period:
            bound = max(bound, self._least_period(examples))
        return Due(
            counter,
            statistics=first or counter - self.observed >= every,
            refreshes=self.refreshes(counter, bound),
            replaces=first and self.start != NEVER,
            begins_period=first or counter // period > self.observed // period,
        )

    def advance(self, due: Due) -> None:
        super().advance(due)
        if due.statistics:
            self.observed = due.counter

    def restart(self, counter: int) -> None:
        """Let the periods grow from a call on, which updates and refreshes everything."""
        self.observed, self.start = NEVER, counter
        self.refreshed.clear()


# Returns the slot of each work by key: the phase of the period in which it is refreshed.
Policy: TypeAlias = Callable[[Sequence[Work], int], Mapping[str, int]]

POLICIES: Registry[Policy] = Registry("refresh policy")


def is_planner_state(value: object) -> bool:
    """Return whether an untrusted value has the form of ``Planner.saved``.

    States of older versions have further numbers, which are not read.
    """
    refreshed = value.get("refreshed") if isinstance(value, dict) else None
    return isinstance(refreshed, dict) and all(map(is_count, refreshed.values()))


def _all_at_once(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """Assign all works to the first slot."""
    del period
    return {work.key: 0 for work in works}


def _round_robin(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """Assign an equal number of works to every slot."""
    return {work.key: index % period for index, work in enumerate(works)}


def _balanced(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """Assign works by decreasing cost, each to the slot with the smallest cost so far."""
    loads = [0.0] * period
    slots = {}
    for work in sorted(works, key=lambda work: (-work.cost, work.key)):
        slot = loads.index(min(loads))
        slots[work.key] = slot
        loads[slot] += work.cost
    return slots


POLICIES.add("all_at_once", _all_at_once)
POLICIES.add("round_robin", _round_robin)


def _balanced_ranks(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """Assign an equal cost to every slot of every process, and return the slot of each key.

    Works without an owner are assigned to processes and slots together. The works of each owner are
    assigned by decreasing cost, so that the largest works of all owners are in the first slot.
    ``period`` is the number of slots.
    """
    free = {work.key: Load(work.cost) for work in works if work.owner is None}
    ranks = max((work.ranks for work in works), default=1)
    phases = {key: slot.phase for key, slot in slots(free, ranks, period).items()}
    for owner in dict.fromkeys(work.owner for work in works if work.owner is not None):
        phases |= _balanced([work for work in works if work.owner == owner], period)
    return phases


POLICIES.add("balanced", _balanced)
POLICIES.add("balanced_ranks", _balanced_ranks)
