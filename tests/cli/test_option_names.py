"""An error for a value of an option names the option, or repeats the value."""

import click
import numpy as np
import onnx
import pytest

from kfac_engine.__main__ import main
from kfac_engine.cli.app import app
from tests.models import linear

# Command to arguments with which it succeeds.
COMMANDS = {
    "train": ["m.onnx", "--data=d.npz", "-o=out.onnx", "--steps=1"],
    "precondition": ["m.onnx", "--inputs=d.npz", "-o=g.safetensors"],
    "inspect": ["m.onnx"],
    "differentiate": ["m.onnx", "-o=gradient.onnx"],
    "derivatives": ["m.onnx", "--wrt=input", "--laplacian", "-o=laplacian.onnx"],
    "export-training": ["m.onnx", "-o=files"],
    "verify": ["m.onnx", "--inputs=d.npz", "--parameters=1", "--examples=1"],
    "curvature": ["m.onnx", "--inputs=d.npz", "-o=other.safetensors"],
    "laplace": ["m.onnx", "--curvature=c.safetensors", "--inputs=x.npy", "-o=p.npz"],
    "influence": ["m.onnx", "--curvature=c.safetensors", "--inputs=d.npz", "-o=i.npz"],
    "saliency": ["m.onnx", "--curvature=c.safetensors", "-o=s.npz"],
    "prune": ["m.onnx", "--curvature=c.safetensors", "-o=p.onnx", "--sparsity=0.5"],
}
WRONG = ("foo", "-1")


def options():
    """Each option of the commands, with the first command that has it."""
    found = {}
    for name in COMMANDS:
        for option in app.commands[name].params:
            if isinstance(option, click.Option) and not option.is_flag:
                found.setdefault(option.opts[-1], (name, option))
    return found


OPTIONS = options()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    np.save(place / "x.npy", x)
    np.savez(place / "d.npz", input=x, targets=rng.integers(0, 3, 6))
    onnx.save(linear(), place / "m.onnx")
    c, model, d = (str(place / name) for name in ("c.safetensors", "m.onnx", "d.npz"))
    assert main(["curvature", model, "--inputs", d, "-o", c, "--threads=1"]) == 0
    return place


@pytest.mark.parametrize("flag", OPTIONS)
def test_error_names_the_option(flag, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    name, option = OPTIONS[flag]
    for value in WRONG:
        status = main([name, *COMMANDS[name], f"{option.opts[-1]}={value}"])
        line = capsys.readouterr().err.strip().splitlines()[-1:]
        assert status in (0, 2)
        if status:
            said = (*option.opts, f"'{value}'", option.name, flag.lstrip("-").replace("-", "_"))
            assert any(text in line[0] for text in said)


def test_an_error_begins_with_the_flag_of_the_wrong_option(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    arguments = [*COMMANDS["precondition"], "--refresh-every=0"]
    assert main(["precondition", *arguments]) == 2
    error = "error: --refresh-every must be a whole number of at least 1, got 0.\n"
    assert capsys.readouterr().err.endswith(error)
