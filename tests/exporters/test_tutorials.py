"""The tutorials that need PyTorch run in order and print their numbers."""

import re
from pathlib import Path

import pytest

from tests.pages import execute

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/pytorch.md"
# Hundreds of steps amplify rounding: two numbers of threads changed the test losses by 0.6.
TOLERANCE = 1.5


def assert_shown(printed, shown):
    """The texts are equal up to the tolerance of numbers with a decimal point at their end."""
    number = re.compile(r"\d+\.\d+$", re.M)
    assert number.sub("#", printed) == number.sub("#", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    for measured, expected in pairs:
        assert float(measured) == pytest.approx(float(expected), abs=TOLERANCE)


@pytest.mark.quick
def test_pytorch_tutorial_prints_its_numbers_and_kfac_is_ahead_of_adam(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = execute(PAGE, "python", shown=assert_shown)
    final = {name: losses[-1] for name, (_, losses) in names["curves"].items()}
    assert final.pop("K-FAC") < min(final.values()) - 0.3
