"""The tutorial: every command and example runs in order, and prints the numbers of the page."""

import re
from pathlib import Path

import pytest

from tests.pages import execute

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
# BLAS kernels sum in different orders, which moved the validation loss by 1e-6 among three kernels.
# The run has one seed and ends after 45 steps: eight seeds gave 0.06 to 0.24. A change of the order
# of operations in an optimizer is another such draw, and then the page gets the new numbers.
LOSS = {"rel": 0.1}
ACCURACY = {"abs": 0.011}  # three of 300 examples


def numbers(text):
    return {name: float(value) for name, value in re.findall(r"^(\w+) ([\d.]+)$", text, re.M)}


@pytest.mark.rounding
def test_the_tutorial_runs_in_order_and_prints_its_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = []
    execute(PAGE, "python", "console", shown=lambda *texts: pairs.append(map(numbers, texts)))
    assert len(pairs) == 2
    for printed, expected in pairs:
        assert expected.keys() == printed.keys()
        assert printed["validation_loss"] == pytest.approx(expected["validation_loss"], **LOSS)
        assert printed["accuracy"] == pytest.approx(expected["accuracy"], **ACCURACY)
