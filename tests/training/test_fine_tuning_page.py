"""The examples of the pages on fine-tuning run, and print what the pages show."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.pages import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["change_a_file", "fine_tuning"])
def test_page_shows_numbers_that_its_example_prints(name, tmp_path, monkeypatch, capsys) -> None:
    page = DOCS / f"{name}.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for _, code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    printed = capsys.readouterr().out
    shown = "".join(text for _, text in blocks(page, "text") if "accuracy" in text)
    for pattern, tolerance in {r"([\d,]+) parameters": 0, r"(\d\.\d\d)": 0.04}.items():
        found, expected = (
            [float(number.replace(",", "")) for number in re.findall(pattern, text)]
            for text in (printed, shown)
        )
        # Rounding of a processor changes a few of the predicted digits.
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
