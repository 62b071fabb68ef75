"""The command `verify`: its table, its exit status and its JSON."""

import json

import numpy as np
import onnx
import pytest

from kfac_engine.__main__ import main
from kfac_engine.runtime.trace import Trace
from tests import models


@pytest.fixture
def arguments(tmp_path):
    model = models.mlp((6, 5, 3))
    inputs = models.random_inputs(model, 4)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    np.savez(tmp_path / "batch.npz", **inputs)
    np.savez(tmp_path / "labels.npz", targets=np.array([0, 2, 1, 1]))
    batch, labels = (str(tmp_path / name) for name in ("batch.npz", "labels.npz"))
    return ["verify", str(path), "--inputs", batch, "--targets", labels]


def break_products(monkeypatch):
    right = Trace.jvp
    monkeypatch.setattr(
        Trace, "jvp", lambda self, *a, **k: {n: 2 * y for n, y in right(self, *a, **k).items()}
    )


def test_all_checks_pass_with_status_0(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name in ("gradients", "curvature products", "blocks", "inverses", "export"):
        assert f"{name}" in text
    assert "FAIL" not in text
    assert text.startswith("examples: 4; parameters one by one: fc0.weight, fc0.bias,")


def test_a_failure_ends_with_status_3_and_what_to_do(arguments, capsys, monkeypatch):
    break_products(monkeypatch)
    assert main(arguments) == 3
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.startswith("FAIL: ")]
    assert len(lines) == 3
    assert lines[0].startswith("FAIL: curvature products of random vector 1: error 1")
    assert "What to do: " in lines[0]
    assert not captured.err


def test_json_has_every_measurement(arguments, capsys, monkeypatch):
    assert main([*arguments, "--json", "--examples", "2", "--parameters", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["examples"] == 2
    assert report["parameters"] == ["fc0.weight", "fc1.bias"]
    gradients = report["checks"][0]
    subjects = [measurement["subject"] for measurement in gradients["measurements"]]
    assert subjects == ["all parameters", "fc0.weight", "fc1.bias"]
    assert all(m["error"] <= m["tolerance"] for m in gradients["measurements"])
    break_products(monkeypatch)
    assert main([*arguments, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert [c["outcome"] for c in report["checks"]] == ["pass", "fail", "pass", "pass", "pass"]
    assert report["checks"][1]["remedy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "missing.npy"], "missing.npy"),
        (["--loss", "absent"], "absent"),
        (["--train-form"], "train_form changes nothing"),
    ],
)
def test_wrong_input_ends_with_status_2(arguments, capsys, options, message):
    assert main([*arguments, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
