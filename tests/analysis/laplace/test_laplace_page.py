"""The examples and commands of the page on uncertainty run; its table is that of the results."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from scripts import draw_uncertainty
from scripts.measure_pruning import read_results
from scripts.measure_uncertainty import RESULTS, Predicted
from tests.test_docs import execute

PAGE = Path(__file__).resolve().parents[3] / "docs" / "laplace.md"


@pytest.mark.nightly
def test_examples_and_commands_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    execute(PAGE, capsys)
    assert np.load("predictive.npz")["variance"].shape == (10, 10, 10)
    assert "variance" in {entry.name for entry in onnx.load("uncertain.onnx").graph.output}


def test_table_of_the_page_is_that_of_the_measurements():
    entries = read_results(RESULTS, Predicted)
    assert "\n".join(draw_uncertainty.table(entries)) in PAGE.read_text(encoding="utf-8")
    for data in {entry.data for entry in entries}:
        by_method = {
            method: [e.auroc for e in entries if (e.data, e.method) == (data, method)]
            for method in ("model alone", "posterior of all layers", "posterior of the last layer")
        }
        alone, of_all, of_last = by_method.values()
        assert len(alone) == len(of_all) == len(of_last) == 3
        # What the page says of the table.
        assert all(a < last < more for a, last, more in zip(alone, of_last, of_all, strict=True))
