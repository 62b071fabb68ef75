"""`precondition` writes the engine's results, and goes on where its state file stopped."""

import json

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from tests.comparing import assert_arrays_near
from tests.models import linear

DAMPING = 0.3
ROUNDING = 2e-5  # of float32


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with a linear classifier and two batches, and the shell in it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        np.savez(f"{name}.npz", input=rng.standard_normal((6, 4)).astype(np.float32))
        np.savez(f"{name}_y.npz", targets=rng.integers(0, 3, 6))
    return tmp_path


def run(*arguments, model="model.onnx", batch="one", targets="one_y.npz"):
    """The status of `precondition` with small defaults."""
    given = ["--targets", targets] if targets else []
    options = ["--damping", str(DAMPING), "--threads", "1", "-o", "out.safetensors"]
    options += ["--refresh-every", "1"]
    return main(["precondition", model, "--inputs", f"{batch}.npz", *given, *options, *arguments])


def written(kind):
    out = load_file("out.safetensors")
    return {name: out[f"{kind}/{name}"] for name in ("fc.weight", "fc.bias")}


def engine():
    schedule = ke.Schedule(refresh_every=1)
    options = {"damping": DAMPING, "estimation_mode": "empirical", "schedule": schedule}
    return ke.Engine.from_onnx("model.onnx", loss="categorical", threads=1, **options)


def batch_of(name):
    return {"input": np.load(f"{name}.npz")["input"]}, np.load(f"{name}_y.npz")["targets"]


def test_both_gradients_are_those_of_the_engine(folder, capsys):
    assert run("--mode", "empirical", "--json") == 0
    expected = engine().step(*batch_of("one"))
    assert_arrays_near(written("gradient"), expected.gradients, ROUNDING)
    assert_arrays_near(written("natural_gradient"), expected.natural_gradients, ROUNDING)
    summary = json.loads(capsys.readouterr().out)
    assert summary["loss"] == pytest.approx(expected.loss, rel=ROUNDING)
    norm = np.linalg.norm(expected.gradients["fc.weight"])
    assert summary["parameters"]["fc.weight"]["gradient_norm"] == pytest.approx(norm, rel=ROUNDING)


@pytest.mark.parametrize("prefix", ["", "gradient/"], ids=["bare", "prefixed"])
def test_gradients_of_the_users_own_are_preconditioned(prefix, folder):
    rng = np.random.default_rng(1)
    mine = {"fc.weight": rng.standard_normal((4, 3)), "fc.bias": rng.standard_normal(3)}
    mine = {name: array.astype(np.float32) for name, array in mine.items()}
    save_file({f"{prefix}{name}": array for name, array in mine.items()}, "mine.safetensors")
    assert run("--mode", "empirical", "--gradients", "mine.safetensors") == 0
    assert_arrays_near(written("gradient"), mine, ROUNDING)
    made = engine()
    made.step(*batch_of("one"))
    assert_arrays_near(written("natural_gradient"), made.precondition(mine), ROUNDING)


def test_own_gradients_need_no_targets_where_targets_are_sampled(folder):
    assert run() == 0
    (folder / "out.safetensors").rename("mine.safetensors")
    assert run("--gradients", "mine.safetensors", targets=None) == 0


def test_the_state_carries_the_averages_from_call_to_call(folder):
    made = engine()
    for batch in ("one", "two"):
        arguments = ["--mode", "empirical", "--state", "state.safetensors"]
        assert run(*arguments, batch=batch, targets=f"{batch}_y.npz") == 0
        expected = made.step(*batch_of(batch))
    assert_arrays_near(written("natural_gradient"), expected.natural_gradients, ROUNDING)


def test_gradients_under_both_spellings_are_refused(folder, capsys):
    one = np.ones((4, 3), np.float32)
    both = {"fc.weight": one, "gradient/fc.weight": 2 * one, "fc.bias": one[0]}
    save_file(both, "g.safetensors")
    assert run("--gradients", "g.safetensors") == 2
    assert "holds two gradients of 'fc.weight'" in capsys.readouterr().err
