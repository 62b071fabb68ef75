"""The tables of the page on pruning are those of the measurements."""

from pathlib import Path

import pytest

from scripts import draw_pruning
from scripts.measure_pruning import RESULTS, Pruned, read_results

PAGE = Path(__file__).resolve().parents[3] / "docs" / "pruning.md"


def test_tables_of_the_page_are_those_of_the_measurements():
    text, entries = PAGE.read_text(encoding="utf-8"), read_results(RESULTS, Pruned)
    tables = draw_pruning.tables(entries).strip().split("\n\n")
    assert len(tables) == 4
    assert all(table in text for table in tables)
    for data in draw_pruning.PANELS:
        assert len(draw_pruning.accuracies(entries, data, "none", 0.0)) == 3


def test_picture_has_the_medians_of_the_seeds():
    pytest.importorskip("matplotlib")
    entries = read_results(RESULTS, Pruned)
    figure = draw_pruning.draw(entries)
    for axes, data in zip(figure.axes, draw_pruning.PANELS, strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        for method in draw_pruning.METHODS:
            places = dict(zip(lines[method].get_xdata(), lines[method].get_ydata(), strict=True))
            accuracies = sorted(draw_pruning.accuracies(entries, data, method, 0.9))
            assert places[90.0] == accuracies[1]
