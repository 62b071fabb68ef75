"""The tables of measurements are those that the script makes of the JSON files."""

import json

import pytest

from kfac_engine.bench import contenders, jobs
from kfac_engine.bench.contender import INFLUENCE_USES, LAPLACE_USES
from scripts import bench_goals, bench_tables, uses_tables

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


def test_the_page_of_goals_shows_the_newest_measurements():
    assert bench_tables.GOALS.read_text(encoding="utf-8") == bench_tables.goals()


def report_of(times):
    """Suites whose rows are ``{(suite, case): {contender: seconds}}``."""
    suites = {}
    for (suite, case), found in times.items():
        for who, seconds in found.items():
            row = {"case": case, "contender": who, "seconds": {"median": seconds}}
            suites.setdefault(suite, []).append({**row, "peak_bytes": 40e6})
    return suites


SELDOM = "mlp, batch 512, factors 10, inverses 100"
AXIS = {"axis": "batch", "expected": 1, "memory_expected": 0, "exponent": 1.1}
GOALS = {
    "one peer, reached": (
        report_of({("dense", "256 rows of 1024"): {"definition": 9.0, "ours": 1.0, "torch": 2.0}}),
        "| dense: 256 rows of 1024 | torch | 0.60 | 0.50 |",
    ),
    "one peer, missed": (
        report_of({("inverse", "512 × 512"): {"definition": 2.0, "ours": 1.0}}),
        "| inverse: 512 × 512 | definition | 0.40 | **0.50** |",
    ),
    "the best of many": (
        report_of(
            {
                ("step", "mlp, batch 512, factors 1, inverses 10"): {
                    "ours": 3.0, "ours-gradient": 1.0, "torch": 4, "jax": 5, "torch-by-example": 2,
                }
            }
        ),
        "| step: mlp, batch 512, factors 1, inverses 10 | the best library | 0.80 | 0.75 |",
    ),
    "the plain gradient": (
        report_of({("step", SELDOM): {"ours": 1.2, "ours-gradient": 1.0, "torch": 0.1}}),
        f"| step: {SELDOM} | ours-gradient | 1.30 | 1.20 |",
    ),
    "CPU time of one thread": (
        {"uses": [
            {"case": "scores, mlp", "contender": who, "seconds": {"median": 7.0},
             "cpu_seconds": seconds}
            for who, seconds in (("ours", 1.0), ("kronfluence", 0.8))
        ]},
        "| uses: scores, mlp | kronfluence, CPU time | 1.00 | **1.25** |",
    ),
    "scratch memory": (
        report_of({("conv", "32×512×7×7, 3×3, stride 1"): {"ours": 1.0}}),
        "| conv: 32×512×7×7, 3×3, stride 1 | temporary memory, MB | 32.00 | **40.00** |",
    ),
    "announced memory": (
        {"memory": [{"case": "mlp, batch 32, exact", "announced": 200, "measured": 150}]},
        "| memory: mlp, batch 32, exact | announced memory | 1.00 | 0.75 |",
    ),
    "growth of time": (
        {"scaling": [{**AXIS, "memory_exponent": 0.5}] * 2},
        "| scaling: batch | exponent of time | 1.15 | 1.10 |",
    ),
    "growth of memory": (
        {"scaling": [{**AXIS, "memory_exponent": 0.5}] * 2},
        "| scaling: batch | exponent of memory | 0.15 | **0.50** |",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("suites", "line"), GOALS.values(), ids=GOALS)
def test_a_goal_is_in_the_short_table_only_if_it_is_missed(suites, line):
    assert list(bench_goals.table(suites, missed=True)).count(line) == ("**" in line)


@pytest.mark.parametrize(("suites", "line"), GOALS.values(), ids=GOALS)
def test_goals_stand_beside_what_was_found(suites, line):
    assert list(bench_goals.table(suites)).count(line) == 1


def test_an_older_kernel_has_a_column_beside():
    case = ("dense", "256 rows of 1024")
    newer, older = (report_of({case: {"ours": 1.0, "torch": t}}) for t in (2.0, 1.0))
    first, _, heads, _, line = bench_goals.table(newer, older)
    assert first == "1 of 1 goals are met."
    assert heads == "| case | compared with | at most | measured | older kernel |"
    assert line == "| dense: 256 rows of 1024 | torch | 0.60 | 0.50 | **1.00** |"


def test_table_of_uses_has_the_quotients_of_cpu_time():
    def use(contender, seconds, megabytes):
        return {"case": "scores, mlp", "contender": contender, "cpu_seconds": seconds,
                "peak_bytes": 1e6 * megabytes, "seconds": {"median": 9.0}}  # fmt: skip

    suites = {"uses": [use("ours", 0.3, 20), use("kronfluence", 0.2, 10), use("other", 3.0, 90)]}
    assert list(uses_tables.section(suites))[2:] == [
        "| scores, mlp | 300 | kronfluence | 200 | 1.500 | 20 | 10 |",
        "| scores, mlp | 300 | other | 3000 | 0.100 | 20 | 90 |",
        "",
        "0 of 1 goals are met.",
        "",
        "| case | compared with | at most | measured |",
        "|---|---|---|---|",
        "| uses: scores, mlp | kronfluence, CPU time | 1.00 | **1.50** |",
    ]


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


STEP = "mlp, batch 512, factors 1, inverses 10"


def row(contender, milliseconds, case="4096 rows of 1024", others=0.0):
    seconds = dict.fromkeys(("median", "low", "high"), milliseconds / 1e3)
    return {
        "case": case, "contender": contender, "seconds": seconds, "ratio": 1.0, "runs": 3,
        "cpu_seconds": milliseconds / 500, "errors": {"result": 0.0}, "rate": 1e9, "fraction": 0.5,
        "peak_bytes": 0, "others": others, "switches": 0.0,
    }  # fmt: skip


def machine(cores=2):
    blas = [{"kernel": "Zen"}]
    return {"processor": "P", "cores": cores, "threads": 2, "blas": blas, "packages": {}}


def ceiling(rate):
    return {"threads": 2, "multiplications": rate, "copied_bytes": 1e9}


def course(before, best=1e11):
    rates = {"before": ceiling(before), "after": ceiling(best), "best": ceiling(best)}
    return {"seconds": 60.0, "missing": [], **rates}


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Gives the README's part about a report."""
    monkeypatch.setattr(bench_tables, "RESULTS", tmp_path)

    def show(rows, courses):
        report = {"machine": machine(), "suites": {"step": rows}, "course": courses}
        (tmp_path / "day-cpu.json").write_text(json.dumps(report))
        return bench_tables.readme(
            "before <!-- measurements: begin --> old <!-- measurements: end --> after"
        )

    return show


@pytest.mark.parametrize(("others", "told"), [(0.0, "5.00"), (0.5, "5.00 !")])
def test_readme_compares_with_the_fastest_implementation_of_each_library(shown, others, told):
    rows = [
        row("definition", 20, STEP), row("ours", 5, STEP, others), row("torch", 12, STEP),
        row("jax", 4, STEP), row("definition", 30, "another"), row("ours", 10, "another"),
    ]  # fmt: skip
    text = shown(rows, {})
    assert f"| MLP 784-1024-512-256-10, batch 512 | {told} | 2.4 × | 0.8 × |" in text
    assert "Faster than all others: 1 of 2 cases;" in text
    assert f"range from 0.80 × (step, {STEP}: *jax*)" in text
    assert "to 3.0 × (step, another: *definition*)" in text
    assert ("other processes ran" in text) == bool(others)
    assert "Training" not in text  # there are no measurements of training in the folder
    assert "old" not in text
    assert text.startswith("before ")
    assert text.endswith(" after")


@pytest.mark.parametrize(("before", "told"), [(1e11, False), (7e10, True)])
def test_a_host_that_slowed_the_machine_down_is_told(shown, before, told):
    text = shown([row("definition", 20), row("ours", 5)], {"dense": course(before)})
    assert ("The host slowed the machine down during dense" in text) == told


def test_readme_has_the_comparison_of_training_with_the_longest_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_tables, "RESULTS", tmp_path)
    comparisons = [
        {"task": task, "rival": "adam", "rival_seconds": seconds, "seconds": 0.6 * seconds,
         "seconds_ratio": ratio}
        for task in ("autoencoder", "resnet", "transformer")
        for seconds, ratio in ((15.0, 0.5), (30.0, 0.75))
    ]  # fmt: skip
    report = {"suites": {"train": [{"task": "resnet", "losses": [1.0]}, *comparisons]}}
    (tmp_path / "day-train.json").write_text(json.dumps(report))
    assert "| ResNet, Fashion-MNIST | 24.0 s | 18.0 s | 0.75 |" in bench_tables._training_summary()


FORMS = {
    "comparison": (row("ours", 5), "| 4096 rows of 1024 | ours | 5.00 | 5.00 – 5.00 | 3 | 10.0 |"),
    "memory": (
        {"case": "mlp", "announced": 2e8, "measured": 15e7}, "| mlp | 200 | 150 | 0.75 |",
    ),
    "growth": (
        {**AXIS, "size": 64, "seconds": row("ours", 5)["seconds"], "peak_bytes": 3e6,
         "memory_exponent": 0.5},
        "| batch | 64 | 5.00 | 5.00 – 5.00 | 3 | size^1.10, at most 1 | size^0.50, at most 0 ! |",
    ),
    "build": (
        {"network": "bert", "stage": "read the file", "seconds": row("ours", 5)["seconds"]},
        "| bert | read the file | 5.00 | 5.00 – 5.00 |",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("found", "line"), FORMS.values(), ids=FORMS)
def test_rows_of_each_suite_are_told_in_words_and_numbers(found, line):
    suites = {"one": [found]}
    page = bench_tables.page(
        {"machine": machine(), "suites": suites, "course": {"one": course(5e10)}}
    )
    assert line in page
    assert "Took 60 s. Ceiling before it 100 GFLOP/s (sgemm), 1.0 GB/s (copy), after it 200" in page


def test_rows_of_two_kinds_in_one_suite_have_two_tables():
    rows = [found for found, _ in (FORMS["build"], FORMS["growth"])]
    lines = bench_tables.page({"machine": machine(), "suites": {"build": rows}}).splitlines()
    start = lines.index("| network | stage | ms | quartiles |")
    assert lines[start + 2 : start + 4] == [FORMS["build"][1], ""]
    assert lines[start + 4].startswith("| axis | size | ms |")
    assert lines[start + 6 :] == [FORMS["growth"][1]]


def test_suites_of_a_report_without_courses_have_tables():
    page = bench_tables.page({"machine": machine(), "suites": {"dense": [row("ours", 5)]}})
    assert "## dense" in page
    assert "Took" not in page
