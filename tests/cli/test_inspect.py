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
from tests.engine.test_buffers import normalised
from tests.engine.test_recurrent_engine import classifier
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


def test_the_layers_of_the_demo_network_have_the_factors_of_their_formula(report):
    layers = report(demo_model("cnn"))["layers"]
    assert [layer["kind"] for layer in layers] == ["conv2d"] * 3 + ["fully_connected"] * 2
    sides = [tuple(shape[0] for shape in layer["factor_shapes"]) for layer in layers]
    # channels × 3 × 3 + 1 and features + 1 on the input side
    assert sides == [(10, 16), (145, 32), (289, 32), (129, 64), (65, 10)]
    # an average and an inverse, float32
    expected = [2 * 4 * sum(side**2 for side in pair) for pair in sides]
    assert [layer["factor_bytes"] for layer in layers] == expected


def test_memory_adds_up_and_grows_with_the_batch_where_activations_are(report):
    sizes = ("1000", "10000")
    one, ten = (report(demo_model("mlp"), "--batch", size)["memory"] for size in sizes)
    for memory in (one, ten):
        parts = [count for part, count in memory.items() if part != "total"]
        assert memory["total"] == sum(parts)
    # Gradients of weights, which are in the sessions too, do not grow.
    assert 9 * one["activations"] < ten["activations"] <= 10 * one["activations"]
    assert ten["factors"] == one["factors"]


def with_positions():
    """A table that divides the tokens, then a dense layer: the table has no layer."""
    net = Net()
    x = net.op("Div", "input", net.positive("positions.weight", 4, 5), to="placed")
    x = net.op("MatMul", x, net.weight("fc.weight", 5, 3), to="product")
    net.op("Add", x, net.weight("fc.bias", 3), to="output")
    return net.model({"input": ["batch", 4, 5]}, {"output": ["batch", 4, 3]})


def test_every_parameter_is_claimed_once_and_a_generic_one_has_a_reason(report):
    model = with_positions()
    layers = report(model)["layers"]
    claimed = [name for layer in layers for name in layer["parameters"]]
    assert sorted(claimed) == sorted(set(claimed))
    weights = {t.name for t in model.graph.initializer if t.name.endswith((".weight", ".bias"))}
    assert set(claimed) == weights
    for layer in layers:
        assert (layer["kind"] == "generic") == bool(layer["reason"])
    assert "generic" in {layer["kind"] for layer in layers}


def test_constants_that_are_not_trained_are_listed_with_a_reason(report):
    model = resnet_block()
    found = report(model)
    trained = {name for layer in found["layers"] for name in layer["parameters"]}
    left = {entry["name"] for entry in found["not_trained"]}
    floats = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    assert trained | left == floats
    assert not trained & left
    assert all(entry["reason"] for entry in found["not_trained"])


def test_running_statistics_of_the_training_form_are_called_so(report):
    reasons = {entry["name"]: entry["reason"] for entry in report(normalised())["not_trained"]}
    assert reasons.keys() == {"norm.mean", "norm.var"}
    assert "running mean" in reasons["norm.mean"]


def test_recurrences_are_shown_for_the_length_of_given_sequences(report, tmp_path):
    model = classifier("GRU")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    np.save(tmp_path / "batch.npy", np.zeros((5, 3, 2), np.float32))
    layers = report(model, "--inputs", str(tmp_path / "batch.npy"))["layers"]
    uses = {layer["parameters"][0]: layer["inputs"] for layer in layers}
    assert len(uses["W"]) == len(uses["R"]) == 5


def test_only_the_parameters_asked_for_are_trained(report):
    layers = report(demo_model("mlp"), "--trainable", "dense3.*")["layers"]
    assert [layer["parameters"] for layer in layers] == [["dense3.weight", "dense3.bias"]]


def test_frozen_parameters_are_listed_among_those_that_are_not_trained(report):
    shown = report(demo_model("cnn"), "--freeze", "*.bias", "--freeze", "conv1.*")
    trained = {name for layer in shown["layers"] for name in layer["parameters"]}
    assert trained
    assert not any(name.endswith(".bias") or name.startswith("conv1.") for name in trained)
    assert "conv1.weight" in {entry["name"] for entry in shown["not_trained"]}


def test_another_approximation_is_shown(report):
    layers = report(demo_model("mlp"), "--approx", "fully_connected=diagonal")["layers"]
    assert {layer["approximation"] for layer in layers} == {"diagonal"}


def test_the_table_names_every_parameter(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    path.write_bytes(layer_norm().SerializeToString())
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    for tensor in layer_norm().graph.initializer:
        if np.prod(tensor.dims) > 1:
            assert tensor.name in out


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


def test_a_factor_of_2048_rows_has_no_warning(report):
    assert report(wide(2, 2048), *DENSE)["warnings"] == []
    assert len(report(wide(2, 2049), *DENSE)["warnings"]) == 1


def test_json_has_the_numbers_of_the_summary(report):
    shown = report(demo_model("cnn"), "--damping", "0.01", "--approx", "conv2d=diagonal")
    conv = [(9 + 1) * 16, (16 * 9 + 1) * 32, (32 * 9 + 1) * 32]
    dense = [(128 + 1) * 64, (64 + 1) * 10]
    assert shown["parameters"] == sum(conv) + sum(dense)
    assert shown["parameters_in_kronecker_blocks"] == sum(dense)
    assert shown["damping"] == 0.01
    assert shown["backend"] == "numpy"
    assert shown["factor_bytes"] == sum(layer["factor_bytes"] for layer in shown["layers"])
    refresh = shown["refresh_estimate"]
    assert refresh["flops"] == 129**3 + 64**3 + 65**3 + 10**3
    assert refresh["seconds"] > 0
    assert shown["step"] | {"seconds": None} == {"examples": 1, "seconds": None, "reason": ""}
    assert shown["step"]["seconds"] > 0
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
        rules = [index for index, line in enumerate(lines) if line.startswith(" ──")]
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


def test_the_totals_count_parameters_and_those_in_kronecker_blocks(tables):
    rows = [row.split() for row in tables(layer_norm())["totals"]]
    # Dense layers of 5 inputs with 5 and 3 outputs, and scales and shifts in a full block.
    assert rows[0] == ["parameters", str(6 * 5 + 6 * 3 + 10)]
    assert rows[1] == ["in", "Kronecker", "blocks", str(6 * 5 + 6 * 3), "(82.8", "%)"]
    # Two factors of 6 rows, and those of 5, 3 and 10 rows: 1584 operations.
    assert rows[3][:6] == ["refresh", "of", "all", "factors", "1.58", "kFLOP,"]
    assert rows[3][-4:] == ["on", "this", "machine", "(estimate)"]


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


def test_the_announced_batch_is_that_of_the_inputs(tmp_path, capsys):
    path, inputs = tmp_path / "model.onnx", tmp_path / "x.npy"
    path.write_bytes(wide(3, 2).SerializeToString())
    np.save(inputs, np.zeros((37, 3), np.float32))
    assert main(["inspect", str(path), "--inputs", str(inputs)]) == 0
    assert "peak memory, batch of 37" in capsys.readouterr().out
    assert main(["inspect", str(path), "--inputs", str(inputs), "--batch", "5"]) == 0
    assert "peak memory, batch of 5" in capsys.readouterr().out
    assert main(["inspect", str(path)]) == 0
    assert "peak memory, batch of 1" in capsys.readouterr().out


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
    assert "batch_axes" in capsys.readouterr().err


def test_normalizations_and_dropouts_in_inference_form_have_a_note_with_the_option(
    tmp_path, capsys
):
    path = tmp_path / "model.onnx"
    onnx.save(network(training=False, dropout=True), path)
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (norms,) = [line for line in lines if "'node_norm0', 'node_norm1'" in line]
    (dropout,) = [line for line in lines if "'node_dropped': dropout" in line]
    assert "--train-form" in norms
    assert "--train-form" in dropout
    assert main(["inspect", str(path), "--train-form"]) == 0
    assert "inference" not in capsys.readouterr().out
    onnx.save(folded(), path)
    assert main(["inspect", str(path), "--train-form"]) == 2
    assert capsys.readouterr().err.startswith("error: --train-form changes nothing in model")


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


@pytest.mark.parametrize("loss", ["categorical", "multi_bernoulli", "normal"])
def test_step_is_measured_with_targets_of_the_loss(report, loss):
    assert report(demo_model("mlp"), "--loss", loss, "--batch", "7")["step"]["examples"] == 7
    assert report(demo_model("mlp"), "--loss", loss)["step"]["seconds"] > 0


def test_step_has_a_reason_where_none_is_measured(report, monkeypatch):
    monkeypatch.setattr("kfac_engine.engine.step_time._LONGEST_REFRESH", 0.0)
    step = report(demo_model("mlp"))["step"]
    assert step["seconds"] is None
    assert step["reason"] == "its first refresh takes too long"
    monkeypatch.undo()
    monkeypatch.setattr("kfac_engine.engine.step_time._MOST_BYTES", 1_000_000)
    assert report(demo_model("mlp"))["step"]["reason"] == "it needs more than 1.0 MB of memory"


def test_error_of_a_step_is_its_reason(report, monkeypatch):
    def failing(*_):
        raise ke.InputError("the generated batch is wrong; pass another.")

    monkeypatch.setattr(ke.Engine, "sample_batch", failing)
    reason = "the generated batch is wrong; pass another"
    assert report(demo_model("mlp"))["step"]["reason"] == reason
