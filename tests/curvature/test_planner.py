"""Plans of updates and refreshes, over many simulated calls."""

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st

import kfac_engine as ke
from kfac_engine.curvature.schedule import POLICIES, Due, Planner, Work, is_planner_state

costs_of_works = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)


def works_of(costs):
    return [Work(f"f{i}", cost) for i, cost in enumerate(costs)]


def reference(counter, costs, period, policy):
    """The plan of a call, written independently."""
    keys = [f"f{i}" for i in range(len(costs))]
    if counter == 0:
        return tuple(keys)
    if policy == "all_at_once":
        return tuple(keys) if counter % period == 0 else ()
    if policy == "round_robin":
        return tuple(key for i, key in enumerate(keys) if i % period == counter % period)
    totals, slots = [0.0] * period, {}
    for cost, key in sorted(zip(costs, keys, strict=True), key=lambda pair: (-pair[0], pair[1])):
        slots[key] = min(range(period), key=lambda slot: (totals[slot], slot))
        totals[slots[key]] += cost
    return tuple(key for key in keys if slots[key] == counter % period)


@pytest.mark.parametrize("policy", POLICIES)
@given(costs=costs_of_works, period=st.integers(1, 8))
def test_a_plan_is_that_of_its_policy(policy, costs, period):
    planner = Planner(works_of(costs), ke.Schedule(refresh_every=period, policy=policy))
    for counter in range(2 * period + 1):
        assert planner.refreshes(counter) == reference(counter, costs, period, policy)


@pytest.mark.parametrize("policy", POLICIES)
@given(number=st.integers(1, 6), period=st.integers(1, 6), start=st.integers(1, 20))
def test_each_factor_is_refreshed_once_in_a_period(policy, number, period, start):
    planner = Planner(works_of([1.0] * number), ke.Schedule(refresh_every=period, policy=policy))
    plans = [planner.refreshes(counter) for counter in range(start, start + period)]
    counts = Counter(key for keys in plans for key in keys)
    assert counts == {f"f{i}": 1 for i in range(number)}


def test_a_restored_planner_continues_with_the_same_plans():
    first, second = (Planner(works_of([1.0, 2.0]), ke.Schedule(refresh_every=7)) for _ in range(2))
    first.advance(Due(0, statistics=True, refreshes=("f0", "f1")))
    first.advance(Due(3, statistics=True, refreshes=("f1",)))
    saved = json.loads(json.dumps(first.saved()))
    assert is_planner_state(saved)
    second.restore(saved)
    for counter in range(4, 20):
        assert second.refreshes(counter, bound=5) == first.refreshes(counter, bound=5)
    assert second.refreshes(5, bound=5) == ("f0",)


@pytest.mark.parametrize(
    "forged", [None, {}, {"refreshed": [1]}, {"refreshed": {"f0": -1}}, {"refreshed": {"f0": 1.5}}]
)
def test_a_forged_state_is_recognised(forged):
    assert is_planner_state(Planner(works_of([1.0]), ke.Schedule()).saved())
    assert not is_planner_state(forged)


def test_a_state_of_an_older_version_is_read():
    old = {"refreshed": {"f0": 4}, "elapsed": 1.0, "spent": 0.5, "cost": 2.0, "seconds": 0.1}
    assert is_planner_state(old)
    planner = Planner(works_of([1.0]), ke.Schedule())
    planner.restore(old)
    assert planner.refreshed == {"f0": 4}


def test_every_documented_policy_has_a_row():
    assert set(POLICIES) == {"all_at_once", "round_robin", "balanced", "balanced_ranks"}


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_covariances_move_at_multiples_of_their_period(every, expected):
    planner = Planner([], ke.Schedule(covariance_every=every))
    assert [counter for counter in range(7) if planner.due(counter).statistics] == expected
