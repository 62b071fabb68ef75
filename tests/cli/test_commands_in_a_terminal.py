"""Commands at 80 columns and more: words and numbers stay whole, and no line is too long."""

import os
import subprocess
import sys
from collections import Counter
from itertools import takewhile

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.cli.demo import METHODS
from tests.models import Net

if sys.platform == "win32":
    pytest.skip("pseudo-terminals need a POSIX system", allow_module_level=True)
from tests.cli.terminals import run_in_terminal
from tests.nightly import nightly_but

WIDTH = 80
NAMES = ["encoder.layers.0.self_attention.out_projection.weight"]
NAMES += [NAMES[0].replace("weight", "bias")]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Return the arguments of a command for one dense layer with a long name."""
    folder = tmp_path_factory.mktemp("model")
    net = Net()
    net.dense(NAMES[0].removesuffix(".weight"), "input", 4, 3)
    model = net.model({"input": ["n", 4]}, {NAMES[0].removesuffix(".weight"): ["n", 3]})
    onnx.save(model, folder / "model.onnx")
    rng = np.random.default_rng(0)
    np.savez(folder / "x.npz", input=rng.normal(size=(8, 4)).astype(np.float32))
    np.savez(folder / "y.npz", targets=rng.integers(0, 3, 8))
    files = {"--inputs": folder / "x.npz", "--targets": folder / "y.npz"}
    return [str(folder / "model.onnx"), *(str(part) for item in files.items() for part in item)]


def test_precondition_shows_each_name_with_its_numbers(arguments, tmp_path):
    out = tmp_path / "out.safetensors"
    loss = ["--loss", "categorical"]
    screen = run_in_terminal(["precondition", *arguments, *loss, "-o", str(out)], WIDTH)
    lines = [line for line in screen.lines if str(out) not in line]
    assert max(map(len, lines)) <= WIDTH
    model, *files = arguments
    inputs, targets = (dict(np.load(file)) for file in files[1::2])
    result = ke.precondition(model, inputs, targets["targets"], loss="categorical")
    for name in NAMES:
        norms = [np.linalg.norm(of[name]) for of in (result.gradients, result.natural_gradients)]
        (row,) = (line.split() for line in lines if name in line.split())
        assert [float(word) for word in row[-2:]] == pytest.approx(norms, rel=1e-3)


def test_verify_shows_the_names_of_the_largest_errors(arguments):
    screen = run_in_terminal(["verify", *arguments], WIDTH)
    assert screen.widest <= WIDTH
    words = {word.strip(",") for line in screen.lines for word in line.split()}
    assert words >= set(NAMES)
    assert screen.text.split().count("pass") == 5


def words(lines):
    return Counter(word for line in lines for word in line.split() if not word.startswith("─"))


@pytest.fixture(scope="module")
def piped_doctor():
    """Return the lines of `doctor` in a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "kfac_engine", "doctor"],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env=os.environ | {"PYTHONUTF8": "1"},
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("width", nightly_but([80], [80, 100, 120]))
def test_doctor_wraps_values_at_spaces_under_their_column(width, piped_doctor):
    screen = run_in_terminal(["doctor"], width)
    assert screen.widest <= width
    assert words(screen.lines) == words(piped_doctor)
    (heads,) = (line for line in screen.lines if line.split() == ["fact", "value"])
    column = heads.index("value")
    for line in takewhile(bool, screen.lines[screen.lines.index(heads) + 2 :]):
        assert line[column - 1] == " "
        assert line[column] != " "


def test_doctor_in_a_pipe_has_a_line_for_each_fact(piped_doctor):
    assert all(line.startswith("  ") and line[2] != " " for line in piped_doctor[4:20])


@pytest.mark.nightly
def test_demo_shows_its_tables_in_80_columns(tmp_path):
    arguments = ["demo", "--seconds", "0.05", "--seeds", "1", "--out", str(tmp_path)]
    screen = run_in_terminal(arguments, WIDTH)
    lines = [line for line in screen.lines if str(tmp_path) not in line]
    assert max(map(len, lines)) <= WIDTH
    title = next(i for i, line in enumerate(lines) if line.startswith("0.05 CPU seconds"))
    rows = lines[title + 1 : lines.index("", title + 2)]
    assert [row.split()[0] for row in rows[-len(METHODS) :]] == list(METHODS)
