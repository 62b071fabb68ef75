"""The examples and commands of pages run in order, and their asserts hold."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from scripts.site_hooks import requirement
from tests.pages import all_blocks, blocks, execute
from tests.test_tutorials import execute as execute_as_the_site

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
    execute_as_the_site(page, tmp_path)


def test_each_page_that_the_site_executes_has_a_case():
    executed = {
        page.stem
        for page in DOCS.glob("*.md")
        if any('exec="on"' in block.options for block in all_blocks(page))
    }
    assert executed == set(PAGES)


def printed_as_shown(page, printed, names):
    assert all(text in printed for _, text in blocks(page, "text"))


def pruned(page, printed, names):
    graph = onnx.load("sparse.onnx").graph
    (weight,) = (t for t in graph.initializer if t.name == "dense1.weight")
    groups = onnx.numpy_helper.to_array(weight).reshape(-1, 4)
    assert ((groups == 0).sum(axis=1) == 2).all()


def factors(page, printed, names):
    (shown,) = blocks(page, "text")
    # Sampled gradients have rounding errors of the processor; so has the damping in the last digit.
    assert printed.splitlines()[0][:60] == shown[1][:60]
    assert Path("conv3.png").stat().st_size > 10_000
    names["axes"].figure.clear()


def fine_tuned(page, printed, names):
    shown = "".join(text for _, text in blocks(page, "text") if "accuracy" in text)
    for pattern, tolerance in {r"([\d,]+) parameters": 0, r"(\d\.\d\d)": 0.04}.items():
        found, expected = (
            [float(number.replace(",", "")) for number in re.findall(pattern, text)]
            for text in (printed, shown)
        )
        # Rounding of a processor changes a few of the predicted digits.
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def uncertain(page, printed, names):
    assert np.load("predictive.npz")["variance"].shape == (10, 10, 10)
    assert "variance" in {entry.name for entry in onnx.load("uncertain.onnx").graph.output}


def trained(page, printed, names):
    assert names["accuracy"] > 0.85
    assert Path("trained.onnx").exists()
    assert names["longer"].losses[-1] < 0.5


def holds(condition):
    def check(page, printed, names):
        assert condition(printed)

    return check


# What is so when the examples and the commands of a page have run.
RESULTS = {
    "../README": holds(lambda printed: Path("trained.onnx").exists()),
    "building_blocks": holds(lambda printed: True),
    "curvature": holds(lambda printed: Path("spectra.html").exists()),
    "derivatives": printed_as_shown,
    "factors": factors,
    "fine_tuning": fine_tuned,
    "influence": holds(lambda printed: np.load("scores.npz")["scores"].shape == (10, 1400)),
    "input_gradients": printed_as_shown,
    "laplace": uncertain,
    "pruning": pruned,
    "training_files": trained,
    "verify": holds(lambda printed: printed.count("pass ") == 5),
}
MARKS = {
    "fine_tuning": "rounding",
    "influence": "nightly",
    "laplace": "nightly",
    "pruning": "nightly",
}
CASES = [
    pytest.param(name, marks=getattr(pytest.mark, MARKS[name]) if name in MARKS else ())
    for name in RESULTS
]


@pytest.mark.parametrize("name", CASES)
def test_the_examples_and_commands_of_the_page_run_in_order(name, tmp_path, monkeypatch, capsys):
    if name == "factors":
        pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    page = DOCS / f"{name}.md"
    examples = [code for _, code in blocks(page, "python")]
    assert len(examples) >= 2
    # The command of the page on verification reads files that the page does not make.
    names = execute(page, "python", *(["console"] if name != "verify" else []))
    RESULTS[name](page, capsys.readouterr().out, names)
    if name in ("curvature", "influence", "laplace", "pruning"):
        asserted = ["assert " in code for code in examples]
        assert any(asserted)
        assert all(asserted) or name != "curvature"
