"""Owners depend on names and loads alone, and divide the work of known models evenly."""

import pytest
from hypothesis import given, strategies as st

from kfac_engine.curvature.schedule import POLICIES, Work
from kfac_engine.distributed.owners import Load, loads, owners, slots, together
from kfac_engine.errors import InputError
from tests.distributed.known_models import MODELS

# Integers: sums of costs are exact, so that bounds hold without a tolerance.
costs = st.lists(st.integers(0, 50), min_size=1, max_size=7)


def works(numbers):
    return {f"work {index}": Load(cost) for index, cost in enumerate(numbers)}


def makespan(table, assigned, size):
    return max(load.cost for load in loads(table, assigned, size))


def test_owners_of_a_small_case_are_those_of_a_hand():
    # 7 → 0; 5 → 1; 4 → 1, as 5 < 7; 3 → 0, as 7 < 9; 3 → 1, as 9 < 10
    table = {"a": Load(3), "b": Load(7), "c": Load(4), "d": Load(3), "e": Load(5)}
    assert owners(table, 2) == {"b": 0, "e": 1, "c": 1, "a": 0, "d": 1}
    assert loads(table, owners(table, 2), 2) == [Load(10), Load(12)]


def test_ties_are_decided_by_bytes_and_then_by_key():
    table = {"b": Load(1, 5), "a": Load(1, 5), "c": Load(1, 9), "free": Load(0, 1)}
    # the most bytes first; then 'a' before 'b'; the work without a cost to the fewest bytes
    assert list(owners(table, 3)) == ["c", "a", "b", "free"]
    assert owners(table, 3) == {"c": 0, "a": 1, "b": 2, "free": 1}


@given(st.data(), costs, st.integers(1, 5), st.integers(1, 4))
def test_assignments_are_the_same_for_every_order_of_the_works(data, numbers, size, period):
    table = works(numbers)
    permuted = dict(data.draw(st.permutations(list(table.items()))))
    assert list(owners(permuted, size).items()) == list(owners(table, size).items())
    assert slots(permuted, size, period) == slots(table, size, period)


def best_makespan(numbers, size):
    """The least makespan of all assignments; equal ranks are interchangeable."""
    reached = {(0,) * size}
    for cost in numbers:
        reached = {
            tuple(sorted((*sums[:rank], sums[rank] + cost, *sums[rank + 1 :])))
            for sums in reached
            for rank in range(size)
        }
    return min(map(max, reached))


@given(costs, st.integers(1, 4))
def test_makespan_is_within_grahams_bound_of_the_best_assignment(numbers, size):
    table, best = works(numbers), best_makespan(numbers, size)
    # times 3·size, in integers
    assert 3 * size * makespan(table, owners(table, size), size) <= (4 * size - 1) * best


@given(costs, st.integers(1, 5), st.integers(1, 4))
def test_every_work_has_a_rank_and_a_phase(numbers, size, period):
    table = works(numbers)
    assert owners(table, size).keys() == slots(table, size, period).keys() == table.keys()
    assert set(owners(table, size).values()) <= set(range(size))
    for slot in slots(table, size, period).values():
        assert 0 <= slot.rank < size
        assert 0 <= slot.phase < period


def test_more_ranks_than_works_cost_nothing():
    table = works([3, 0, 2, 0])
    assert list(owners(table, 4).values()) == [0, 1, 2, 3]
    assert owners(table, 10**12) == owners(table, 4)


def test_one_rank_owns_everything():
    assert set(owners(works([3, 1, 2]), 1).values()) == {0}


@pytest.mark.parametrize(
    ("table", "size", "named"),
    [
        ({"a": Load(1)}, 0, "size must be a whole number of at least 1, got 0"),
        ({"a": Load(-1.0)}, 2, "the work 'a'"),
        ({"a": Load(float("nan"))}, 2, "the work 'a'"),
        ({"a": Load(float("inf"))}, 2, "the work 'a'"),
        ({"a": Load(1.0, -4)}, 2, "the work 'a'"),
    ],
)
def test_loads_without_an_order_are_refused(table, size, named):
    with pytest.raises(InputError, match=named):
        owners(table, size)


def test_a_period_without_a_phase_is_refused():
    with pytest.raises(InputError, match="period must be"):
        slots({"a": Load(1)}, 2, 0)


@given(costs, st.integers(1, 5), st.integers(1, 4))
def test_the_policy_balanced_ranks_has_the_phases_of_slots(numbers, size, period):
    table, plan = works(numbers), POLICIES["balanced_ranks"]
    free = [Work(key, load.cost, ranks=size) for key, load in table.items()]
    assert plan(free, period) == {k: slot.phase for k, slot in slots(table, size, period).items()}
    # Works with owners: those of each owner alone, by the policy of one process.
    ranks = owners(table, size)
    owned = [Work(key, load.cost, owner=ranks[key], ranks=size) for key, load in table.items()]
    for rank in set(ranks.values()):
        mine = [work for work in owned if work.owner == rank]
        phases = {work.key: plan(owned, period)[work.key] for work in mine}
        assert phases == POLICIES["balanced"](mine, period)


@given(costs, st.integers(1, 5), st.integers(1, 4))
def test_slots_of_few_works_are_in_the_first_phases(numbers, size, period):
    table = works(numbers)
    assigned = slots(table, size, period)
    if len(table) <= size * period:
        expected = [(i % size, i // size) for i in range(len(table))]
        assert sorted((s.rank, s.phase) for s in assigned.values()) == sorted(expected)
    sizes = [table[key].cost for key in assigned]
    assert sizes == sorted(sizes, reverse=True)


def test_blocks_that_share_a_factor_need_one_owner():
    blocks = {"q": ["A", "Gq"], "fc": ["B", "H"], "k": ["Gk", "A"], "bias": [], "v": ["Gv", "Gk"]}
    assert together(blocks) == [["q", "k", "v"], ["fc"], ["bias"]]
    assert together({}) == []


# -- known models ---------------------------------------------------------------------------------


def refreshes(model):
    """The inverse of each factor, at d³."""
    sizes = [size for layer in MODELS[model] for size in layer.sizes]
    return works([size**3 for size in sizes])


def blocks(model):
    """The inverses of each layer, on one rank."""
    return works([sum(size**3 for size in layer.sizes) for layer in MODELS[model]])


def bound(table, size):
    costs = [work.cost for work in table.values()]
    return max(sum(costs) / size, max(costs))


SIZES = (4, 8, 16, 32, 64)


@pytest.mark.parametrize("of", [refreshes, blocks])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_inverses_of_known_models_take_at_most_a_tenth_longer_than_the_bound(model, size, of):
    table = of(model)
    assert makespan(table, owners(table, size), size) <= 1.10 * bound(table, size)


def time_of(policy, table, size, period=10):
    """The largest costs of a rank in all phases, whose works are divided among the ranks anew."""
    plan = POLICIES[policy]([Work(k, load.cost, ranks=size) for k, load in table.items()], period)
    phases = [{k: load for k, load in table.items() if plan[k] == p} for p in range(period)]
    return sum(makespan(works, owners(works, size), size) for works in phases if works)
