"""The examples of the page about frameworks run, train, and give the same on the command line."""

import contextlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

import kfac_engine as ke
from kfac_engine.__main__ import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def run(page, title, folder):
    """Run the examples of a section of a page, or of the whole page; returns their names."""
    names = {}
    with contextlib.chdir(folder):
        for language, code in _blocks(page, title):
            if language == "python":
                exec(compile(code, page, "exec"), names)
            else:
                for line in code.splitlines():
                    assert main(shlex.split(line)[2:]) == 0
    return names


def _blocks(page, title):
    text = (DOCS / page).read_text(encoding="utf-8")
    if title:
        (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"^```(python|console)\n(.*?)^```", text, re.M | re.S)


@pytest.mark.quick
def test_pytorch_example_trains_module(tmp_path):
    names = run("pytorch.md", "", tmp_path)
    losses, module = names["losses"], names["module"]
    assert len(names["matches"].layouts) == len(list(module.parameters())) == 4
    assert losses[-1] < 0.3 * losses[0]
    loss = nn.functional.cross_entropy(module(names["images"]), names["labels"])
    assert float(loss) < losses[-1]


@pytest.mark.quick
def test_command_line_equals_library_for_exported_module(tmp_path):
    names = run("pytorch.md", "", tmp_path)
    written = load_file(tmp_path / "step.safetensors")
    engine = ke.Engine.from_onnx(tmp_path / "module.onnx", loss="categorical")
    result = engine.step({"image": names["images"]}, names["labels"])
    for name, natural in result.natural_gradients.items():
        np.testing.assert_array_equal(written[f"natural_gradient/{name}"], natural)


@pytest.mark.quick
def test_scikit_learn_example_trains_estimator(tmp_path):
    names = run("exporters.md", "scikit-learn", tmp_path)
    losses, model, batch = names["losses"], names["model"], names["batch"]
    assert len(names["matches"].layouts) == 4
    assert losses[-1] < 0.3 * losses[0]
    p = model.predict_proba(batch[0])[np.arange(256), batch[1]]
    assert -np.log(p).mean() < losses[-1]
