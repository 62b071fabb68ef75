"""The calls that update covariances and refresh inverses, planned from names and costs alone.

A refresh of all factors at once makes one call in ``refresh_every`` slow. The other policies
distribute the refreshes over the calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kfac_engine.arguments import flag, one_of, whole
from kfac_engine.registry import Registry


@dataclass(frozen=True, slots=True)
class Schedule:
    """The calls of ``observe`` and ``step`` that update covariances and refresh inverses.

    The counter is the number of earlier calls. Call 0 updates all covariances and refreshes all
    inverses.

    Attributes:
        covariance_every: Covariances are updated when ``counter % covariance_every == 0``.
        refresh_every: Number of calls in which each factor is refreshed once.
        policy: A row of ``POLICIES``: ``"all_at_once"`` (all when ``counter % refresh_every ==
            0``), ``"round_robin"`` (an equal number each call) or ``"balanced"`` (an equal cost
            each call).
        overlap: Whether a refresh of one call is used from the next call on, so that a GPU computes
            inverses during the next batch. Inverses of call 0 are used at once. A CPU gives the
            same results, but the option saves no time there.
    """

    covariance_every: int = 1
    refresh_every: int = 10
    policy: str = "all_at_once"
    overlap: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A period is not a positive whole number, or the policy is unknown.
        """
        whole("covariance_every", self.covariance_every, least=1)
        whole("refresh_every", self.refresh_every, least=1)
        flag("overlap", self.overlap)
        one_of("policy", self.policy, POLICIES)


@dataclass(frozen=True, slots=True)
class Work:
    """A refresh that is due once in each period.

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
    """The updates and refreshes of one call.

    Attributes:
        update_covariances: Whether the call updates the covariances.
        refresh: Keys of the refreshes after the update, in the order of the works.
    """

    update_covariances: bool
    refresh: tuple[str, ...]


# Returns the slot of each work by key: the phase of the period in which it is refreshed.
Policy: TypeAlias = Callable[[Sequence[Work], int], Mapping[str, int]]

POLICIES: Registry[Policy] = Registry("refresh policy")


def plan(counter: int, works: Sequence[Work], schedule: Schedule) -> Plan:
    """Return the plan of a call.

    Args:
        counter: Number of the call, from 0; call 0 refreshes everything.
        works: All refreshes.
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
POLICIES.add("balanced", _balanced)
