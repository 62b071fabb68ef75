"""The examples run, and the two that do the same give the same numbers."""

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXACT = 1e-10  # float64 through one damped inverse of condition about a thousand


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_says_something(path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path))
    assert capsys.readouterr().out


@pytest.mark.slow
def test_on_digits_kfac_reaches_the_target_before_adam_and_ends_lowest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["digits.py", "3"])
    runs = runpy.run_path(str(EXAMPLES / "digits.py"))["runs"]
    sgd, adam, kfac = (runs[3, name] for name in ("SGD", "Adam", "K-FAC"))
    assert kfac.steps_to(0.1) < adam.steps_to(0.1)
    assert kfac.final_loss < 0.5 * adam.final_loss < adam.final_loss < sgd.final_loss


@pytest.mark.parametrize("result", ["gradients", "natural", "rooted", "sample"])
def test_the_specifications_api_gives_the_same_with_and_without_onnx(result):
    plain = runpy.run_path(str(EXAMPLES / "specification_api.py"))
    through_onnx = runpy.run_path(str(EXAMPLES / "specification_api_onnx.py"))
    assert plain["loss"] == pytest.approx(through_onnx["loss"], rel=EXACT)
    assert plain[result].keys() == through_onnx[result].keys()
    for name, expected in plain[result].items():
        found = through_onnx[result][name]
        np.testing.assert_allclose(found, expected, rtol=EXACT, atol=EXACT * abs(expected).max())
