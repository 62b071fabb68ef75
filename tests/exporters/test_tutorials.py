"""The tutorials that need PyTorch run in order and print their numbers."""

import contextlib
import re
from pathlib import Path

import pytest

from tests.pages import blocks

TUTORIALS = Path(__file__).resolve().parents[2] / "docs/tutorials"
# Hundreds of steps amplify rounding: two numbers of threads changed the test losses by 0.6.
TOLERANCE = 1.5


def execute(page, folder, capsys):
    """Execute a page, compare what it prints with what it shows; returns its names."""
    names = {}
    printed = ""
    with contextlib.chdir(folder):
        for language, code in blocks(page, "python", "text"):
            if language == "python":
                exec(compile(code, page.name, "exec"), names)
                printed = capsys.readouterr().out
            else:
                assert_shown(printed, code)
    return names


def assert_shown(printed, shown):
    """The texts are equal up to the tolerance of numbers with a decimal point at their end."""
    number = re.compile(r"\d+\.\d+$", re.M)
    assert number.sub("#", printed) == number.sub("#", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    for measured, expected in pairs:
        assert float(measured) == pytest.approx(float(expected), abs=TOLERANCE)


@pytest.mark.quick
def test_pytorch_tutorial_prints_its_numbers_and_kfac_is_ahead_of_adam(tmp_path, capsys):
    names = execute(TUTORIALS / "pytorch.md", tmp_path, capsys)
    final = {name: losses[-1] for name, (_, losses) in names["curves"].items()}
    assert final.pop("K-FAC") < min(final.values()) - 0.3
