"""`inspect` counts what a hand can count, and names what is not covered."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.data import demo_model
from kfac_engine.runtime.trace import Trace
from tests.engine.test_train_form import folded, network
from tests.models import Net, layer_norm, random_inputs, resnet_block, two_outputs


@pytest.fixture
def report(tmp_path, capsys):
    def inspect(model, *options):
        path = tmp_path / "model.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        assert main(["inspect", str(path), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return inspect


def test_constants_that_are_not_trained_are_listed_with_a_reason(report):
    model = resnet_block()
    found = report(model)
    trained = {name for layer in found["layers"] for name in layer["parameters"]}
    left = {entry["name"] for entry in found["not_trained"]}
    floats = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    assert trained | left == floats
    assert not trained & left
    assert all(entry["reason"] for entry in found["not_trained"])


def greatest():
    """A dense layer, and the maximum of its output and a trained row."""
    net = Net()
    hidden = net.dense("fc", "input", 4, 3)
    net.op("Max", hidden, net.weight("least", 3), to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


ONE_BY_ONE = "each update differentiates the examples one by one"


@pytest.mark.parametrize(
    ("model", "options", "uncovered"),
    [
        (two_outputs(), {"loss": "categorical", "output": "logits"}, "mean.weight, mean.bias"),
        (two_outputs(), {"loss": "normal", "output": "mean"}, "logits.weight, logits.bias"),
        (layer_norm(), {"loss": "categorical"}, ""),
        (greatest(), {"loss": "categorical"}, "least"),
    ],
    ids=["no loss on the means", "no loss on the logits", "none", "read by the loss"],
)
def test_single_examples_are_announced_where_updates_differentiate_them(
    model, options, uncovered, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    assert main(["inspect", str(path), *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (f"{uncovered}: no layer" in shown) == bool(uncovered)
    engine = ke.Engine.from_onnx(model, **options)
    passes, vjp = [], Trace.vjp
    monkeypatch.setattr(Trace, "vjp", lambda *given: passes.append(given) or vjp(*given))
    engine.observe(random_inputs(model, batch=5))
    assert (ONE_BY_ONE in shown) == (len(passes) >= 5)
    assert (ONE_BY_ONE in shown) == (uncovered == "least")


def wide(d_in, d_out):
    net = Net()
    net.dense("fc", "input", d_in, d_out)
    return net.model({"input": ["batch", d_in]}, {"fc": ["batch", d_out]})


DENSE = ("--approx", "fully_connected=kron")


@pytest.mark.parametrize("sides", [(2, 4100), (4100, 2)])
def test_a_factor_of_thousands_of_rows_names_the_approximation_without_it(sides, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    path.write_bytes(wide(*sides).SerializeToString())
    assert main(["inspect", str(path), *DENSE]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--approx fully_connected=kron_blocks" in shown
    assert "warning: each refresh of fc.weight, fc.bias inverts" in shown
    assert main(["inspect", str(path)]) == 0
    assert "warning:" not in capsys.readouterr().out


def test_json_has_the_numbers_of_the_summary(report):
    shown = report(demo_model("cnn"), "--damping", "0.01", "--approx", "conv2d=diagonal")
    conv = [(9 + 1) * 16, (16 * 9 + 1) * 32, (32 * 9 + 1) * 32]
    dense = [(128 + 1) * 64, (64 + 1) * 10]
    assert shown["parameters"] == sum(conv) + sum(dense)
    assert shown["parameters_in_kronecker_blocks"] == sum(dense)
    assert shown["damping"] == 0.01
    assert shown["backend"] == "numpy"
    assert shown["factor_bytes"] == sum(layer["factor_bytes"] for layer in shown["layers"])
    assert shown["refresh_flops"] == 129**3 + 64**3 + 65**3 + 10**3
    assert shown["approximations"]["conv2d"] == {
        "in_use": ["diagonal"],
        "choices": ["kron", "kron_reduce", "ekfac", "diagonal", "kron_sua", "kron_blocks"],
    }
    assert shown["approximations"].keys() == {"conv2d", "fully_connected"}


@pytest.fixture
def tables(tmp_path, capsys):
    def inspect(model, *options):
        """Return the lines of each table by title."""
        path = tmp_path / "model.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        assert main(["inspect", str(path), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        rules = [index for index, line in enumerate(lines) if line.startswith("──")]
        return {lines[i - 3]: lines[i + 1 : lines.index("", i)] for i in rules}

    return inspect


@pytest.mark.parametrize(
    ("options", "symbols"),
    [
        ((), ["A", "G", "⊗", "t"]),
        (("--approx", "conv2d=ekfac"), ["A", "G", "⊗", "diag", "U", "s"]),
        (("--approx", "conv2d=diagonal", "--approx", "fully_connected=diagonal"), ["diag", "F"]),
    ],
    ids=["kron", "ekfac", "diagonal"],
)
def test_the_legend_explains_the_symbols_of_the_table_and_no_others(options, symbols, tables):
    legend = tables(demo_model("cnn"), *options)["symbols of the blocks"]
    assert [row.split()[0] for row in legend] == symbols


def test_other_approximations_are_listed_where_a_kind_has_others(tables):
    (norm, dense) = sorted(tables(layer_norm())["approximations: --approx KIND=NAME"], reverse=True)
    assert norm.split() == ["scale_and_shift", "full", "diagonal"]
    assert dense.split()[:3] == ["fully_connected", "kron", "kron_in_diag,"]
    net = Net()
    w = net.weight("w", 4, 2, 3)
    net.op("Conv", "x", w, to="first", kernel_shape=[3], pads=[1, 1], group=2)
    net.op("Conv", "first", w, to="y", kernel_shape=[3], pads=[1, 1], group=2)
    only = net.model({"x": ["n", 4, 5]}, {"y": ["n", 4, 5]})
    assert "approximations: --approx KIND=NAME" not in tables(only, "--loss", "normal")


def test_the_batch_axis_is_taken_from_the_command_line(report, tmp_path, capsys):
    net = Net()
    columns = net.op("MatMul", net.weight("w", 2, 3), "x", to="columns")
    net.op("Transpose", columns, to="y")
    model = net.model({"x": [3, 5]}, {"y": [5, 2]})
    (loss,) = report(model, "--loss", "normal", "--batch-axis", "x=1")["losses"]
    assert (loss["batch_axis"], loss["doubts"]) == (0, [])
    path = tmp_path / "model.onnx"
    for wrong in ("x", "x=one", "x=", f"x={'9' * 5000}"):
        assert main(["inspect", str(path), "--batch-axis", wrong]) == 2
        assert "expected INPUT=AXIS" in capsys.readouterr().err
    assert main(["inspect", str(path), "--loss", "normal", "--batch-axis", "z=1"]) == 2
    assert "batch_axes names 'z'" in capsys.readouterr().err
    net.op("ReduceMax", columns, net.constant("axes", np.array([1])), to="largest")
    onnx.save(net.model({"x": [3, 5]}, {"largest": [2, 1]}), path)
    assert main(["inspect", str(path), "--loss", "normal"]) == 2
    assert "--batch-axis" in capsys.readouterr().err


def test_normalizations_and_dropouts_in_inference_form_have_a_note_with_the_option(
    tmp_path, capsys
):
    path = tmp_path / "model.onnx"
    onnx.save(network(training=False, dropout=True), path)
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (norms,) = [line for line in lines if "'node_norm0', 'node_norm1'" in line]
    (dropout,) = [line for line in lines if "'node_dropped': dropout" in line]
    assert "train_form" in norms
    assert "train_form" in dropout
    assert main(["inspect", str(path), "--train-form"]) == 0
    assert "inference" not in capsys.readouterr().out
    onnx.save(folded(), path)
    assert main(["inspect", str(path), "--train-form"]) == 2
    assert capsys.readouterr().err.startswith("error: train_form changes nothing in model")


def test_the_example_of_the_page_is_the_output(tables):
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
    command, example = re.search(
        r"\$ kfac-engine inspect cnn.onnx (.*)\n```\n\n```text\n([^`]*)```", page
    ).groups()
    shown = tables(demo_model("cnn"), *shlex.split(command))
    lines = example.splitlines()
    for title in ("layers", "symbols of the blocks", "approximations: --approx KIND=NAME"):
        start = lines.index(title) + 4
        end = lines.index("", start) if "" in lines[start:] else len(lines)
        assert lines[start:end] == shown[title]
