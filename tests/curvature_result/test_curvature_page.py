"""The examples of the page on curvature run in order and their asserts hold."""

from pathlib import Path

from tests.test_docs import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "curvature.md"


def test_examples_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    examples = blocks(PAGE, "python")
    assert len(examples) >= 3
    for _, code in examples:
        assert "assert " in code
        exec(compile(code, PAGE.name, "exec"), names)
