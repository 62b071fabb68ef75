"""The tables of measurements are those that the script makes of the JSON files."""

import json

import pytest

from scripts import bench_tables

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
