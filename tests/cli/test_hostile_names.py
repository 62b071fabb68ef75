"""What a model calls its values never moves the cursor, and never fills the screen."""

import numpy as np
import onnx
import pytest

from kfac_engine.__main__ import main
from tests.models import linear

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nspoof\u202e" + "n" * 1_000_000


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A classifier whose weight, input and output have such names."""
    monkeypatch.chdir(tmp_path)
    made = linear()
    names = {"fc.weight": "w", "input": "x", "output": "y"}
    renamed = {old: f"{HOSTILE}{new}" for old, new in names.items()}
    for values in (made.graph.input, made.graph.output, made.graph.initializer):
        for entry in values:
            entry.name = renamed.get(entry.name, entry.name)
    for node in made.graph.node:
        for operands in (node.input, node.output):
            operands[:] = [renamed.get(name, name) for name in operands]
    onnx.save(made, "m.onnx")
    np.save("x.npy", np.ones((6, 4), np.float32))
    np.savez("x.npz", x=np.ones((6, 4), np.float32))
    return tmp_path


COMMANDS = {
    "inspect": (["inspect", "m.onnx"], 0),
    "differentiate": (["differentiate", "m.onnx", "-o", "g.onnx"], 0),
    "curvature": (["curvature", "m.onnx", "--inputs", "x.npy", "-o", "c.st"], 0),
    "missing input": (["curvature", "m.onnx", "--inputs", "x.npz", "-o", "c.st"], 2),
    "unknown pattern": (["inspect", "m.onnx", "--trainable", HOSTILE[:50]], 2),
    "unknown output": (["inspect", "m.onnx", "--output", "z"], 2),
    "its traceback": (["inspect", "m.onnx", "--output", "z", "--debug"], 2),
}


@pytest.mark.parametrize(("arguments", "status"), COMMANDS.values(), ids=COMMANDS)
def test_only_printable_text_of_bounded_length_is_shown(arguments, status, model, capsys):
    assert main(arguments) == status
    shown = "".join(capsys.readouterr())
    assert "spoof" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    assert len(shown) < 60_000
    if status and "--debug" not in arguments:
        assert shown.count("\n") == 1
        assert len(shown) < 5_000
