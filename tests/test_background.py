"""The page on K-FAC: its program runs, its numbers are those of the picture."""

import re
from pathlib import Path

import numpy as np
import pytest

from scripts import draw_fisher

PAGE = (Path(__file__).resolve().parent.parent / "docs/background.md").read_text(encoding="utf-8")


def test_program_of_the_page_equals_a_step_of_the_engine():
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert "assert_allclose(result.natural_gradients[" in program  # the comparison is in the page
    exec(compile(program, "background.md", "exec"), {})


@pytest.fixture(scope="module")
def network():
    a, labels = draw_fisher.inputs()
    return draw_fisher.trained(a, labels), a, labels


def test_numbers_of_the_page_are_those_of_the_picture(network):
    weights, a, _ = network
    drawn = draw_fisher.matrices(weights, a)
    norm = np.linalg.norm
    share, error = norm(drawn.blocks) / norm(drawn.fisher), norm(drawn.blocks - drawn.kronecker)
    assert f"{len(drawn.fisher)} parameters" in PAGE
    assert f"blocks have {share:.0%} of the norm".replace("%", " %") in PAGE.replace("\n", " ")
    assert f"by {error / norm(drawn.blocks):.0%} of".replace("%", " %") in PAGE.replace("\n", " ")
