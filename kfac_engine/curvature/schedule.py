"""Who is due: a pure planner that sees names and costs, never arrays.

Two clocks: covariances move every few calls, inverses are refreshed now and then. A refresh of
every factor at once makes one call in ``refresh_every`` slow; the other policies spread it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kfac_engine.arguments import flag, one_of, whole
from kfac_engine.registry import Registry


@dataclass(frozen=True, slots=True)
class Schedule:
    """When covariances and inverses move; the counter counts calls of ``observe`` and ``step``.

    Call 0 updates the covariances and refreshes everything.

    Attributes:
        covariance_every: Covariances are updated when ``counter % covariance_every == 0``.
        refresh_every: Each factor is refreshed once in so many calls.
        policy: A row of ``POLICIES``: ``"all_at_once"`` (all when ``counter % refresh_every ==
            0``), ``"round_robin"`` (an equal number each call) or ``"balanced"`` (an equal cost
            each call).
        overlap: Whether inverses begun in one call are used from the next one on: a GPU then works
            on them while the next batch runs. Those of call 0 are used at once. On a CPU the
            numbers are the same, and nothing is gained.
    """

    covariance_every: int = 1
    refresh_every: int = 10
    policy: str = "all_at_once"
    overlap: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A period is no positive whole number or the policy unknown.
        """
        whole("covariance_every", self.covariance_every, least=1)
        whole("refresh_every", self.refresh_every, least=1)
        flag("overlap", self.overlap)
        one_of("policy", self.policy, POLICIES)


@dataclass(frozen=True, slots=True)
class Work:
    """A refresh that must be done once a period.

    Attributes:
        key: Name of the refresh.
        cost: Relative cost, for example the number of multiplications.
        owner: Rank of the process that computes it.
    """

    key: str
    cost: float
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call does.

    Attributes:
        update_covariances: Whether the statistics move.
        refresh: Keys to refresh afterwards, in the order of the works.
    """

    update_covariances: bool
    refresh: tuple[str, ...]


# Gives each work its slot: the phase of the period in which it is refreshed.
Policy: TypeAlias = Callable[[Sequence[Work], int], Mapping[str, int]]

POLICIES: Registry[Policy] = Registry("refresh policy")


def plan(counter: int, works: Sequence[Work], schedule: Schedule) -> Plan:
    """What is due at a call.

    Args:
        counter: Number of the call, from 0; the first refreshes everything.
        works: All refreshes there are.
        schedule: Periods and policy.

    Returns:
        The plan; every work is in exactly one plan of each period after the first call.
    """
    phase = counter % schedule.refresh_every
    slots = POLICIES[schedule.policy](works, schedule.refresh_every)
    return Plan(
        update_covariances=counter % schedule.covariance_every == 0,
        refresh=tuple(work.key for work in works if counter == 0 or slots[work.key] == phase),
    )


def _all_at_once(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """Everything in the first slot."""
    del period
    return {work.key: 0 for work in works}


def _round_robin(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """An equal number in every slot."""
    return {work.key: index % period for index, work in enumerate(works)}


def _balanced(works: Sequence[Work], period: int) -> Mapping[str, int]:
    """A near-equal cost in every slot: the costliest work goes to the emptiest slot."""
    loads = [0.0] * period
    slots = {}
    for work in sorted(works, key=lambda work: (-work.cost, work.key)):
        slot = loads.index(min(loads))
        slots[work.key] = slot
        loads[slot] += work.cost
    return slots


POLICIES.add("all_at_once", _all_at_once)
POLICIES.add("round_robin", _round_robin)
POLICIES.add("balanced", _balanced)
