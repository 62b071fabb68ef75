"""Plans of many calls, counted."""

import pytest

import kfac_engine as ke
from kfac_engine.curvature.schedule import ADAPTIVE, POLICIES, Planner


def test_every_documented_policy_has_a_row():
    assert set(POLICIES) == {"all_at_once", "round_robin", "balanced", "balanced_ranks"}
    assert set(ADAPTIVE) == {"drift", "budget"}


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_covariances_move_at_multiples_of_their_period(every, expected):
    planner = Planner([], ke.Schedule(covariance_every=every))
    assert [counter for counter in range(7) if planner.observes(counter)] == expected
