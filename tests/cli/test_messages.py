"""Labels of messages have a colour in a terminal only, and bars show two times."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("pseudo-terminals need a POSIX system", allow_module_level=True)
from kfac_engine.data import demo_model, digits
from tests.cli.terminals import run_in_terminal
from tests.nightly import nightly_but

# An exporter folded a normalization into this model, of which each engine warns.
CHANGED = Path(__file__).parents[1] / "exports" / "cnn-legacy.onnx"
FAILING = ["train", str(CHANGED), "--data", "missing.npz", "-o", "out.onnx"]


def colours_of(screen):
    """Return the first word of a message to the colours of its line."""
    labels = ("warning:", "error:")
    pairs = zip(screen.lines, screen.colours, strict=True)
    return {line.split()[0]: colours for line, colours in pairs if line.startswith(labels)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.onnx").write_bytes(demo_model("mlp"))
    images, labels = digits()
    np.savez("digits.npz", image=images[:256], targets=labels[:256])
    np.save("images.npy", images[:16])
    np.save("labels.npy", labels[:16])
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_labels_of_errors_and_warnings_have_colours_in_a_terminal():
    screen = run_in_terminal(FAILING, 80, code=2)
    assert colours_of(screen) == {"warning:": {"brown"}, "error:": {"red"}}  # brown is yellow


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
@pytest.mark.usefixtures("folder")
def test_labels_have_no_colours_where_the_user_wants_none(variables):
    screen = run_in_terminal(FAILING, 80, code=2, variables=variables)
    assert colours_of(screen) == {"warning:": set(), "error:": set()}


@pytest.mark.usefixtures("folder")
def test_labels_have_no_colours_in_a_pipe():
    done = subprocess.run(
        [sys.executable, "-m", "kfac_engine", *FAILING],
        env={**os.environ, "TERM": "xterm-256color"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.startswith("warning: ")
    assert done.stderr.splitlines()[-1].startswith("error: cannot ")


BATCH = ["--inputs", "images.npy", "--targets", "labels.npy"]
# Command line, and whether the command knows how much remains.
LONG = {
    "train": (["--data=digits.npz", "--steps=4", "-o", "out.onnx"], True),
    "verify": ([*BATCH, "--parameters=1"], True),
    "curvature": ([*BATCH, "--batch-size=4", "-o", "c.safetensors"], True),
    "precondition": ([*BATCH, "-o", "out.safetensors"], False),
    "differentiate": (["-o", "gradient.onnx"], False),
}


@pytest.mark.parametrize("name", nightly_but(["train", "precondition"], LONG))
@pytest.mark.usefixtures("folder")
def test_command_shows_elapsed_and_remaining_time_in_a_terminal(name):
    words, remains = LONG[name]
    screen = run_in_terminal([name, "mlp.onnx", *words], 80, variables={"NO_COLOR": "1"})
    assert "elapsed 0:00:0" in screen.printed
    assert ("remaining " in screen.printed) == remains
    assert "elapsed" not in screen.text  # bars disappear at the end
