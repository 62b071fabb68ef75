"""The tables of measurements are those that the script makes of the JSON files."""

import json

import pytest

from kfac_engine.bench import contenders, jobs
from scripts import bench_goals, bench_tables

REPORTS = sorted(bench_tables.RESULTS.glob("*.json"))


def test_there_are_measurements():
    assert REPORTS


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_pages_are_made_of_their_reports(path):
    expected = bench_tables.page(bench_tables.load(path))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == expected


def test_the_readme_shows_the_newest_measurements():
    text = bench_tables.README.read_text(encoding="utf-8")
    assert bench_tables.readme(text) == text


def test_the_page_about_performance_shows_the_newest_measurements():
    text = bench_tables.PERFORMANCE.read_text(encoding="utf-8")
    assert bench_tables.performance(text) == text


def report_of(times):
    """Suites whose rows are ``{(suite, case): {contender: seconds}}``."""
    suites = {}
    for (suite, case), found in times.items():
        for who, seconds in found.items():
            row = {"case": case, "contender": who, "seconds": {"median": seconds}}
            suites.setdefault(suite, []).append({**row, "peak_bytes": 40e6})
    return suites


GOALS = {
    "one peer, reached": (
        {("dense", "256 rows of 1024"): {"definition": 9.0, "ours": 1.0, "torch": 2.0}},
        "| dense: 256 rows of 1024 | torch | 0.60 | 0.50 |",
    ),
    "one peer, missed": (
        {("inverse", "512 × 512"): {"definition": 2.0, "ours": 1.0}},
        "| inverse: 512 × 512 | definition | 0.40 | **0.50** |",
    ),
    "the best of many": (
        {("step", "mlp, batch 512, factors 1, inverses 10"): {"ours": 3.0, "torch": 4, "jax": 5}},
        "| step: mlp, batch 512, factors 1, inverses 10 | the best peer | 0.80 | 0.75 |",
    ),
    "the plain gradient": (
        {
            ("step", "mlp, batch 512, gradient"): {"ours": 1.0},
            ("step", "mlp, batch 512, factors 10, inverses 100"): {"ours": 1.2},
        },
        "| step: mlp, batch 512, factors 10, inverses 100 | its plain gradient | 1.30 | 1.20 |",
    ),
    "scratch memory": (
        {("conv", "32×512×7×7, 3×3, stride 1"): {"ours": 1.0}},
        "| conv: 32×512×7×7, 3×3, stride 1 | MB of scratch | 32.00 | **40.00** |",
    ),
}


@pytest.mark.parametrize(("times", "line"), GOALS.values(), ids=GOALS)
def test_goals_stand_beside_what_was_found(times, line):
    assert line in list(bench_goals.table(report_of(times)))


def test_every_goal_is_about_a_case_that_is_measured():
    for goal in bench_goals.GOALS:
        assert any(goal.case in job.name for job in jobs.SUITES[goal.suite]), goal
        assert goal.other in {*contenders.CONTENDERS, bench_goals.BEST}, goal


def row(contender, milliseconds, ratio, others=0.0):
    seconds = dict.fromkeys(("median", "low", "high"), milliseconds / 1e3)
    return {
        "case": "4096 rows of 1024", "contender": contender, "seconds": seconds, "ratio": ratio,
        "cpu_seconds": milliseconds / 500, "errors": {"result": 0.0}, "rate": 1e9, "fraction": 0.5,
        "peak_bytes": 0, "others": others, "switches": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("others", "told"), [(0.0, "5.0"), (0.5, "10.0 !")])
def test_the_readme_tells_wall_times_if_nobody_disturbed_them(tmp_path, monkeypatch, others, told):
    machine = {
        "processor": "P",
        "cores": 2,
        "threads": 2,
        "blas": [{"kernel": "Zen"}],
        "packages": {},
    }
    rows = [row("definition", 20, 0.25), row("ours", 5, 1, others)]
    report = {"machine": machine, "suites": {"dense": rows}}
    (tmp_path / "day-cpu.json").write_text(json.dumps(report))
    monkeypatch.setattr(bench_tables, "RESULTS", tmp_path)
    text = bench_tables.readme(f"before {bench_tables.BEGIN} old {bench_tables.END} after")
    assert f"| dense: 4096 rows of 1024 | {told} | definition 4.0 |" in text
    assert "old" not in text
    assert text.startswith("before ")
    assert text.endswith(" after")
