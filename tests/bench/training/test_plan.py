"""Which runs the suite makes, and how it chooses among settings."""

import pytest

from kfac_engine.bench.training.methods import METHODS
from kfac_engine.bench.training.plan import COLLECTIONS, Group, groups
from kfac_engine.bench.training.run import Outcome, Point


def result(*losses, died=""):
    points = tuple(Point(i, i, i, loss, None) for i, loss in enumerate(losses))
    return Outcome(1, 1.0, 1.0, points, died)


def test_the_best_candidate_has_the_lowest_loss_of_those_that_did_not_die():
    group = Group("lenet", "muon", 6.0)
    first, second, third = group.candidates(0)
    outcomes = {first: result(9, 3, 5), second: result(9, 4, 4), third: result(9, 1, died="NaN")}
    assert group.best(outcomes, 0) == first
    assert group.best({run: outcomes[run] for run in (first, second)}, 0) is None
    # If all of them died, a run shows it.
    dead = {first: result(9, died="NaN"), second: result(8, died="NaN"), third: result(9, died="x")}
    assert group.best(dead, 0) == second
    chosen = group.chosen(outcomes, (0, 7))
    assert [(run.rate, run.seed) for run in chosen] == [(0.01, 0), (0.01, 7)]
    assert group.chosen({}, (0, 7)) == []


def test_learning_rates_rise_at_first_and_follow_the_schedule():
    adam, kfac = METHODS["adam"], METHODS["kfac"]
    assert adam.scale("tail", 0.0) == pytest.approx(0.05)
    assert adam.scale("tail", 0.009) == pytest.approx(0.5)
    assert adam.scale("tail", 0.5) == 1
    assert adam.scale("tail", 0.8) == pytest.approx(0.5)
    assert adam.scale("cosine", 0.5) == pytest.approx(0.5)
    # K-FAC has no rate that would have to rise.
    assert kfac.scale("tail", 0.0) == 1
    assert kfac.scale("tail", 0.8) == pytest.approx(0.5)


def test_a_collection_has_its_own_budgets_rates_and_variants():
    tables = groups(["tables"], ["kfac", "adam", "sgd"])
    assert {(g.method, g.seconds, g.budget_steps) for g in tables if g.task == "wine-raw"} == {
        ("kfac", 0.5, 0), ("kfac", 0.0, 300), ("adam", 0.5, 0), ("adam", 0.0, 300),
    }  # fmt: skip
    assert {g.task for g in tables} == set(COLLECTIONS["tables"].tasks)
    (adam,) = groups(["wine"], ["adam"], [2.0])
    assert [(r.rate, r.schedule) for r in adam.candidates(0)] == [
        (0.001, "tail"), (0.003, "tail"), (0.01, "tail"),
    ]  # fmt: skip
    (muon,) = groups(["llama"], ["muon"])
    assert {(run.method, run.rate) for run in muon.candidates(0)} == {
        (method, rate) for method in ("muon", "muon:adam_rate=0.001") for rate in (0.01, 0.02, 0.04)
    }
    # The last loss counts: a run that overfits is not the best one.
    first, second, third = adam.candidates(0)
    outcomes = {first: result(9, 1, 5), second: result(9, 3, 4), third: result(9, 6)}
    assert adam.best(outcomes, 0) == second
    assert (
        str(groups(["wine"], ["kfac"])[1].candidates(3)[0]) == "wine, kfac tail, seed 3, 300 steps"
    )
