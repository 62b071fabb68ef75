"""The examples run, and the two that do the same give the same numbers."""

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXACT = 1e-10  # float64 through one damped inverse of condition about a thousand
# Those that a test of their own runs, and the packages that they need.
TESTED = {"trap": None, "jax_likelihood": "jax", "pytensor_likelihood": "pytensor"}
OTHERS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in TESTED)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_example_runs_and_prints(path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_on_digits_kfac_has_a_lower_held_out_loss_than_sgd_after_five_epochs(monkeypatch):
    monkeypatch.setattr("sys.argv", ["digits.py", "3"])
    runs = runpy.run_path(str(EXAMPLES / "digits.py"))["runs"]
    last = {name: records[-1] for (_, name), records in runs.items()}
    assert {len(records) for records in runs.values()} == {5 * 11}
    assert all(record["accuracy"] > 0.9 for record in last.values())
    assert last["K-FAC"]["validation_loss"] < last["SGD"]["validation_loss"]


@pytest.mark.parametrize("result", ["gradients", "natural", "rooted", "sample"])
def test_specification_api_examples_agree(result):
    plain = runpy.run_path(str(EXAMPLES / "specification_api.py"))
    through_onnx = runpy.run_path(str(EXAMPLES / "specification_api_onnx.py"))
    assert plain["loss"] == pytest.approx(through_onnx["loss"], rel=EXACT)
    assert plain[result].keys() == through_onnx[result].keys()
    for name, expected in plain[result].items():
        found = through_onnx[result][name]
        np.testing.assert_allclose(found, expected, rtol=EXACT, atol=EXACT * abs(expected).max())


def test_energy_of_particles_in_a_trap_is_the_known_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trap.py"])
    run = runpy.run_path(str(EXAMPLES / "trap.py"))
    assert run["EXACT"] == pytest.approx(1.5 + 4.5 * 3**0.5)
    # No wave function has a lower energy; 120 steps leave less than a thousandth of the energy.
    assert run["energy"] > run["EXACT"] - 5 * run["error"]
    assert run["energy"] < run["EXACT"] + 0.005
    assert 1e-5 < run["error"] < 2e-3
    assert f"exact {run['EXACT']:.4f}" in capsys.readouterr().out


def run_likelihood(name):
    """Run an example on the likelihood of a line; returns its names and the closed form."""
    pytest.importorskip(TESTED[name])
    run = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    features = np.stack([run["x"], np.ones(50)], axis=1).astype(float)
    precision = features.T @ features
    return run, np.linalg.solve(precision, features.T @ run["y"]), np.linalg.inv(precision)


def test_gradients_of_an_op_of_pytensor_find_the_most_likely_line():
    run, line, _ = run_likelihood("pytensor_likelihood")
    np.testing.assert_allclose(run["estimate"], line, rtol=EXACT)
    value, _ = run["value_and_gradient"](line)
    errors = run["y"] - run["x"] * line[0] - line[1]
    assert value == pytest.approx(-0.5 * np.square(errors).sum())


def test_sampler_in_jax_draws_from_the_posterior_of_a_line():
    run, line, covariance = run_likelihood("jax_likelihood")
    # 280 draws, of which a half at least are independent: four standard errors.
    spread = np.sqrt(np.diag(covariance))
    assert (abs(run["mean"] - line) < 4 * spread / 140**0.5).all()
    np.testing.assert_allclose(run["spread"], spread, rtol=4 / (2 * 140) ** 0.5)
    jax = pytest.importorskip("jax")
    slopes = jax.grad(run["log_posterior"])(jax.numpy.zeros(2))
    exact = [(run["x"] * run["y"]).sum(), run["y"].sum()]
    np.testing.assert_allclose(slopes, exact, rtol=1e-5)
