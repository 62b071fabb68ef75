"""What ``export-training`` prints beside its result."""

import numpy as np
import onnx

from kfac_engine.__main__ import main
from tests.models import Net


def test_export_training_notes_what_train_notes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net = Net()
    net.op("ReduceMean", "input", net.constant("axes", np.array([1])), to="mean", keepdims=0)
    for name in ("scale", "bias", "mean", "var"):
        net.positive(f"bn.{name}", 3)
    operands = [f"bn.{name}" for name in ("scale", "bias", "mean", "var")]
    net.op("BatchNormalization", "mean", *operands, to="bn")
    net.dense("output", "bn", 3, 2)
    model = net.model({"input": ["batch", "length", 3]}, {"output": ["batch", 2]})
    onnx.save(model, "open.onnx")
    assert main(["export-training", "open.onnx", "-o", "files"]) == 0
    note, warning = capsys.readouterr().err.splitlines()
    assert note.startswith("note: 'node_bn': normalization in the form of inference")
    assert note.endswith("train_form trains it with those of the batch.")
    assert warning.startswith("warning: axis 1 ('length') of input 'input' has any size")
    assert "pass sample_inputs (--inputs)" in warning
