"""Options of losses, and weights of targets in data files, on the command line."""

import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from safetensors.numpy import load_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from tests import models

WEIGHTS = [0.5, 2.0, 1.0]


@pytest.fixture
def batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = models.mlp()
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    inputs = models.random_inputs(model, batch=6)
    targets, weights = np.array([0, 1, 2, 7, 1, 2]), np.array([1, 0, 2, 1, 0.5, 1])
    np.savez("x.npz", **inputs, targets=targets)
    np.savez("w.npz", **inputs, targets=targets, weights=weights)
    np.save("c.npy", WEIGHTS)
    (tmp_path / "c.txt").write_text("0.5, 2.0\n1.0\n")
    return inputs, targets, weights


def gradients(data, *options):
    assert main(["precondition", "m.onnx", "--inputs", data, "-o", "g.safetensors", *options]) == 0
    return load_file("g.safetensors")


def test_options_and_weights_are_those_of_python(batch, capsys):
    inputs, targets, weights = batch
    model = models.mlp()
    kind = ke.Categorical(ignore_index=7, class_weights=WEIGHTS, label_smoothing=0.1)
    for data, wanted in (("x.npz", targets), ("w.npz", ke.Weighted(targets, weights))):
        expected = ke.precondition(model, inputs, wanted, loss=kind)
        for numbers in ("'c.npy'", "'c.txt'", "[0.5, 2, 1]"):
            options = f"ignore_index=7, label_smoothing=0.1, class_weights={numbers}"
            found = gradients(data, "--loss", f"categorical({options})")
            for name, array in expected.natural_gradients.items():
                np.testing.assert_array_equal(found[f"natural_gradient/{name}"], array)
    capsys.readouterr()


WRONG = {
    "no numbers": ("categorical(class_weights='no.txt')", "text with numbers"),
    "no file": ("categorical(class_weights='absent.txt')", "no such file"),
    "range": ("categorical(label_smoothing=1)", "label_smoothing must lie in [0, 1)"),
    "misspelled": ("categorical(ignor_index=7)", "(did you mean 'ignore_index'?)"),
    "of another loss": ("normal(label_smoothing=0.1)", "'normal' has no option 'label_smoothing'"),
    "without a name": ("categorical(7)", "such as categorical(ignore_index=255"),
    "no literal": ("categorical(ignore_index=f())", "expected NAME or NAME(OPTION=VALUE"),
    "deep": ("categorical(ignore_index=" + "[" * 5000, "expected NAME or NAME(OPTION=VALUE"),
    "a dictionary": ("categorical(**{})", "expected NAME or NAME(OPTION=VALUE"),
    "negative weight": ("categorical(weight=-1)", "weight must be at least 0"),
    "the file's own": ("output(ignore_index=1)", "has no option 'ignore_index'"),
    "some outputs": ("output=normal --loss normal", "expected LOSS or OUTPUT=LOSS in all"),
}


@pytest.mark.parametrize(("loss", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_loss_is_one_clear_error(batch, loss, message, capsys, tmp_path):
    (tmp_path / "no.txt").write_text("many")
    first, *rest = loss.split(" --loss ")
    several = [word for other in rest for word in ("--loss", other)]
    arguments = ["precondition", "m.onnx", "--inputs", "x.npz", "-o", "g.safetensors"]
    assert main([*arguments, "--loss", first, *several]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_errors_on_several_outputs_name_the_options_of_the_command(batch, capsys):
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        m (float[N,2] x) => (float[N,2] y, float[N,2] z) { y = Relu (x)  z = MatMul (x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.float32), "w"))
    onnx.save(model, "several.onnx")
    assert main(["inspect", "several.onnx"]) == 2
    said = capsys.readouterr().err
    advice = re.search(r"\((--loss) '(y=normal)'\)", said)
    assert "(--output)" in said
    assert main(["inspect", "several.onnx", advice[1], advice[2].replace("y", "z")]) == 0
    assert main(["differentiate", "several.onnx", "-o", "gradient.onnx"]) == 2
    assert "(--output)" in capsys.readouterr().err


def test_training_files_have_an_input_for_weights(batch, capsys):
    arguments = ["export-training", "m.onnx", "--optimizer", "adam", "-o", "train"]
    assert main([*arguments, "--weights", "examples", "--loss", "categorical(ignore_index=7)"]) == 0
    assert "input, targets, weights, rate" in capsys.readouterr().out
    inputs, targets, weights = batch
    files = ke.TrainingFiles("train")
    found = files.step(files.initial(), inputs, ke.Weighted(targets, weights))["loss"]
    engine = ke.Engine.from_onnx("m.onnx", loss=ke.Categorical(ignore_index=7))
    assert found == pytest.approx(engine.loss(inputs, ke.Weighted(targets, weights)), rel=1e-5)
