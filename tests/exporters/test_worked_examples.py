"""The examples of the page about frameworks run, train, and give the same on the command line."""

import contextlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import kfac_engine as ke
from kfac_engine.__main__ import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporters.md"
SHARED = "Matching parameters"


def run(title: str, folder: Path) -> dict[str, object]:
    """Run the examples of a section after the shared ones; returns their names."""
    names: dict[str, object] = {}
    with contextlib.chdir(folder):
        for language, code in _blocks(SHARED) + _blocks(title):
            if language == "python":
                exec(compile(code, PAGE.name, "exec"), names)
            else:
                for line in code.splitlines():
                    assert main(shlex.split(line)[2:]) == 0
    return names


def _blocks(title: str) -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"^```(python|console)\n(.*?)^```", section, re.M | re.S)


@pytest.mark.quick
def test_pytorch_example_trains_module(tmp_path: Path) -> None:
    names = run("PyTorch", tmp_path)
    losses, module, batch = names["losses"], names["module"], names["batch"]
    assert len(names["matches"]) == len(list(module.parameters())) == 4
    assert losses[-1] < 0.3 * losses[0]
    loss = nn.functional.cross_entropy(
        module(torch.from_numpy(batch[0])), torch.from_numpy(batch[1])
    )
    assert float(loss) < losses[-1]


@pytest.mark.quick
def test_command_line_equals_library_for_exported_module(
    tmp_path: Path,
) -> None:
    batch = run("PyTorch", tmp_path)["batch"]
    written = load_file(tmp_path / "step.safetensors")
    engine = ke.Engine.from_onnx(tmp_path / "module.onnx", loss="categorical")
    result = engine.step({"image": batch[0]}, batch[1])
    for name, natural in result.natural_gradients.items():
        np.testing.assert_array_equal(written[f"natural_gradient/{name}"], natural)


@pytest.mark.quick
def test_scikit_learn_example_trains_estimator(tmp_path: Path) -> None:
    names = run("scikit-learn", tmp_path)
    losses, model, batch = names["losses"], names["model"], names["batch"]
    assert len(names["matches"]) == 4
    assert losses[-1] < 0.3 * losses[0]
    p = model.predict_proba(batch[0])[np.arange(256), batch[1]]
    assert -np.log(p).mean() < losses[-1]
