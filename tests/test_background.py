"""The page on K-FAC: its program runs, its numbers are those of the picture."""

from pathlib import Path

import numpy as np
import pytest

from scripts import draw_fisher
from tests.pages import execute

PAGE = Path(__file__).resolve().parent.parent / "docs/background.md"
TEXT = PAGE.read_text(encoding="utf-8").replace("\n", " ")


def test_program_of_the_page_equals_a_step_of_the_engine():
    assert "assert_allclose(result.natural_gradients[" in TEXT  # the comparison is in the page
    execute(PAGE, "python")


@pytest.fixture(scope="module")
def network():
    a, labels = draw_fisher.inputs()
    return draw_fisher.trained(a, labels), a, labels


def test_numbers_of_the_page_are_those_of_the_picture(network):
    weights, a, _ = network
    drawn = draw_fisher.matrices(weights, a)
    norm = np.linalg.norm
    share, error = norm(drawn.blocks) / norm(drawn.fisher), norm(drawn.blocks - drawn.kronecker)
    assert f"{len(drawn.fisher)} parameters" in TEXT
    assert f"blocks have {share:.0%} of the norm".replace("%", " %") in TEXT
    assert f"by {error / norm(drawn.blocks):.0%} of".replace("%", " %") in TEXT
