"""A misspelled name on the command line is an error that suggests the nearest name."""

import re

import numpy as np
import pytest

from kfac_engine.__main__ import main
from kfac_engine.data import demo_model, digits


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model, a batch, and a batch whose input has a misspelled name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.onnx").write_bytes(demo_model("mlp"))
    images, labels = digits()
    np.savez("batch.npz", image=images[:8])
    np.savez("misspelled.npz", imgae=images[:8])
    np.save("labels.npy", labels[:8])
    np.savez("data.npz", image=images[:64], targets=labels[:64])
    np.savez("misspelled_data.npz", imgae=images[:64], targets=labels[:64])
    return tmp_path


INSPECT = ("inspect", "mlp.onnx")
TRAIN = ("train", "mlp.onnx", "--data=data.npz", "--steps=1", "-o", "out.onnx")
BATCH = ("precondition", "mlp.onnx", "--targets=labels.npy", "-o", "out.safetensors")

# Command line with a misspelled name, and the name that is suggested.
MISSPELLED = {
    "command": (("trian",), "train"),
    "command in capitals": (("Inspect",), "inspect"),
    "option": (("doctor", "--jsno"), "--json"),
    "option of the engine": ((*INSPECT, "--dampng", "1"), "--damping"),
    "loss": ((*INSPECT, "--loss", "crossentropy"), "cross_entropy"),
    "mode": ((*INSPECT, "--mode", "emprical"), "empirical"),
    "backend": ((*INSPECT, "--backend", "cuppy"), "cupy"),
    "kind of layer": ((*INSPECT, "--approx", "fully_conected=kron"), "fully_connected"),
    "approximation": ((*INSPECT, "--approx", "fully_connected=diagnal"), "diagonal"),
    "trainable": ((*INSPECT, "--trainable", "dense1*wieght"), "dense1.weight"),
    "freeze": ((*INSPECT, "--freeze", "dense1.baes"), "dense1.bias"),
    "output": ((*INSPECT, "--output", "logit"), "logits"),
    "graph pass": ((*INSPECT, "--graph-passes", "weight_gradient"), "weight_gradients"),
    "wrt": (("differentiate", "mlp.onnx", "--wrt", "iamge", "-o", "g.onnx"), "image"),
    "metric": ((*TRAIN, "--validation=data.npz", "--metrics", "acuracy"), "accuracy"),
    "best metric": (
        (*TRAIN, "--validation=data.npz", "--best", "validation_los"), "validation_loss"),
    "input of a batch": ((*BATCH, "--inputs", "misspelled.npz"), "image"),
    "input of data": (
        ("train", "mlp.onnx", "--data=misspelled_data.npz", "-o", "out.onnx"), "image"),
    "input of an axis": ((*INSPECT, "--batch-axis", "iamge=0"), "image"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "near"), MISSPELLED.values(), ids=MISSPELLED)
@pytest.mark.usefixtures("folder")
def test_misspelled_name_is_an_error_with_the_nearest_name(words, near, capsys):
    assert main(list(words)) == 2
    err = capsys.readouterr().err
    assert re.findall(r"[Dd]id you mean '(.*?)'\?", err) == [near]


FAR = {
    "command": ("foo",),
    "option": ("doctor", "--xyzzy"),
    "loss": (*INSPECT, "--loss", "hinge"),
    "optimizer": (*TRAIN, "--optimizer", "lbfgs"),
    "trainable": (*INSPECT, "--trainable", "encoder.*"),
}


@pytest.mark.parametrize("words", FAR.values(), ids=FAR)
@pytest.mark.usefixtures("folder")
def test_name_without_a_near_one_gets_no_suggestion(words, capsys):
    assert main(list(words)) == 2
    err = capsys.readouterr().err
    assert words[-1] in err
    assert "did you mean" not in err.lower()
