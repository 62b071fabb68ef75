"""The table of the page on uncertainty is that of the results."""

from pathlib import Path

from scripts import draw_uncertainty
from scripts.measure_pruning import read_results
from scripts.measure_uncertainty import RESULTS, Predicted

PAGE = Path(__file__).resolve().parents[3] / "docs" / "laplace.md"


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
