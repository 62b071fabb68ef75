"""Tables of measurements are readable on narrow terminals."""

import pytest
from rich.console import Console

from kfac_engine.bench.measure import Row
from kfac_engine.bench.report import print_suite, restored
from kfac_engine.bench.timing import milliseconds
from scripts import bench_tables

REPORT = bench_tables.load(max(bench_tables.RESULTS.glob(bench_tables.NEWEST)))


@pytest.mark.parametrize("suite", ["conv", "step", "precondition"])
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_cases_contenders_and_times_are_whole_at_every_width(suite, width, capsys):
    rows = restored(Row, REPORT["suites"][suite])
    print_suite(Console(width=width, highlight=False, markup=False), suite, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    words = set(" ".join(lines).split())
    for row in rows:
        assert {*row.case.split(), row.contender, milliseconds(row.seconds.median)} <= words
    assert ("quartiles" in lines[2]) == (width == 160)
    left_out = [line for line in lines if line.startswith("left out, for a wider terminal")]
    assert bool(left_out) == (width < 160)
