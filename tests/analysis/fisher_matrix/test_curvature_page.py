"""The examples and commands of the page on curvature run in order and their asserts hold."""

from pathlib import Path

from tests.test_docs import blocks, execute

PAGE = Path(__file__).resolve().parents[3] / "docs" / "curvature.md"


def test_examples_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    execute(PAGE, capsys)
    assert (tmp_path / "spectra.html").exists()
    assert all("assert " in code for _, code in blocks(PAGE, "python"))
