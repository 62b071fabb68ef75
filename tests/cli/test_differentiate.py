"""The command ``differentiate``: a file that another runtime executes."""

import numpy as np
import onnx
import onnxruntime
import pytest

import kfac_engine
from kfac_engine.__main__ import main
from tests import models, oracle


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(models.mlp(), "mlp.onnx")
    onnx.save(models.two_outputs(), "two.onnx")
    return tmp_path


def test_file_gives_loss_and_gradients(folder, capsys):
    status = main(["differentiate", "mlp.onnx", "--loss", "categorical", "-o", "g.onnx"])
    assert status == 0
    assert "in:  input, targets" in capsys.readouterr().out
    session = onnxruntime.InferenceSession("g.onnx", providers=["CPUExecutionProvider"])
    inputs = models.random_inputs(models.mlp(), batch=4)
    targets = np.array([0, 2, 1, 1])
    loss, gradient = session.run(["loss", "gradient/fc1.weight"], {**inputs, "targets": targets})
    value, expected = oracle.loss_and_gradient(
        models.mlp(), inputs, "output", ["fc1.weight"], "categorical", targets
    )
    assert loss == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(gradient, expected["fc1.weight"], atol=1e-6)


def test_files_have_inputs_for_probabilities_and_weights(folder, capsys):
    arguments = ["--loss", "categorical", "--probabilities", "--weights", "examples"]
    assert main(["differentiate", "mlp.onnx", *arguments, "-o", "g.onnx"]) == 0
    assert "in:  input, targets, weights" in capsys.readouterr().out
    session = onnxruntime.InferenceSession("g.onnx", providers=["CPUExecutionProvider"])
    inputs = models.random_inputs(models.mlp(), batch=2)
    targets = np.array([[0.1, 0.2, 0.7], [1, 0, 0]], np.float32)
    counts = np.array([1, 0], np.float32)
    (loss,) = session.run(["loss"], {**inputs, "targets": targets, "weights": counts})
    engine = kfac_engine.Engine.from_onnx("mlp.onnx", loss="categorical")
    first = {name: array[:1] for name, array in inputs.items()}
    assert loss == pytest.approx(engine.loss(first, targets[:1]), rel=1e-5)


def test_inputs_may_be_asked_for(folder, capsys):
    assert main(["differentiate", "mlp.onnx", "--wrt", "input", "-o", "g.onnx"]) == 0
    assert "out: output, gradient/input" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["two.onnx", "-o", "g.onnx"], "logits, mean"),
        (["mlp.onnx", "--loss", "hinge", "-o", "g.onnx"], "hinge"),
        (["mlp.onnx", "--wrt", "head", "-o", "g.onnx"], "head"),
        (["none.onnx", "-o", "g.onnx"], "none.onnx"),
        (["mlp.onnx", "-o", "nowhere/g.onnx"], "nowhere"),
    ],
)
def test_wrong_input_is_one_line_and_status_two(folder, capsys, arguments, message):
    assert main(["differentiate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "g.onnx").exists()
