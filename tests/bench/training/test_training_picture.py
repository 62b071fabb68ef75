"""The curves of the README's picture end at losses that the table of the suite has."""

import json

import pytest

from scripts import bench_tables, draw_pictures


@pytest.mark.parametrize("task", draw_pictures.PANELS)
@pytest.mark.parametrize("method", draw_pictures.METHODS)
def test_curve_ends_at_a_loss_of_the_table(task, method):
    report = json.loads((bench_tables.RESULTS / "2026-11-27-train.json").read_text())
    rows = [row for row in report["suites"]["train"] if "losses" in row]
    final = draw_pictures.read_curve(task, method)[1][-1]
    tables = [row["losses"] for row in rows if (row["task"], row["method"]) == (task, method)]
    assert any(final == pytest.approx(losses[0], rel=1e-4) for losses in tables)
