"""The examples of the page about frameworks run, train, and give the same on the command line."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

import kfac_engine as ke
from tests.pages import execute

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the examples of a page, or of a section of it, in a folder; returns their names."""
    monkeypatch.chdir(tmp_path)
    return lambda page, section="": execute(DOCS / page, "python", "console", section=section)


@pytest.mark.quick
def test_pytorch_example_trains_module(run):
    names = run("pytorch.md")
    losses, module = names["losses"], names["module"]
    assert len(names["matches"].layouts) == len(list(module.parameters())) == 4
    assert losses[-1] < 0.3 * losses[0]
    loss = nn.functional.cross_entropy(module(names["images"]), names["labels"])
    assert float(loss) < losses[-1]


@pytest.mark.quick
def test_command_line_equals_library_for_exported_module(run, tmp_path):
    names = run("pytorch.md")
    written = load_file(tmp_path / "step.safetensors")
    engine = ke.Engine.from_onnx(tmp_path / "module.onnx", loss="categorical")
    result = engine.step({"image": names["images"]}, names["labels"])
    for name, natural in result.natural_gradients.items():
        np.testing.assert_array_equal(written[f"natural_gradient/{name}"], natural)


@pytest.mark.quick
def test_scikit_learn_example_trains_estimator(run):
    names = run("exporters.md", "scikit-learn")
    losses, model, batch = names["losses"], names["model"], names["batch"]
    assert len(names["matches"].layouts) == 4
    assert losses[-1] < 0.3 * losses[0]
    p = model.predict_proba(batch[0])[np.arange(256), batch[1]]
    assert -np.log(p).mean() < losses[-1]
