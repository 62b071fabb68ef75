"""The Markdown tables of the suite ``train``."""

import json

from scripts import bench_tables, training_tables

RESULT = {
    "task": "mlp", "method": "adam", "setting": "0.001 tail", "seconds": 16.0, "seeds": 3,
    "steps": 1790.0, "milliseconds": 8.94, "loss": 0.28591, "losses": [0.28591, 0.2866, 0.28],
    "accuracy": 0.89491, "died": 1,
}  # fmt: skip
REACHED = {
    "task": "mlp", "rival": "adam", "rival_seconds": 16.0, "level": 0.28591, "method": "kfac",
    "budget": 5.0, "seconds": 4.02, "seconds_ratio": 0.2513, "steps": 212.4, "steps_ratio": 0.1187,
    "loss_ratio": 0.93, "accuracy_gain": 0.514,
}  # fmt: skip
MISSED = {
    **REACHED, "rival": "muon", "method": "kfac:damping=0.1", "seconds": None,
    "seconds_ratio": None, "steps": None, "steps_ratio": None, "loss_ratio": None,
    "accuracy_gain": None,
}  # fmt: skip
REPORT = {
    "machine": {
        "processor": "abacus", "cores": 2, "threads": 1, "blas": [{"kernel": "Haswell"}],
        "packages": {"numpy": "2.4"},
    },
    "suites": {"train": [RESULT, REACHED, MISSED]},
}  # fmt: skip


def test_a_report_of_training_has_a_table_of_losses_and_one_of_comparisons():
    page = bench_tables.page(REPORT)
    assert (
        "| mlp | adam | 0.001 tail | 16 s | 1790 | 8.9 | 0.2859 | 0.2859, 0.2866, 0.28 |  "
        "| 89.49% | 1 |"
    ) in page
    assert "| mlp | adam, 16 s | 0.2859 | 4.0 | 0.25 | 212 | 0.12 | 0.930 | +0.51 |" in page
    heads = [line for line in page.splitlines() if line.startswith("| task")]
    assert len(heads) == 2


def test_the_page_about_performance_shows_the_newest_comparisons(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_tables, "RESULTS", tmp_path)
    marks = "before\n<!-- training: begin -->\nold\n<!-- training: end -->\nafter\n"
    assert bench_tables.with_sections(marks) == marks
    for day, report in (("01", {"suites": {"train": []}}), ("02", REPORT)):
        (tmp_path / f"2026-01-{day}-train.json").write_text(json.dumps(report))
    lines = bench_tables.with_sections(marks).splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    rows = [line for line in lines if line.startswith("|")][2:]
    # The task is named once; a variant of K-FAC is named beside the rival.
    assert rows == [
        "| mlp | adam, 16 s | 0.2859 | 4.0 | 0.25 | 212 | 0.12 | 0.930 | +0.51 |",
        "|  | muon, 16 s (kfac:damping=0.1) | 0.2859 | not reached |  |  |  |  |  |",
    ]
    assert "From [2026-01-02-train]" in lines[-3]
    assert "abacus, 2 cores, BLAS kernel Haswell, numpy 2.4." in lines[-3]


def test_quotients_of_a_collection_have_a_column_for_each_rival_and_budget():
    def rows(task, steps, quotient, rise):
        ours = {**RESULT, "task": task, "method": "kfac", "budget_steps": steps, "rise": rise}
        beside = {**REACHED, "task": task, "rival_steps": steps, "loss_ratio": quotient}
        return [ours, beside]

    chosen = [("a", 0, 0.5, 1.0), ("a", 300, 1.5, 1.25), ("b", 0, 2.0, 1.5), ("b", 300, 1.5, 1.0)]
    report = [row for arguments in chosen for row in rows(*arguments)]
    assert training_tables.quotients(report) == [
        "| task | steps | loss | ÷ adam, equal time | ÷ adam, 300 steps "
        "| last ÷ lowest, equal time | last ÷ lowest, 300 steps |",
        "|---|---|---|---|---|---|---|",
        "| a | 1790 | 0.2859 | 0.500 | 1.500 | 1.00 | 1.25 |",
        "| b | 1790 | 0.2859 | 2.000 | 1.500 | 1.50 | 1.00 |",
        "| geometric mean |  |  | 1.000 | 1.500 |  |  |",
    ]
