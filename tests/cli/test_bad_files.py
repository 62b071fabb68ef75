"""Bad input to `precondition` and `inspect`: one line that names it, status 2, files untouched."""

from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from onnx import parser
from safetensors.numpy import save_file

from kfac_engine.__main__ import main
from kfac_engine.cli.app import app
from tests.models import linear, two_outputs

OLDER = b"an older result"
X, Y = np.zeros((6, 4), np.float32), np.zeros(6, np.int64)


def relu_only():
    """A model without any parameter."""
    return parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        relu (float[n,4] x) => (float[n,4] y) { y = Relu (x) }"""
    )


def rounded():
    """A model whose only weight lies before a quantizer."""
    return parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> m (float[n,4] input) => (float[n,1] output)
        <float[4,1] w = {1, 2, 3, 4}, float scale = {0.1}, uint8 zero = {3}> {
          h = MatMul (input, w)  q = QuantizeLinear (h, scale, zero)
          output = DequantizeLinear (q, scale, zero)
        }"""
    )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    onnx.save(rounded(), "rounding.onnx")
    onnx.save(two_outputs(d=4), "two.onnx")
    onnx.save(relu_only(), "relu.onnx")
    Path("text.onnx").write_text("not a model", encoding="utf-8")
    Path("cut.onnx").write_bytes(linear().SerializeToString()[:-7])
    arrays = {
        "x": {"input": X},
        "narrow": {"input": X[:, :3]},
        "integers": {"input": (10 * X).astype(np.int64)},
        "image": {"image": X},
        "nan": {"input": X + np.float32(np.nan)},
        "y": {"targets": Y},
        "few": {"targets": Y[:5]},
        "class": {"targets": Y + 3},
        "fraction": {"targets": Y + 0.5},
    }
    for name, content in arrays.items():
        np.savez(f"{name}.npz", **content)
    save_file({"fc.weight": np.zeros((4, 3), np.float32)}, "weight_only.safetensors")
    turned = {"fc.weight": np.zeros((3, 4), np.float32), "fc.bias": np.zeros(3, np.float32)}
    save_file(turned, "turned.safetensors")
    Path("out.safetensors").write_bytes(OLDER)
    return tmp_path


# What is given in place of the defaults: and what the error line must name.
WRONG = {
    "no model file": ({"model": "none.onnx"}, "none.onnx"),
    "not a model": ({"model": "text.onnx"}, "text.onnx"),
    "cut model": ({"model": "cut.onnx"}, "cut.onnx"),
    "rounding": ({"model": "rounding.onnx"}, "QuantizeLinear"),
    "nothing to train": ({"model": "relu.onnx"}, "no trainable parameter"),
    "several outputs": ({"model": "two.onnx"}, "logits"),
    "no batch file": ({"inputs": "none.npz"}, "none.npz"),
    "unknown input": ({"inputs": "image.npz"}, "'image'"),
    "wrong shape": ({"inputs": "narrow.npz"}, "(6, 3)"),
    "wrong dtype": ({"inputs": "integers.npz"}, "int64"),
    "NaN": ({"inputs": "nan.npz"}, "NaN"),
    "no targets": ({"targets": None}, "--targets"),
    "no targets file": ({"targets": "none.npz"}, "none.npz"),
    "too few targets": ({"targets": "few.npz"}, "5"),
    "unknown class": ({"targets": "class.npz"}, "3"),
    "fractional class": ({"targets": "fraction.npz"}, "float64"),
    "unknown loss": ({"loss": "hinge"}, "hinge"),
    "unknown output": ({"output": "logit"}, "logit"),
    "unknown mode": ({"mode": "exakt"}, "exakt"),
    "unknown approximation": ({"approx": "fully_connected=kronn"}, "kronn"),
    "unknown kind of layer": ({"approx": "dense=kron"}, "dense"),
    "unknown parameter": ({"trainable": "head.*"}, "head.*"),
    "no CuPy": ({"backend": "cupy"}, "CuPy"),
    "negative damping": ({"damping": "-1"}, "-1"),
    "damping that is no number": ({"damping": "nan"}, "nan"),
    "half a block": ({"gradients": "weight_only.safetensors"}, "fc.bias"),
    "turned gradient": ({"gradients": "turned.safetensors"}, "(3, 4)"),
    "no state": ({"state": "x.npz"}, "x.npz"),
    "empirical without targets": (
        {"mode": "empirical", "targets": None, "gradients": "whole.safetensors"}, "targets"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), WRONG.values(), ids=WRONG)
def test_precondition_refuses_it_and_leaves_files_alone(changes, named, capsys):
    whole = {"fc.weight": np.zeros((4, 3), np.float32), "fc.bias": np.zeros(3, np.float32)}
    save_file(whole, "whole.safetensors")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    given = {"model": "model.onnx", "inputs": "x.npz", "targets": "y.npz", "threads": "1"} | changes
    model = given.pop("model")
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    status = main(["precondition", model, *options, "-o", "out.safetensors"])
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err
    assert (status, out) == (2, "")
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


@pytest.mark.parametrize("model", ["none", "text", "cut", "rounding", "relu", "two"])
def test_inspect_refuses_a_bad_model(model, capsys):
    assert main(["inspect", f"{model}.onnx"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def path_arguments():
    """Each argument of each command that is a path, with a command line that gives it alone."""
    for name, command in app.commands.items():
        for parameter in command.params:
            if isinstance(parameter.type, click.Path):
                option = [parameter.opts[0]] if parameter.opts[0].startswith("-") else []
                yield pytest.param(name, option, id=f"{name} {parameter.name}")


@pytest.mark.parametrize(("command", "option"), list(path_arguments()))
@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=["zero byte", "lone surrogate"])
def test_a_path_that_no_file_has_is_an_error(command, option, path, capsys):
    assert main([command, *option, path]) == 2
    assert "is not a path" in capsys.readouterr().err
