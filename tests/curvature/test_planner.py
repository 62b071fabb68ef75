"""Plans by periods of layers, by drift and by a budget of time, over many simulated calls."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfac_engine as ke
from kfac_engine.curvature.schedule import ADAPTIVE, POLICIES, Planner, Work, is_planner_state

CALLS = 120
# Sums of up to a few hundred seconds of size one.
ROUNDING = 1e-9

costs_of_works = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)


def works_of(costs):
    return [
        Work(f"f{i}", cost, (f"layer{i}.weight", f"layer{i}.bias")) for i, cost in enumerate(costs)
    ]


def counted(plans):
    return Counter(key for keys in plans for key in keys)


# -- periods of layers ---------------------------------------------------------------------------


def reference(counter, costs, period, policy):
    """The plan of one period for all factors, written independently."""
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
def test_equal_periods_give_the_plan_of_a_single_period(policy, costs, period):
    for schedule in (
        ke.Schedule(refresh_every=period, policy=policy),
        ke.Schedule(refresh_every=3, policy=policy, periods={"*": period}),
    ):
        planner = Planner(works_of(costs), schedule)
        for counter in range(2 * period + 1):
            expected = reference(counter, costs, period, policy)
            assert planner.refreshes(counter) == expected


@pytest.mark.parametrize("policy", POLICIES)
@given(periods=st.lists(st.integers(1, 6), min_size=1, max_size=6), start=st.integers(1, 20))
def test_each_factor_is_refreshed_once_in_its_own_period(policy, periods, start):
    patterns = {f"layer{i}.weight": period for i, period in enumerate(periods)}
    schedule = ke.Schedule(refresh_every=6, policy=policy, periods=patterns)
    planner = Planner(works_of([1.0] * len(periods)), schedule)
    for index, period in enumerate(periods):
        plans = [planner.refreshes(counter) for counter in range(start, start + period)]
        assert counted(plans)[f"f{index}"] == 1


def test_the_first_pattern_that_matches_counts_and_the_shortest_period_of_shared_factors():
    schedule = ke.Schedule(refresh_every=7, periods={"a.*": 3, "*.weight": 5})
    works = [
        Work("one", 1.0, ("a.weight",)),
        Work("two", 1.0, ("b.weight",)),
        Work("shared", 1.0, ("b.weight", "a.bias")),
        Work("rest", 1.0, ("b.bias",)),
    ]
    assert Planner(works, schedule).periods == {"one": 3, "two": 5, "shared": 3, "rest": 7}


def test_a_pattern_without_a_parameter_is_refused():
    with pytest.raises(ke.UnknownNameError, match=r"'conv\*' of periods matches no parameter"):
        Planner(works_of([1.0]), ke.Schedule(periods={"conv*": 3}))


# -- drift ----------------------------------------------------------------------------------------


@given(
    drifts=st.lists(
        st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=CALLS, max_size=CALLS
    ),
    threshold=st.floats(0.05, 1),
    period=st.integers(1, 30),
)
def test_drift_refreshes_what_has_moved_and_what_is_old(drifts, threshold, period):
    planner = Planner(
        works_of([1.0] * 3), ke.Schedule(refresh_every=period, policy="drift", drift=threshold)
    )
    latest = dict.fromkeys(("f0", "f1", "f2"), 0)
    for counter, values in enumerate(drifts):
        measured = dict(zip(latest, values, strict=True))
        due = planner.refreshes(counter, measured)
        for key in latest:
            moved = counter == 0 or measured[key] >= threshold
            assert (key in due) == (moved or counter - latest[key] >= period)
        planner.advance(counter, due, 1.0, 0.1)
        latest.update(dict.fromkeys(due, counter))


def test_an_unknown_drift_refreshes():
    planner = Planner(works_of([1.0, 1.0]), ke.Schedule(policy="drift", drift=0.5))
    planner.advance(0, ("f0", "f1"), 1.0, 0.1)
    assert planner.refreshes(1, {"f0": 0.4}) == ("f1",)


# -- budget ---------------------------------------------------------------------------------------


def simulated(costs, seconds, rate, schedule, planner=None, start=0):
    """Yield each call: the planner, the keys, and the seconds of the call and its refreshes.

    A refresh takes ``rate`` seconds for each unit of cost.
    """
    works = works_of(costs)
    planner = planner or Planner(works, schedule)
    cost = {work.key: work.cost for work in works}
    for counter, step in enumerate(seconds, start):
        due = planner.refreshes(counter)
        spent = rate * sum(cost[key] for key in due)
        planner.advance(counter, due, step + spent, spent)
        yield counter, due, step + spent, spent


steps = st.lists(st.floats(0.01, 2), min_size=CALLS, max_size=CALLS)


@given(costs=costs_of_works, seconds=steps, rate=st.floats(1e-4, 0.1), budget=st.floats(0.01, 0.9))
def test_refreshes_exceed_the_budget_by_at_most_one_refresh(costs, seconds, rate, budget):
    schedule = ke.Schedule(policy="budget", budget=budget)
    elapsed = spent = 0.0
    for counter, due, call, refresh in simulated(costs, seconds, rate, schedule):
        if counter == 0:
            assert len(due) == len(costs)
            continue
        elapsed, spent = elapsed + call, spent + refresh
        assert spent <= budget * elapsed + rate * max(costs) + ROUNDING


@given(costs=costs_of_works, seconds=steps, rate=st.floats(1e-4, 0.1), budget=st.floats(0.01, 0.9))
def test_a_budget_refreshes_every_factor_again_and_again(costs, seconds, rate, budget):
    schedule = ke.Schedule(policy="budget", budget=budget)
    times, elapsed = {f"f{i}": [0.0] for i in range(len(costs))}, 0.0
    for _, due, call, _ in simulated(costs, seconds, rate, schedule):
        elapsed += call
        for key in due:
            times[key].append(elapsed)
    # All factors take this long within the budget; the longest call comes between two decisions.
    longest = 2 * rate * sum(costs) / budget + 2 * (max(seconds) + rate * sum(costs)) / budget
    for moments in times.values():
        gaps = [b - a for a, b in zip(moments, [*moments[1:], elapsed], strict=True)]
        assert max(gaps) <= longest + ROUNDING


def test_a_budget_that_suffices_refreshes_everything_in_each_call():
    schedule = ke.Schedule(policy="budget", budget=0.5)
    plans = [due for _, due, _, _ in simulated([1.0, 2.0], [1.0] * 30, 0.01, schedule)]
    assert plans[2:] == [("f0", "f1")] * 28


def test_a_factor_with_half_the_period_is_refreshed_twice_as_often():
    schedule = ke.Schedule(policy="budget", budget=0.1, refresh_every=20, periods={"layer0.*": 10})
    plans = [due for _, due, _, _ in simulated([1.0, 1.0], [1.0] * 3000, 1.0, schedule)]
    counts = counted(plans)
    assert counts["f0"] / counts["f1"] == pytest.approx(2.0, rel=0.1)


def test_one_refresh_is_planned_while_its_time_is_unknown():
    planner = Planner(works_of([1.0, 1.0, 1.0]), ke.Schedule(policy="budget"))
    planner.advance(1, (), 10.0, 0.0)
    assert len(planner.refreshes(2)) == 1


@given(costs=costs_of_works, seconds=steps, rate=st.floats(1e-4, 0.1), cut=st.integers(0, CALLS))
def test_a_restored_planner_continues_with_the_same_plans(costs, seconds, rate, cut):
    schedule = ke.Schedule(policy="budget")
    whole = list(simulated(costs, seconds, rate, schedule))
    first = Planner(works_of(costs), schedule)
    assert list(simulated(costs, seconds[:cut], rate, schedule, first)) == whole[:cut]
    saved = json.loads(json.dumps(first.saved()))
    assert is_planner_state(saved)
    second = Planner(works_of(costs), schedule)
    second.restore(saved)
    rest = simulated(costs, seconds[cut:], rate, schedule, second, start=cut)
    assert list(rest) == whole[cut:]


@pytest.mark.parametrize(
    "change",
    [
        {"elapsed": -1.0}, {"spent": float("nan")}, {"cost": "1"}, {"seconds": float("inf")},
        {"refreshed": [1]}, {"refreshed": {"f0": -1}}, {"refreshed": {"f0": 1.5}}, {"more": 1},
    ],
)  # fmt: skip
def test_a_forged_state_is_recognised(change):
    state = Planner(works_of([1.0]), ke.Schedule()).saved()
    assert is_planner_state(state)
    assert not is_planner_state(state | change)
    assert not is_planner_state(None)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "sometimes"}, "all_at_once, round_robin, balanced, balanced_ranks, drift"),
        ({"drift": 0}, "drift must be a positive number"),
        ({"budget": 1.0}, r"budget must lie in \(0, 1\), got 1.0"),
        ({"budget": -0.1}, "budget must be a positive number"),
        ({"periods": 3}, "periods must be a dictionary"),
        ({"periods": {"a": 0}}, r"periods\['a'\]"),
    ],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(ke.InputError, match=message):
        ke.Schedule(**options)


# -- Plans of many calls, counted ------------------------------------------------------------------


def test_every_documented_policy_has_a_row():
    assert set(POLICIES) == {"all_at_once", "round_robin", "balanced", "balanced_ranks"}
    assert set(ADAPTIVE) == {"drift", "budget"}


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_covariances_move_at_multiples_of_their_period(every, expected):
    planner = Planner([], ke.Schedule(covariance_every=every))
    assert [counter for counter in range(7) if planner.observes(counter)] == expected
