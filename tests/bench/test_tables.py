"""The tables of measurements are those that the script makes of the JSON files."""

import pytest

from kfac_engine.bench import contenders, jobs
from kfac_engine.bench.jobs import INFLUENCE_USES, LAPLACE_USES
from scripts import bench_goals, bench_tables

REPORTS = sorted(bench_tables.RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_pages_are_made_of_their_reports(path):
    expected = bench_tables.page(bench_tables.load(path))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == expected


def test_every_goal_is_about_a_case_that_is_measured():
    for goal in bench_goals.GOALS:
        assert any(goal.case in job.name for job in jobs.SUITES[goal.suite]), goal
        assert goal.other in {*contenders.CONTENDERS, bench_goals.BEST}, goal


def test_the_readme_shows_cases_and_contenders_that_there_are():
    for words, suite, part in bench_tables.SHOWN:
        assert sum(part in job.name for job in jobs.SUITES[suite]) == 1, words
    shown = {who for group in bench_tables.COLUMNS.values() for who in group}
    table, uses = contenders.CONTENDERS, LAPLACE_USES | INFLUENCE_USES
    assert shown == {name for name in contenders.PEERS if table[name].operations - uses}
