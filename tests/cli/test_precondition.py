"""`precondition` writes what closed forms say, and goes on where its state file stopped."""

import json

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from kfac_engine.__main__ import main
from tests.comparing import assert_near
from tests.models import linear

DAMPING = 0.3
DECAY = 0.95  # the engine's default
# float32 forward pass and statistics against float64 closed forms.
ROUNDING = 2e-5


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
    """Packed `(w; b)` of one kind of gradient in the output file."""
    out = load_file("out.safetensors")
    return np.vstack([out[f"{kind}/fc.weight"], out[f"{kind}/fc.bias"]]).astype(float)


class Truth:
    """Gradient and empirical factors of the linear classifier in closed form, float64."""

    def __init__(self, batch="one"):
        tensors = onnx.load("model.onnx").graph.initializer
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
        x = np.load(f"{batch}.npz")["input"].astype(float)
        targets = np.load(f"{batch}_y.npz")["targets"]
        z = x @ weights["fc.weight"] + weights["fc.bias"]
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        ds = p - np.eye(3)[targets]
        a = np.hstack([x, np.ones((len(x), 1))])
        n = len(x)
        self.loss = -np.log(p[np.arange(n), targets]).mean()
        self.gradient = a.T @ ds / n
        self.A, self.G = a.T @ a / n, ds.T @ ds / n


def natural(A, G, V):
    """`(A + π√λ I)⁻¹ V (G + √λ/π I)⁻¹`."""
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = np.sqrt(DAMPING)
    left = np.linalg.inv(A + pi * root * np.eye(len(A)))
    return left @ V @ np.linalg.inv(G + root / pi * np.eye(len(G)))


def test_both_gradients_equal_their_closed_forms(folder, capsys):
    assert run("--mode", "empirical", "--json") == 0
    truth = Truth()
    assert_near(written("gradient"), truth.gradient, ROUNDING)
    assert_near(written("natural_gradient"), natural(truth.A, truth.G, truth.gradient), ROUNDING)
    summary = json.loads(capsys.readouterr().out)
    assert summary["loss"] == pytest.approx(truth.loss, rel=ROUNDING)
    norm = np.linalg.norm(truth.gradient[:-1])
    assert summary["parameters"]["fc.weight"]["gradient_norm"] == pytest.approx(norm, rel=ROUNDING)


@pytest.mark.parametrize("prefix", ["", "gradient/"], ids=["bare", "prefixed"])
def test_gradients_of_the_users_own_are_preconditioned(prefix, folder):
    rng = np.random.default_rng(1)
    w, b = rng.standard_normal((4, 3)), rng.standard_normal(3)
    mine = {f"{prefix}fc.weight": w.astype(np.float32), f"{prefix}fc.bias": b.astype(np.float32)}
    save_file(mine, "mine.safetensors")
    assert run("--mode", "empirical", "--gradients", "mine.safetensors") == 0
    truth, V = Truth(), np.vstack([w, b])
    assert_near(written("gradient"), V, ROUNDING)
    assert_near(written("natural_gradient"), natural(truth.A, truth.G, V), ROUNDING)


def test_own_gradients_need_no_targets_where_targets_are_sampled(folder):
    assert run() == 0
    (folder / "out.safetensors").rename("mine.safetensors")
    assert run("--gradients", "mine.safetensors", targets=None) == 0


def test_the_state_carries_the_averages_from_call_to_call(folder):
    for batch in ("one", "two"):
        arguments = ["--mode", "empirical", "--state", "state.safetensors"]
        assert run(*arguments, batch=batch, targets=f"{batch}_y.npz") == 0
    one, two = Truth("one"), Truth("two")
    A, G = ((DECAY * old + new) / (DECAY + 1) for old, new in ((one.A, two.A), (one.G, two.G)))
    assert_near(written("natural_gradient"), natural(A, G, two.gradient), ROUNDING)


def test_gradients_under_both_spellings_are_refused(folder, capsys):
    one = np.ones((4, 3), np.float32)
    both = {"fc.weight": one, "gradient/fc.weight": 2 * one, "fc.bias": one[0]}
    save_file(both, "g.safetensors")
    assert run("--gradients", "g.safetensors") == 2
    assert "holds two gradients of 'fc.weight'" in capsys.readouterr().err
