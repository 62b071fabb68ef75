"""The commands of curvature at 80, 100 and 120 columns: names and numbers stay whole."""

import sys
from functools import cache

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from kfac_engine.summary import dimensions
from tests.models import Net

if sys.platform == "win32":
    pytest.skip("pseudo-terminals need a POSIX system", allow_module_level=True)
from tests.cli.terminals import run_in_terminal, table
from tests.nightly import nightly_but

WIDTHS = nightly_but([80], [80, 100, 120])
PREFIX = "encoder.layers.0.self_attention."


def long_names():
    """Two dense layers with the names of a transformer."""
    net = Net()
    hidden = net.op("Tanh", net.dense(f"{PREFIX}in_projection", "input", 64, 8), to="hidden")
    net.dense(f"{PREFIX}out_projection", hidden, 8, 4)
    return net.model({"input": ["n", 64]}, {f"{PREFIX}out_projection": ["n", 4]})


MODELS = {
    "cnn": (onnx.load_from_string(demo_model("cnn")), (1, 8, 8)),
    "long": (long_names(), (64,)),
}


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder with a model, a batch and a curvature."""
    path = tmp_path_factory.mktemp(request.param)
    model, shape = MODELS[request.param]
    onnx.save(model, path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(32, *shape)).astype(np.float32)
    np.save(path / "x.npy", x)
    batch = {model.graph.input[0].name: x}, None
    ke.curvature(path / "m.onnx", batch, loss="categorical").save(path / "c.st")
    return path


@cache
def screen_of(folder, name, width, *words):
    """Return the screen of a command in a folder, with short paths."""
    model = [str(folder / "m.onnx")] * (2 if name == "merge" else 1)
    data = ["--inputs", str(folder / "x.npy")]
    stored = ["--curvature", str(folder / "c.st")] * len(model)
    arguments = [name, *model, *(data if name == "curvature" else stored), *words]
    return run_in_terminal([*arguments, "-o", str(folder / f"{name}.out")], width)


def lines_of(screen, folder):
    """Return the lines without those of paths, which no terminal breaks."""
    return [line for line in screen.lines if str(folder) not in line]


COMMANDS = {
    "curvature": (["--threads=1"], "blocks"),
    "saliency": (["--method=obd"], "saliencies by obd"),
    "prune": (["--sparsity=0.5"], "zeros by obd"),
    "merge": ([], "distance of the merged parameters"),
}


CASES = [("cnn", "curvature"), *(("long", name) for name in COMMANDS)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("folder", "name"), CASES, indirect=["folder"])
def test_lines_fit_and_names_and_shapes_stay_whole(name, width, folder):
    words, title = COMMANDS[name]
    lines = lines_of(screen_of(folder, name, width, *words), folder)
    assert max(map(len, lines)) <= width
    shown = {word.rstrip(",") for line in table(lines, title) for word in line.split()}
    for tensor in onnx.load(folder / "m.onnx").graph.initializer:
        assert {tensor.name, dimensions(tensor.dims)} <= shown
