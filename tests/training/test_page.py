"""The examples of the page on training run, and their assertions hold."""

import re
from pathlib import Path


def test_the_examples_of_the_page_on_training_run(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[2] / "docs" / "training.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    examples = [block for block in blocks if "ke.fit(" in block]
    assert len(examples) >= 2
    for example in examples:
        exec(compile(example, "training.md", "exec"), {})
    assert (tmp_path / "trained.onnx").exists()
