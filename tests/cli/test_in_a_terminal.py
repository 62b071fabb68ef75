"""Commands at 80 columns and more: no line is too long, and all words of the output stay whole."""

import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.demo import METHODS
from kfac_engine.data import demo_model
from tests.models import Net

if sys.platform == "win32":
    pytest.skip("pseudo-terminals need a POSIX system", allow_module_level=True)
from tests.cli.terminals import run_in_terminal, table
from tests.nightly import nightly_but

WIDTHS = nightly_but([80], [80, 100, 120])
PREFIX = "encoder.layers.0."


def encoder():
    """A layer of a transformer with the names of PyTorch, without its attention."""
    net = Net()
    x = net.dense(f"{PREFIX}self_attn.out_proj", "input", 8, 8)
    x = net.op("Add", x, "input", to="residual")
    scale, shift = net.positive(f"{PREFIX}norm1.weight", 8), net.weight(f"{PREFIX}norm1.bias", 8)
    x = net.op("LayerNormalization", x, scale, shift, to="norm", axis=-1)
    x = net.op("Relu", net.dense(f"{PREFIX}linear1", x, 8, 32), to="hidden")
    scale = net.constant(f"{PREFIX}dropout.scale", np.full((1,), 0.9, np.float32))
    x = net.op("Mul", x, scale, to="scaled")
    net.dense("classification_head.output_projection", x, 32, 3)
    return net.model({"input": ["n", 8]}, {"classification_head.output_projection": ["n", 3]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, a batch, and the curvature of one model."""
    path = tmp_path_factory.mktemp("files")
    onnx.save(encoder(), path / "m.onnx")
    (path / "cnn.onnx").write_bytes(demo_model("cnn"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 8)).astype(np.float32)
    np.save(path / "x.npy", x)
    np.savez(path / "d.npz", input=x, targets=rng.integers(0, 3, 8))
    np.save(path / "images.npy", rng.normal(size=(32, 1, 8, 8)).astype(np.float32))
    ke.curvature(path / "m.onnx", ({"input": x}, None), loss="categorical").save(path / "c.st")
    return path


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


# Command lines, and the model that they are about; each constant of the model is a word.
COMMANDS = {
    "inspect": ("inspect m.onnx", "m.onnx"),
    "inspect a cnn": ("inspect cnn.onnx", "cnn.onnx"),
    "spectra": ("inspect m.onnx --inputs x.npy --plot spectra.html", "m.onnx"),
    "precondition": ("precondition m.onnx --inputs d.npz -o g.st", None),
    "verify": ("verify m.onnx --inputs d.npz", None),
    "doctor": ("doctor", None),
    "curvature": ("curvature m.onnx --inputs x.npy --threads 1 -o other.st", None),
    "curvature of a cnn": ("curvature cnn.onnx --inputs images.npy -o cnn.st", None),
    "saliency": ("saliency m.onnx --curvature c.st -o s.st", None),
    "prune": ("prune m.onnx --curvature c.st --sparsity 0.5 -o p.onnx", None),
    "merge": ("merge m.onnx m.onnx --curvature c.st --curvature c.st -o all.onnx", None),
}


def words(lines):
    found = (word.rstrip(",") for line in lines for word in line.split())
    return Counter(word for word in found if not word.startswith("─"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("command", "model"), COMMANDS.values(), ids=COMMANDS)
def test_lines_fit_and_all_words_of_a_pipe_are_shown_whole(command, model, width, capsys):
    assert main(command.split()) == 0
    piped = capsys.readouterr().out.splitlines()
    screen = run_in_terminal(command.split(), width)
    assert screen.widest <= width
    missing = words(piped) - words(screen.lines)
    # A list of rows has the heads of the columns in each row, but for the first column's.
    heads = words(line for line, rule in pairwise(piped) if rule[:1] == "─")
    assert not missing - heads
    if model is not None:
        names = {tensor.name for tensor in onnx.load(model).graph.initializer}
        assert names <= words(piped).keys()


def test_output_to_a_file_has_a_line_for_each_parameter_with_all_columns(capsys):
    assert main(["inspect", "m.onnx"]) == 0
    layers = ke.Engine.from_onnx("m.onnx", loss="categorical").layers
    rows = table(capsys.readouterr().out.splitlines(), "layers")[2:]
    assert [row.split()[0] for row in rows] == [name for la in layers for name in la.parameters]
    firsts = [row for row in rows if row.split()[0] in {la.parameters[0] for la in layers}]
    for layer, row in zip(layers, firsts, strict=True):
        assert layer.kind in row.split()
        assert row.endswith("FLOP")


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


@pytest.mark.nightly
def test_demo_shows_its_tables_in_80_columns(tmp_path):
    arguments = ["demo", "--seconds", "0.05", "--seeds", "1", "--out", str(tmp_path)]
    lines = [line for line in run_in_terminal(arguments, 80).lines if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    title = next(i for i, line in enumerate(lines) if line.startswith("0.05 CPU seconds"))
    rows = lines[title + 1 : lines.index("", title + 2)]
    assert [row.split()[0] for row in rows[-len(METHODS) :]] == list(METHODS)
