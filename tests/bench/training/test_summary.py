"""The summary of training runs: closed cases of interpolation, medians and quotients."""

from math import inf

import pytest

from kfac_engine.bench.training.plan import Group
from kfac_engine.bench.training.run import Outcome, Point, Run
from kfac_engine.bench.training.summary import Moment, compare, group_row, reached


def curve(*pairs, accuracies=None):
    """Evaluations at 0, 1, 2, … CPU seconds; ten steps take a second."""
    accuracies = accuracies or [None] * len(pairs)
    return tuple(
        Point(10 * t, float(t), 1.5 * t, loss, accuracy)
        for t, (loss, accuracy) in enumerate(zip(pairs, accuracies, strict=True))
    )


def outcome(*losses, accuracies=None, died=""):
    points = curve(*losses, accuracies=accuracies)
    return Outcome(points[-1].step, points[-1].cpu, points[-1].wall, points, died)


@pytest.mark.parametrize(
    ("level", "moment"),
    [
        (8, Moment(0, 0)),  # the initial model
        (9, Moment(0, 0)),
        (6, Moment(0.5, 5)),  # half-way between 8 and 4
        (4, Moment(1, 10)),
        # The loss 6 after 2 s does not count: the line leads from 4 after 2 s to 2 after 3 s.
        (3, Moment(2.5, 25)),
        (2, Moment(3, 30)),
        (1.9, Moment(inf, inf)),
    ],
)
def test_the_moment_of_a_level_is_interpolated_on_the_best_loss_so_far(level, moment):
    assert reached(curve(8, 4, 6, 2, 5), level) == moment


def runs(method, seconds, outcomes, rate=None):
    return {
        Run("mlp", method, rate, "tail", seed, seconds): result
        for seed, result in enumerate(outcomes)
    }


ADAM, KFAC, SHORT = Group("mlp", "adam", 4.0), Group("mlp", "kfac", 4.0), Group("mlp", "kfac", 2.0)
RESULTS = {
    ADAM: runs(
        "adam", 4.0,
        [
            outcome(8, 6, 5, 4, 4.5, accuracies=[0, 0.1, 0.2, 0.8, 0.7]),
            outcome(8, 6, 5, 4.5, 3, accuracies=[0, 0.1, 0.2, 0.3, 0.9]),
            outcome(8, 6, 5, 7, 7, accuracies=[0, 0.1, 0.2, 0.3, 0.4]),
        ],
        rate=0.001,
    ),
    KFAC: runs(
        "kfac", 4.0,
        [
            outcome(8, 6, 2, 2, 2, accuracies=[0, 0.1, 0.9, 0.9, 0.9]),
            outcome(8, 4, 3, 2, 1, accuracies=[0, 0.1, 0.2, 0.3, 0.95]),
            outcome(8, 5, 5, 5, 5, accuracies=[0, 0.1, 0.2, 0.3, 0.4]),
        ],
    ),
    SHORT: runs("kfac", 2.0, [outcome(8, 5, 4.5), outcome(8, 3, 2), outcome(8, 5, 5)]),
}  # fmt: skip


def test_a_row_has_medians_over_the_seeds():
    row = group_row(ADAM, RESULTS[ADAM])
    assert row.losses == (4, 3, 5)
    assert (row.loss, row.accuracy) == (4, 0.8)
    assert (row.setting, row.seeds, row.steps, row.died) == ("0.001 tail", 3, 40, 0)
    assert row.milliseconds == 100
    # The last loss divided by the lowest one: 4.5 / 4, 3 / 3 and 7 / 5.
    assert row.rise == 1.4


def test_a_comparison_has_the_quickest_budget_and_its_quotients():
    (row,) = compare(RESULTS)
    # Adam's median of 4, 3 and 5; it reaches its lowest losses after 3, 4 and 2 s.
    assert (row.rival, row.rival_seconds, row.level) == ("adam", 4.0, 4)
    # K-FAC reaches 4 after 1.5 and 1 s and never (median 1.5) with 4 s; with 2 s, the first seed
    # does not reach it either.
    assert (row.method, row.budget) == ("kfac", 4.0)
    assert (row.seconds, row.seconds_ratio) == (1.5, 0.5)
    assert (row.steps, row.steps_ratio) == (15, 0.5)
    # Medians at 4 s: the losses 2 and 4, the accuracies 0.9 and 0.8.
    assert row.loss_ratio == 0.5
    assert row.accuracy_gain == pytest.approx(10)


def test_a_level_that_most_seeds_do_not_reach_has_no_time():
    (row,) = compare({ADAM: RESULTS[ADAM], SHORT: RESULTS[SHORT]})
    assert row.seconds is None is row.seconds_ratio
    assert row.steps is None is row.steps_ratio
    assert row.loss_ratio is None is row.accuracy_gain


def test_runs_of_equal_steps_are_compared_with_each_other():
    """A wine run of 300 steps; the variant of Muon with the best loss names its options."""
    steps = [Group("wine", method, 0.0, 300) for method in ("kfac", "adam")]
    timed = [Group("wine", method, 1.0) for method in ("kfac", "adam")]
    losses = dict(zip([*steps, *timed], (1.0, 4.0, 2.0, 3.0), strict=True))
    results = {
        group: {Run("wine", group.method, None, "tail", 0, group.seconds, group.budget_steps):
                outcome(8, loss)}
        for group, loss in losses.items()
    }  # fmt: skip
    assert {(row.rival_steps, row.loss_ratio) for row in compare(results)} == {
        (300, 1 / 4), (0, 2 / 3),
    }  # fmt: skip
    muon = Group("llama", "muon", 1.0)
    runs = {Run("llama", "muon:adam_rate=0.001", 0.02, "tail", 0, 1.0): outcome(8, 1)}
    assert group_row(muon, runs).setting == "0.02 tail adam_rate=0.001"
