"""The examples of the page on pruning run in order and hold."""

import contextlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pruning.md"


@pytest.mark.slow
def test_examples_of_the_page_run_in_order(tmp_path):
    names = {}
    with contextlib.chdir(tmp_path):
        for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S):
            exec(compile(code, PAGE.name, "exec"), names)
    assert (tmp_path / "pruned.onnx").exists()
