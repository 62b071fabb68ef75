"""Plans of many calls, counted."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfac_engine as ke
from kfac_engine.curvature.schedule import ADAPTIVE, POLICIES, Planner, Work

every_policy = pytest.mark.parametrize("policy", POLICIES)


def works_of(costs):
    return [Work(f"f{index}", cost) for index, cost in enumerate(costs)]


def loads(works, plans):
    """Cost of the refreshes of each call."""
    cost = {work.key: work.cost for work in works}
    return [sum(cost[key] for key in keys) for keys in plans]


def run(works, schedule, calls):
    planner = Planner(works, schedule)
    return [planner.refreshes(counter) for counter in calls]


def test_every_documented_policy_has_a_row():
    assert set(POLICIES) == {"all_at_once", "round_robin", "balanced", "balanced_ranks"}
    assert set(ADAPTIVE) == {"drift", "budget"}


@every_policy
@given(
    costs=st.lists(st.floats(0, 1e9), max_size=12),
    period=st.integers(1, 8),
    start=st.integers(1, 30),
)
def test_any_period_after_the_first_call_refreshes_each_work_once(policy, costs, period, start):
    works, schedule = works_of(costs), ke.Schedule(refresh_every=period, policy=policy)
    plans = run(works, schedule, range(start, start + period))
    counted = Counter(key for keys in plans for key in keys)
    assert counted == {work.key: 1 for work in works}


@every_policy
def test_the_first_call_updates_and_refreshes_everything(policy):
    works = works_of([1, 2, 3])
    schedule = ke.Schedule(covariance_every=3, refresh_every=5, policy=policy)
    planner = Planner(works, schedule)
    assert planner.observes(0)
    assert planner.refreshes(0) == ("f0", "f1", "f2")


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_covariances_move_at_multiples_of_their_period(every, expected):
    planner = Planner([], ke.Schedule(covariance_every=every))
    assert [counter for counter in range(7) if planner.observes(counter)] == expected


def test_all_at_once_refreshes_everything_at_multiples_of_the_period():
    plans = run(works_of([1, 2]), ke.Schedule(refresh_every=3), range(7))
    assert plans == [("f0", "f1"), (), ()] * 2 + [("f0", "f1")]


@pytest.mark.parametrize(("number", "period"), [(7, 3), (6, 3), (2, 5), (5, 1)])
def test_round_robin_refreshes_an_equal_number_each_call(number, period):
    works = works_of(range(number))
    plans = run(
        works, ke.Schedule(refresh_every=period, policy="round_robin"), range(1, period + 1)
    )
    sizes = [len(keys) for keys in plans]
    assert max(sizes) - min(sizes) <= 1


@given(costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=15), period=st.integers(1, 6))
def test_balanced_calls_differ_by_less_than_the_costliest_work(costs, period):
    works = works_of(costs)
    plans = run(works, ke.Schedule(refresh_every=period, policy="balanced"), range(1, period + 1))
    # Greedy: the fullest slot was the emptiest before its last work came.
    found = loads(works, plans)
    assert max(found) - min(found) <= max(costs) * (1 + 1e-9)


def test_balanced_separates_what_is_costly():
    works = works_of([8, 1, 1, 7, 1, 6])
    plans = run(works, ke.Schedule(refresh_every=3, policy="balanced"), range(1, 4))
    assert sorted(loads(works, plans)) == [8, 8, 8]


@every_policy
def test_a_plan_lists_works_in_their_own_order_and_repeats_itself(policy):
    works = works_of([3, 1, 2, 5, 4])
    schedule = ke.Schedule(refresh_every=2, policy=policy)
    for counter in range(5):
        (keys,) = run(works, schedule, [counter])
        assert list(keys) == sorted(keys)
        assert run(works, schedule, [counter]) == [keys]


def test_works_of_equal_cost_are_spread_the_same_whatever_their_order():
    works = works_of([1, 1, 1, 1])
    schedule = ke.Schedule(refresh_every=2, policy="balanced")
    for one, other in zip(
        run(works, schedule, range(1, 3)), run(works[::-1], schedule, range(1, 3)), strict=True
    ):
        assert set(one) == set(other)
