"""The examples and commands of pages run in order, and their asserts hold."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from scripts.site_hooks import requirement
from tests.pages import all_blocks, blocks
from tests.test_docs import execute as execute_with_commands
from tests.test_tutorials import execute

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["change_a_file", "recognise"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::kfac_engine.errors.InferenceFormWarning")
@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_the_page_run_in_order(name, tmp_path):
    page = DOCS / f"{name}.md"
    missing = requirement(page.read_text(encoding="utf-8"))
    if missing:
        pytest.skip(f"{missing} is not installed")
    execute(page, tmp_path)


def test_each_page_that_the_site_executes_has_a_case():
    executed = {
        page.stem
        for page in DOCS.glob("*.md")
        if any('exec="on"' in block.options for block in all_blocks(page))
    }
    assert executed == set(PAGES)


def pruned():
    graph = onnx.load("sparse.onnx").graph
    (weight,) = (t for t in graph.initializer if t.name == "dense1.weight")
    groups = onnx.numpy_helper.to_array(weight).reshape(-1, 4)
    return ((groups == 0).sum(axis=1) == 2).all()


# What is so when the examples and the commands of a page have run.
RESULTS = {
    "curvature": lambda: Path("spectra.html").exists(),
    "influence": lambda: np.load("scores.npz")["scores"].shape == (10, 1400),
    "laplace": lambda: (
        np.load("predictive.npz")["variance"].shape == (10, 10, 10)
        and "variance" in {entry.name for entry in onnx.load("uncertain.onnx").graph.output}
    ),
    "pruning": pruned,
}
NIGHTLY = {"influence", "laplace", "pruning"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] if n in NIGHTLY else []) for n in RESULTS],
)
def test_the_examples_and_commands_of_the_page_run_in_order(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = DOCS / f"{name}.md"
    execute_with_commands(page, capsys)
    assert RESULTS[name]()
    asserted = ["assert " in code for _, code in blocks(page, "python")]
    assert any(asserted)
    assert all(asserted) or name != "curvature"
