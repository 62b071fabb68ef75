"""The commands ``differentiate``, ``derivatives`` and ``export-training``: files for a runtime."""

import numpy as np
import onnx
import pytest

import kfac_engine
from kfac_engine.__main__ import main
from tests import models, oracle
from tests.graph.running import outputs
from tests.models import Net


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = Net()
    hidden = net.op("Tanh", net.dense("first", "x", 2, 4), to="hidden")
    net.op("Identity", net.dense("last", hidden, 4, 1), to="u")
    onnx.save(net.model({"x": ["n", 2]}, {"u": ["n", 1]}), "net.onnx")
    onnx.save(models.written("n,2", "", "output = Relu(input)"), "kink.onnx")
    onnx.save(models.mlp(), "mlp.onnx")
    onnx.save(models.two_outputs(), "two.onnx")
    return tmp_path


def test_file_gives_loss_and_gradients(folder, capsys):
    status = main(["differentiate", "mlp.onnx", "--loss", "categorical", "-o", "g.onnx"])
    assert status == 0
    assert "in:  input, targets" in capsys.readouterr().out
    inputs = models.random_inputs(models.mlp(), batch=4)
    targets = np.array([0, 2, 1, 1])
    found = outputs("g.onnx", {**inputs, "targets": targets})
    value, expected = oracle.loss_and_gradient(
        models.mlp(), inputs, "output", ["fc1.weight"], "categorical", targets
    )
    assert found["loss"] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(found["gradient/fc1.weight"], expected["fc1.weight"], atol=1e-6)


def test_files_have_inputs_for_probabilities_and_weights(folder, capsys):
    arguments = ["--loss", "categorical", "--probabilities", "--weights", "examples"]
    assert main(["differentiate", "mlp.onnx", *arguments, "-o", "g.onnx"]) == 0
    assert "in:  input, targets, weights" in capsys.readouterr().out
    inputs = models.random_inputs(models.mlp(), batch=2)
    targets = np.array([[0.1, 0.2, 0.7], [1, 0, 0]], np.float32)
    counts = np.array([1, 0], np.float32)
    loss = outputs("g.onnx", {**inputs, "targets": targets, "weights": counts})["loss"]
    engine = kfac_engine.Engine.from_onnx("mlp.onnx", loss="categorical")
    first = {name: array[:1] for name, array in inputs.items()}
    assert loss == pytest.approx(engine.loss(first, targets[:1]), rel=1e-5)


def test_inputs_may_be_asked_for(folder, capsys):
    assert main(["differentiate", "mlp.onnx", "--wrt", "input", "-o", "g.onnx"]) == 0
    assert "out: output, gradient/input" in capsys.readouterr().out


def test_file_gives_the_derivatives_that_are_asked_for(folder, capsys):
    kinds = ["--jacobian", "--laplacian", "--hessian", "--directional"]
    features = ["--selected", "t", "--selected", "x,x"]
    assert (
        main(["derivatives", "net.onnx", "--wrt", "x=t,x", *kinds, *features, "-o", "d.onnx"]) == 0
    )
    assert "in:  x, direction" in capsys.readouterr().out
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 5, 2)).astype("float32")
    found = outputs("d.onnx", {"x": x, "direction": v})
    first, second = found["jacobian of u"], found["hessian of u"]
    step = np.float32([[0, 2**-6]])
    slope = (
        outputs("net.onnx", {"x": x + step})["u"] - outputs("net.onnx", {"x": x - step})["u"]
    ) * 2**5
    np.testing.assert_allclose(first[..., 1], slope, atol=1e-3)
    np.testing.assert_array_equal(first[..., 0], found["derivative of u by t"])
    np.testing.assert_allclose(second[..., 1, 1], found["derivative of u by x, x"], atol=1e-6)
    bend = np.einsum("nkij,ni,nj->nk", second, v, v)
    np.testing.assert_allclose(found["second directional of u"], bend, atol=1e-5)


def test_kinks_are_reported(folder, capsys):
    command = ["derivatives", "kink.onnx", "--wrt", "input", "--laplacian", "-o", "d.onnx"]
    assert main(command) == 0
    assert "the second derivative of Relu at node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("differentiate two.onnx", "logits, mean"),
        ("differentiate mlp.onnx --loss hinge", "hinge"),
        ("differentiate mlp.onnx --wrt head", "head"),
        ("differentiate none.onnx", "none.onnx"),
        ("differentiate mlp.onnx -o nowhere/g.onnx", "nowhere"),
        ("derivatives net.onnx --wrt x", "jacobian=True, laplacian=True, hessian=True"),
        ("derivatives net.onnx --wrt y --laplacian", "'y' is no input"),
        ("derivatives net.onnx --wrt x --laplacian --output v", "'v'"),
        ("derivatives net.onnx --wrt x --selected t", "the features are: 0, 1"),
        ("derivatives net.onnx --wrt x=t --jacobian", "2 different names"),
        ("derivatives net.onnx --laplacian", "--wrt"),
    ],
)
def test_wrong_input_is_one_line_and_status_two(folder, capsys, arguments, message):
    before = set(folder.iterdir())
    words = arguments.split()
    assert main([*words, *(["-o", "g.onnx"] if "-o" not in words else [])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert set(folder.iterdir()) == before


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
