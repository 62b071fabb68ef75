"""The examples and commands of the page on influence run in order and their asserts hold."""

from pathlib import Path

import numpy as np
import pytest

from tests.test_docs import execute

PAGE = Path(__file__).resolve().parents[3] / "docs" / "influence.md"


@pytest.mark.nightly
def test_examples_and_commands_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    execute(PAGE, capsys)
    assert np.load("scores.npz")["scores"].shape == (10, 1400)
