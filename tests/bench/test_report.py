"""Tables of measurements are readable on narrow terminals."""

import pytest
from rich.console import Console

from kfac_engine.bench.measure import Row
from kfac_engine.bench.report import milliseconds, restored
from kfac_engine.bench.suite_table import COLUMNS, SuiteTable
from scripts import bench_tables

REPORT = bench_tables.load(max(bench_tables.RESULTS.glob(bench_tables.NEWEST)))


def console(width):
    return Console(width=width, highlight=False, markup=False)


def print_suite(console, name, rows):
    """Print the table of a suite that is measured already; the rows of one job are adjacent."""
    table = SuiteTable(console, name, {row.contender for row in rows})
    table.start()
    for case in dict.fromkeys(row.case for row in rows):
        table.case(case)
        table.rows([row for row in rows if row.case == case])
    table.end()


@pytest.mark.parametrize("suite", ["conv", "step", "precondition"])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_comparison_has_whole_cases_contenders_and_times(suite, width, capsys):
    rows = restored(Row, REPORT["suites"][suite])
    print_suite(console(width), suite, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for case in {row.case for row in rows}:
        assert f"  {case}" in lines
    for row in rows:
        number = milliseconds(row.seconds.median)
        assert any(line.split()[:2] == [row.contender, number] for line in lines if line.strip())
    assert "quartiles" in lines[1] or width < 160
    left_out = [line for line in lines if line.startswith("left out, for a wider terminal")]
    assert bool(left_out) == (width < 160)


def test_comparison_explains_each_of_its_columns(capsys):
    rows = restored(Row, REPORT["suites"]["inverse"])
    print_suite(console(160), "inverse", rows)
    _, heads, *lines = capsys.readouterr().out.splitlines()
    for column in COLUMNS:
        assert column.head in heads
        assert any(line.startswith(f"{column.head}: ") for line in lines)


@pytest.mark.parametrize("others", [0.0, 0.5])
def test_row_beside_other_processes_is_marked_and_explained(others, capsys):
    (entry,) = (
        row for row in REPORT["suites"]["inverse"]
        if (row["case"], row["contender"]) == ("64 × 64", "ours")
    )  # fmt: skip
    print_suite(console(80), "inverse", restored(Row, [{**entry, "others": others}]))
    text = capsys.readouterr().out
    assert ("! others 50%" in text) == bool(others)
    assert ("others: CPU time of other processes" in text) == bool(others)
