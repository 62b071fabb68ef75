"""The examples of the page on fine-tuning run, and print what the page shows."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.pages import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fine_tuning.md"


@pytest.mark.rounding
def test_page_shows_numbers_that_its_example_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for _, code in blocks(PAGE, "python"):
        exec(compile(code, PAGE.name, "exec"), names)
    printed = capsys.readouterr().out
    shown = "".join(text for _, text in blocks(PAGE, "text") if "accuracy" in text)
    for pattern, tolerance in {r"([\d,]+) parameters": 0, r"(\d\.\d\d)": 0.04}.items():
        found, expected = (
            [float(number.replace(",", "")) for number in re.findall(pattern, text)]
            for text in (printed, shown)
        )
        # Rounding of a processor changes a few of the predicted digits.
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
