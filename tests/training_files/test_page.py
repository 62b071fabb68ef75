"""The examples of the page on training files run."""

import contextlib
from pathlib import Path

from tests.pages import blocks

ROOT = Path(__file__).resolve().parent.parent.parent


def test_examples_run_in_order(tmp_path):
    names = {}
    examples = blocks(ROOT / "docs" / "training_files.md", "python")
    assert len(examples) == 4
    with contextlib.chdir(tmp_path):
        for _, code in examples:
            exec(compile(code, "training_files.md", "exec"), names)
    assert names["accuracy"] > 0.85
    assert (tmp_path / "trained.onnx").exists()
    assert names["longer"].losses[-1] < 0.5
