"""The command ``derivatives``: a file that another runtime executes."""

import numpy as np
import onnx
import onnxruntime
import pytest

from kfac_engine.__main__ import main
from tests import models


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = models.Net()
    hidden = net.op("Tanh", net.dense("first", "x", 2, 4), to="hidden")
    net.op("Identity", net.dense("last", hidden, 4, 1), to="u")
    onnx.save(net.model({"x": ["n", 2]}, {"u": ["n", 1]}), "net.onnx")
    onnx.save(models.written("n,2", "", "output = Relu(input)"), "kink.onnx")
    return tmp_path


def run(name, feeds):
    session = onnxruntime.InferenceSession(name, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def test_file_gives_the_derivatives_that_are_asked_for(folder, capsys):
    kinds = ["--jacobian", "--laplacian", "--hessian", "--directional"]
    features = ["--selected", "t", "--selected", "x,x"]
    assert (
        main(["derivatives", "net.onnx", "--wrt", "x=t,x", *kinds, *features, "-o", "d.onnx"]) == 0
    )
    assert "in:  x, direction" in capsys.readouterr().out
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 5, 2)).astype("float32")
    found = run("d.onnx", {"x": x, "direction": v})
    first, second = found["jacobian of u"], found["hessian of u"]
    step = np.float32([[0, 2**-6]])
    slope = (run("net.onnx", {"x": x + step})["u"] - run("net.onnx", {"x": x - step})["u"]) * 2**5
    np.testing.assert_allclose(first[..., 1], slope, atol=1e-3)
    np.testing.assert_array_equal(first[..., 0], found["derivative of u by t"])
    np.testing.assert_allclose(second[..., 1, 1], found["derivative of u by x, x"], atol=1e-6)
    bend = np.einsum("nkij,ni,nj->nk", second, v, v)
    np.testing.assert_allclose(found["second directional of u"], bend, atol=1e-5)


def test_kinks_are_reported(folder, capsys):
    command = ["derivatives", "kink.onnx", "--wrt", "input", "--laplacian", "-o", "d.onnx"]
    assert main(command) == 0
    assert "the second derivative of Relu at node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wrt", "x"], "jacobian=True, laplacian=True, hessian=True"),
        (["--wrt", "y", "--laplacian"], "'y' is no input"),
        (["--wrt", "x", "--laplacian", "--output", "v"], "'v'"),
        (["--wrt", "x", "--selected", "t"], "the features are: 0, 1"),
        (["--wrt", "x=t", "--jacobian"], "2 different names"),
        (["--laplacian"], "--wrt"),
    ],
)
def test_wrong_input_is_one_line_and_status_two(folder, capsys, arguments, message):
    assert main(["derivatives", "net.onnx", *arguments, "-o", "d.onnx"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "d.onnx").exists()
