"""The examples of the page on training run, and their assertions hold."""

from pathlib import Path

import pytest

from tests.pages import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
EXAMPLES: list[str] = []
for _, block in blocks(PAGE, "python"):
    if "ke.fit(" in block:  # a block without imports continues the last example
        EXAMPLES.append(block if "import kfac_engine" in block else EXAMPLES[-1] + block)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_on_training_runs(number, tmp_path, monkeypatch):
    example = EXAMPLES[number]
    if "TensorBoard" in example:
        pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "training.md", "exec"), {})
    if "trained.onnx" in example:
        assert (tmp_path / "trained.onnx").exists()


def test_the_page_has_examples():
    assert len(EXAMPLES) >= 8
    assert any("trained.onnx" in example for example in EXAMPLES)
