"""``find-rate``: the suggestion of the library, its picture and its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.data import demo_model, digits


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, labels = digits()
    Path("mlp.onnx").write_bytes(demo_model("mlp"))
    np.savez("d.npz", image=images, targets=labels)
    return tmp_path


def run(*arguments):
    return main(["find-rate", "mlp.onnx", "--data=d.npz", "--loss=categorical", *arguments])


def test_the_command_suggests_the_rate_of_the_library(folder, capsys):
    options = ["--optimizer=sgd", "--batch-size=64", "--steps=60", "--highest=3", "--seed=2"]
    assert run(*options, "--json", "--plot=rates.svg") == 0
    report = json.loads(capsys.readouterr().out)
    result = ke.find_rate(
        "mlp.onnx", digits(), optimizer="sgd", batch_size=64, steps=60, highest=3, seed=2
    )
    assert report["suggestion"] == result.suggestion
    assert report["losses"] == result.losses.tolist()
    assert report["rates"] == result.rates.tolist()
    assert Path("rates.svg").exists()
    assert run(*options) == 0
    assert (
        capsys.readouterr().out == f"suggestion for sgd: --learning-rate {result.suggestion:.3g}\n"
    )


def test_kfac_is_said_to_need_no_rate(folder, capsys):
    assert run("--optimizer=kfac", "--lowest=1e-9", "--highest=1e-8", "--steps=20") == 0
    out = capsys.readouterr().out
    assert "no rate lowers the loss clearly" in out
    assert "train with kfac needs no --learning-rate" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data=missing.npz"], "there is no such file"),
        (["--steps=3"], "steps must be a whole number of at least 20"),
        (["--lowest=2", "--highest=1"], "lowest must be below highest"),
        (["--plot=d.npz"], "would overwrite the file of --data"),
        (["--plot=rates.txt", "--data=missing.npz"], "must end in .png, .svg, .pdf"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(arguments, message, folder, capsys):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
