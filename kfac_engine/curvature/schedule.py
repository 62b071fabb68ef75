"""The calls that update covariances and refresh inverses, planned from numbers alone.

A refresh of all factors at once makes one call in ``refresh_every`` slow. The other policies
distribute the refreshes over the calls, follow the drift of the averages, or obey a budget of time.
A ``Planner`` reads names, costs, counters, drifts and seconds, and no arrays. An engine has one for
its calls, and an optimizer has one for its steps, whose periods grow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from math import inf
from typing import NamedTuple, TypeAlias

from kfac_engine.arguments import flag, is_amount, is_count, one_of, positive, whole
from kfac_engine.distributed.owners import Load, slots
from kfac_engine.errors import InputError, UnknownNameError, suggestion
from kfac_engine.registry import Registry

# Weight of earlier refreshes in the learned time of a refresh.
_MEMORY = 0.8
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
        refresh_every: Number of calls from one refresh of a factor to the next. With the policy
            ``"drift"`` it is the largest number. With the policy ``"budget"`` only its ratio to
            ``periods`` matters.
        policy: Which factors a call refreshes. A row of ``POLICIES`` refreshes each factor once in
            its period: ``"all_at_once"`` (all when ``counter % refresh_every == 0``),
            ``"round_robin"`` (an equal number each call), ``"balanced"`` (an equal cost each call)
            or ``"balanced_ranks"`` (an equal cost each call on each of several processes, which
            then compute at the same time). A row of ``ADAPTIVE`` decides in each call: ``"drift"``
            refreshes the factors whose averages have moved, ``"budget"`` the factors that wait
            longest, as many as the budget allows.
        overlap: Whether a refresh of one call is used from the next call on, so that a GPU computes
            inverses during the next batch. Inverses of call 0 are used at once. A CPU gives the
            same results, but the option saves no time there.
        drift: Relative change of an average since the latest refresh, from which the policy
            ``"drift"`` refreshes the factor.
        budget: Largest share of refreshes in the time of all calls, in (0, 1), with the policy
            ``"budget"``. Call 0 does not count, and the share may be exceeded by one refresh. The
            plans depend on measured times, so that two runs differ.
        periods: Periods of factors, by pattern of parameter names. Such a period replaces
            ``refresh_every``. The first pattern that matches counts. A factor of several layers has
            the shortest of their periods.
    """

    covariance_every: int = 1
    refresh_every: int = 10
    policy: str = "all_at_once"
    overlap: bool = False
    drift: float = 0.1
    budget: float = 0.2
    periods: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise ``InputError`` if a period, the policy or another value is not allowed."""
        whole("covariance_every", self.covariance_every, least=1)
        whole("refresh_every", self.refresh_every, least=1)
        flag("overlap", self.overlap)
        one_of("policy", self.policy, (*POLICIES, *ADAPTIVE))
        positive("drift", self.drift)
        positive("budget", self.budget)
        if self.budget >= 1:
            raise InputError(f"budget must lie in (0, 1), got {self.budget!r}.")
        if not isinstance(self.periods, Mapping):
            raise InputError(
                f"periods must be a dictionary, such as {{'conv*': 20}}, got {self.periods!r:.80}."
            )
        for pattern, period in self.periods.items():
            whole(f"periods[{pattern!r}]", period, least=1)


@dataclass(frozen=True, slots=True)
class Work:
    """The refresh of one factor.

    Attributes:
        key: Name of the refresh.
        cost: Relative cost, for example the number of multiplications.
        parameters: Names of the parameters whose blocks use the factor.
        owner: Rank of the process that computes it; None if any process may.
        ranks: Number of processes.
    """

    key: str
    cost: float
    parameters: tuple[str, ...] = ()
    owner: int | None = None
    ranks: int = 1


class Call(NamedTuple):
    """A call whose refreshes are planned.

    Attributes:
        counter: Number of the call, from 0.
        drifts: The relative changes of the averages since their latest refresh, by key of the work.
        bound: Largest period of any work in this call; None for the periods of the schedule.
    """

    counter: int
    drifts: Mapping[str, float]
    bound: int | None

    def bounded(self, period: int) -> int:
        """Return a period, or the bound if that is smaller."""
        return period if self.bound is None else min(period, self.bound)


@dataclass(slots=True)
class PlannerState:
    """The state of a planner: results of earlier calls, which a checkpoint stores.

    Attributes:
        refreshed: Counter of the latest refresh of each work, by key.
        elapsed: Seconds of all calls after call 0.
        spent: Seconds of their refreshes.
        cost: Sum of the costs of earlier refreshes, with less weight for older ones.
        seconds: Sum of their seconds, with the same weights.
    """

    refreshed: dict[str, int] = field(default_factory=dict)
    elapsed: float = 0.0
    spent: float = 0.0
    cost: float = 0.0
    seconds: float = 0.0


class Planner:
    """Plans the updates of the covariances and the refreshes, call by call.

    Equal inputs give equal plans. ``periods`` has the period of each work, and ``state`` the
    results of earlier calls, which ``advance`` changes. ``UnknownNameError`` is raised if a pattern
    of the periods of the schedule matches no parameter.
    """

    def __init__(self, works: Sequence[Work], schedule: Schedule) -> None:
        self.works = tuple(works)
        self.schedule = schedule
        self.periods = {work.key: _period(work, schedule) for work in self.works}
        self.state = PlannerState()
        self._choose = ADAPTIVE[schedule.policy] if schedule.policy in ADAPTIVE else _in_slots(self)
        for pattern in schedule.periods:
            names = [name for work in self.works for name in work.parameters]
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError(
                    f"the pattern '{pattern}'{suggestion(pattern, names)} of periods matches no "
                    f"parameter whose block stores an inverse."
                )

    @property
    def reads_drifts(self) -> bool:
        """Whether ``refreshes`` needs drifts."""
        return self.schedule.policy == "drift"

    def observes(self, counter: int) -> bool:
        """Return whether a call updates the covariances; calls are counted from 0."""
        return counter % self.schedule.covariance_every == 0

    def bound(self, counter: int, examples: int) -> int | None:
        """Return the largest period of the refreshes of a call, for ``refreshes``.

        ``counter`` is the number of the call, from 0, and ``examples`` the size of its batch. None
        means the periods of the schedule.
        """
        del counter, examples
        return None

    def refreshes(
        self,
        counter: int,
        drifts: Mapping[str, float] | None = None,
        bound: int | None = None,
    ) -> tuple[str, ...]:
        """Return the keys of the refreshes of a call, in the order of the works.

        The number of the call counts from 0; call 0 refreshes everything. ``drifts`` map the key of
        a work to the relative change of its averages since its latest refresh; it is infinite where
        it is absent. ``bound`` is the largest period in this call, for periods that grow. Each work
        is then due as soon as its period has passed since its latest refresh, and everything is
        refreshed while no work was. None is for the periods of the schedule.
        """
        if counter == 0 or (bound is not None and not self.state.refreshed):
            return tuple(work.key for work in self.works)
        chosen = frozenset(self._choose(self, Call(counter, drifts or {}, bound)))
        return tuple(work.key for work in self.works if work.key in chosen) if chosen else ()

    def advance(self, counter: int, refreshed: Sequence[str], elapsed: float, spent: float) -> None:
        """Record a call that has succeeded.

        ``refreshed`` are the keys of its refreshes. The whole call took ``elapsed`` seconds, and
        its refreshes took ``spent`` seconds.
        """
        state, keys = self.state, frozenset(refreshed)
        state.refreshed.update(dict.fromkeys(refreshed, counter))
        if keys:
            cost = sum(work.cost for work in self.works if work.key in keys)
            state.cost = _MEMORY * state.cost + cost
            state.seconds = _MEMORY * state.seconds + spent
        if counter > 0:
            state.elapsed += elapsed
            state.spent += spent

    def age(self, key: str, counter: int) -> float:
        """Return the number of calls since the latest refresh of a work; infinite without one."""
        return counter - self.state.refreshed.get(key, -inf)

    def saved(self) -> dict[str, object]:
        """Return the state as plain values, for a checkpoint.

        Seconds differ between equal runs. They are 0 unless the plans depend on them.
        """
        if self.schedule.policy == "budget":
            return asdict(self.state)
        return asdict(PlannerState(self.state.refreshed))

    def restore(self, saved: Mapping[str, object] | None) -> None:
        """Restore a state that ``saved`` returned; None for the state before the first call."""
        self.state = PlannerState(**(saved or {}))  # type: ignore[arg-type] # as `saved` returned it


class GrowingPlanner(Planner):
    """A planner whose periods grow, because the curvature changes quickly when a run begins.

    In call number ``t`` of the run, an update is due as soon as ``min(period, max(1, t // 2))``
    calls have passed since the last one. Refreshes have a period of at least ``least_period``,
    unless a budget of time limits them.

    Args:
        works: As for ``Planner``.
        schedule: As for ``Planner``.
        least_period: Returns the least number of calls between two refreshes, for the number of
            examples of a batch.

    Attributes:
        observed: Call of the latest update of the covariances; −1 before the first one.
        start: Call from which the periods grow, and whose covariances replace the averages; −1 for
            the beginning of the run.
    """

    def __init__(
        self,
        works: Sequence[Work],
        schedule: Schedule,
        least_period: Callable[[int], int] = lambda _: 1,
    ) -> None:
        super().__init__(works, schedule)
        self._least_period = least_period
        self._longest = max(self.periods.values(), default=0)
        self.observed = self.start = NEVER

    def observes(self, counter: int) -> bool:
        every = min(self.schedule.covariance_every, self._grown(counter))
        return self.observed == NEVER or counter - self.observed >= every

    def bound(self, counter: int, examples: int) -> int:
        grown = self._grown(counter)
        if self.schedule.policy == "budget" or grown >= self._longest:
            return grown
        return max(grown, self._least_period(examples))

    def begins_period(self, counter: int) -> bool:
        """Return whether covariances of a call are the first ones in ``refresh_every`` calls."""
        every = self.schedule.refresh_every
        return self.observed == NEVER or counter // every > self.observed // every

    @property
    def replaces(self) -> bool:
        """Whether the next covariances replace the averages, as after ``restart``."""
        return self.observed == NEVER and self.start != NEVER

    def restart(self, counter: int) -> None:
        """Let the periods grow from a call on, which updates and refreshes everything."""
        self.observed, self.start = NEVER, counter
        self.state.refreshed.clear()

    def _grown(self, counter: int) -> int:
        """Return the largest period of an update in a call."""
        return max(1, (counter - max(self.start, 0)) // 2)


# Returns the slot of each work by key: the phase of the period in which it is refreshed.
Policy: TypeAlias = Callable[[Sequence[Work], int], Mapping[str, int]]
# Yields the keys of the refreshes of a call.
Choice: TypeAlias = Callable[[Planner, Call], Iterator[str]]

POLICIES: Registry[Policy] = Registry("refresh policy")


def is_planner_state(value: object) -> bool:
    """Return whether an untrusted value has the form of ``Planner.saved``."""
    names = {field.name for field in fields(PlannerState)}
    if not isinstance(value, dict) or value.keys() != names:
        return False
    refreshed, numbers = value["refreshed"], [value[name] for name in names - {"refreshed"}]
    return (
        isinstance(refreshed, dict)
        and all(map(is_count, refreshed.values()))
        and all(map(is_amount, numbers))
    )


def _period(work: Work, schedule: Schedule) -> int:
    """Return the period of a work: the shortest of its parameters."""
    return min(
        (
            next((p for key, p in schedule.periods.items() if fnmatchcase(name, key)), None)
            or schedule.refresh_every
            for name in work.parameters
        ),
        default=schedule.refresh_every,
    )


def _in_slots(planner: Planner) -> Choice:
    """Return the choice of a row of ``POLICIES``, applied to the works of each period."""
    policy, slots = POLICIES[planner.schedule.policy], dict[str, int]()
    for period in dict.fromkeys(planner.periods.values()):
        slots |= policy([w for w in planner.works if planner.periods[w.key] == period], period)

    spreads = any(slots.values())

    def chosen(planner: Planner, call: Call) -> Iterator[str]:
        counter, bound, refreshed = call.counter, call.bound, planner.state.refreshed
        for key, slot in slots.items():
            period = planner.periods[key]
            in_slot = counter % period == slot
            # Works have equal ages when the bound reaches their period. Their slots spread them.
            if bound is None or (in_slot and spreads and bound >= period):
                due = in_slot
            else:
                due = counter - refreshed.get(key, -inf) >= min(period, bound)
            if due:
                yield key

    return chosen


def _by_drift(planner: Planner, call: Call) -> Iterator[str]:
    """Yield the works whose averages have moved, and the works whose period has passed."""
    for work in planner.works:
        moved = call.drifts.get(work.key, inf) >= planner.schedule.drift
        period = call.bounded(planner.periods[work.key])
        if moved or planner.age(work.key, call.counter) >= period:
            yield work.key


def _by_budget(planner: Planner, call: Call) -> Iterator[str]:
    """Yield the works that wait longest, relative to their periods, until the budget is spent."""
    state, schedule = planner.state, planner.schedule
    known = state.cost > 0 and state.seconds > 0
    left = schedule.budget * state.elapsed - state.spent
    ages = {work.key: planner.age(work.key, call.counter) for work in planner.works}
    least = call.bounded(schedule.covariance_every)
    waiting = [work for work in planner.works if ages[work.key] >= least]
    waiting.sort(key=lambda work: -ages[work.key] / planner.periods[work.key])
    for work in waiting:
        if left <= 0:
            return
        yield work.key
        # Before the first measurement, one refresh shows how long it takes.
        left -= work.cost * state.seconds / state.cost if known else inf


ADAPTIVE: Registry[Choice] = Registry("adaptive refresh policy")
ADAPTIVE.add("drift", _by_drift)
ADAPTIVE.add("budget", _by_budget)


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
