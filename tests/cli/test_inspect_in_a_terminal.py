"""`inspect` at 80, 100 and 120 columns: names and numbers stay whole, and no line is too long."""

import sys
from collections import Counter

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.display import show_flops
from kfac_engine.data import demo_model
from kfac_engine.summary import binary_size, dimensions
from tests.models import Net

if sys.platform == "win32":
    pytest.skip("pseudo-terminals need a POSIX system", allow_module_level=True)
from tests.cli.terminals import run_in_terminal, table
from tests.nightly import nightly_but

WIDTHS = nightly_but([80], [80, 100, 120])
D = 8


def encoder():
    """A layer of a transformer with the names of PyTorch, without its attention."""
    net, prefix = Net(), "encoder.layers.0."
    x = net.dense(f"{prefix}self_attn.out_proj", "input", D, D)
    x = net.op("Add", x, "input", to="residual")
    scale, shift = net.positive(f"{prefix}norm1.weight", D), net.weight(f"{prefix}norm1.bias", D)
    x = net.op("LayerNormalization", x, scale, shift, to="norm", axis=-1)
    x = net.op("Relu", net.dense(f"{prefix}linear1", x, D, 4 * D), to="hidden")
    scale = net.constant(f"{prefix}dropout.scale", np.full((1,), 0.9, np.float32))
    x = net.op("Mul", x, scale, to="scaled")
    net.dense("classification_head.output_projection", x, 4 * D, 3)
    return net.model({"input": ["n", D]}, {"classification_head.output_projection": ["n", 3]})


MODELS = {"cnn": onnx.load_from_string(demo_model("cnn")), "encoder": encoder()}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / f"{request.param}.onnx"
    onnx.save(MODELS[request.param], path)
    return path


@pytest.fixture(scope="module", params=WIDTHS)
def screen(request, model):
    return run_in_terminal(["inspect", str(model)], request.param)


def cells(layer, shapes):
    """Return the words of a layer in the table."""
    return [
        *layer.parameters,
        *(dimensions(shapes[name]) for name in layer.parameters),
        *layer.kind.split(),
        *layer.formula.split(),
        *map(dimensions, layer.factor_shapes),
        *binary_size(layer.factor_bytes).split(),
        *show_flops(layer.inverse_flops).split(),
    ]


def test_lines_are_at_most_as_wide_as_the_terminal(screen):
    assert screen.widest <= screen.width


def test_each_name_is_a_word_of_a_line(screen, model):
    words = {word for line in screen.lines for word in line.split()}
    assert words >= {tensor.name for tensor in onnx.load(model).graph.initializer}


def test_each_width_shows_the_cells_of_all_layers(screen, model):
    engine = ke.Engine.from_onnx(model, loss="categorical")
    shapes = {name: array.shape for name, array in engine.parameters.items()}
    expected = Counter(word for layer in engine.layers for word in cells(layer, shapes))
    lines = table(screen.lines, "layers")
    shown = Counter(word.rstrip(",") for line in lines for word in line.split())
    assert shown >= expected


def test_small_factors_have_no_warning(screen):
    assert not any(line.startswith("warning:") for line in screen.lines)


def test_a_warning_is_yellow_and_wraps_at_spaces(tmp_path):
    net = Net()
    net.op("MatMul", "x", net.weight("w", 2, 2100, spread=0.01), to="y")
    onnx.save(net.model({"x": ["n", 2]}, {"y": ["n", 2100]}), tmp_path / "wide.onnx")
    approximation = ["--approx", "fully_connected=kron"]
    screen = run_in_terminal(["inspect", str(tmp_path / "wide.onnx"), *approximation], 80)
    (start,) = (i for i, line in enumerate(screen.lines) if line.startswith("warning:"))
    assert screen.colours[start] == {"brown"}  # the name of colour 3 in pyte
    assert screen.colours[start + 1] == set()
    end = next(i for i in range(start, len(screen.lines)) if screen.lines[i].endswith("."))
    text = " ".join(screen.lines[start : end + 1])
    assert text.startswith("warning: each refresh of w inverts 2100×2100, 9.26 GFLOP; ")
    assert text.endswith("'kron_blocks' (--approx fully_connected=kron_blocks) has smaller ones.")


def test_spectra_have_their_numbers_below_the_names(tmp_path):
    onnx.save(MODELS["encoder"], tmp_path / "encoder.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, D)).astype(np.float32))
    arguments = ["inspect", str(tmp_path / "encoder.onnx"), "--inputs", str(tmp_path / "x.npy")]
    screen = run_in_terminal([*arguments, "--plot", str(tmp_path / "spectra.html")], 80)
    assert screen.widest <= 80
    lines = table(screen.lines, "eigenvalues of the factors")
    start = lines.index("  encoder.layers.0.linear1.weight")
    assert lines[start + 1] == "  encoder.layers.0.linear1.bias"
    shown = [line.split()[0] for line in lines[start + 2 : start + 6]]
    assert shown == ["factor", "shape", "largest", "smallest"]


def test_output_to_a_file_has_a_line_for_each_parameter_and_all_columns(model, capsys):
    assert main(["inspect", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    layers = ke.Engine.from_onnx(model, loss="categorical").layers
    rows = table(lines, "layers")[2:]
    assert [row.split()[0] for row in rows] == [name for la in layers for name in la.parameters]
    firsts = [row for row in rows if row.split()[0] in {la.parameters[0] for la in layers}]
    for layer, row in zip(layers, firsts, strict=True):
        assert layer.kind in row.split()
        assert row.endswith(show_flops(layer.inverse_flops))
