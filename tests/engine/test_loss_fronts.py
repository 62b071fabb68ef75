"""Every option of every loss in every front: all give the gradient of the same loss object."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.losses import LOSSES, LossKind
from tests import models
from tests.graph.running import outputs

N, CLASSES = 6, 3
RNG = np.random.default_rng(0)
NUMBERS = [0.5, 2.0, 1.5]
IDS = np.array([0, 1, 2, 7, 1, 2])
BITS = np.where(RNG.random((N, CLASSES)) < 0.2, 7, RNG.integers(0, 2, (N, CLASSES)))
REALS = np.where(BITS == 7, 7, RNG.standard_normal((N, CLASSES)))
COUNTS = np.where(BITS == 7, 7, RNG.integers(0, 5, (N, CLASSES)))
TARGETS = {
    "categorical": IDS,
    "multi_bernoulli": BITS.astype(np.float32),
    "normal": REALS.astype(np.float32),
    "l1": REALS.astype(np.float32),
    "huber": REALS.astype(np.float32),
    "poisson": COUNTS.astype(np.float32),
}
OPTIONS = {
    "ignore_index": 7,
    "class_weights": NUMBERS,
    "positive_weights": NUMBERS,
    "label_smoothing": 0.2,
}
# Options of a loss, next to ignore_index.
OWN = {
    "categorical": ("class_weights", "label_smoothing"),
    "multi_bernoulli": ("positive_weights", "label_smoothing"),
}
CELLS = [
    pytest.param(name, dict.fromkeys(("ignore_index", option), None), id=f"{name}-{option}")
    for name in TARGETS
    for option in ("ignore_index", *OWN.get(name, ()))
]
MODEL = models.mlp()
INPUTS = models.random_inputs(MODEL, batch=N)


def from_onnx(loss, targets, folder):
    return ke.Engine.from_onnx(MODEL, loss=loss).gradients(INPUTS, targets).gradients


def from_step(loss, targets, folder):
    return ke.Engine.from_onnx(MODEL, loss=loss).step(INPUTS, targets).gradients


def from_precondition(loss, targets, folder):
    return ke.precondition(MODEL, INPUTS, targets, loss=loss).gradients


def from_fit(loss, targets, folder):
    """The change of the parameters by a step of gradient descent of rate 0.01."""
    start = ke.Engine.from_onnx(MODEL, loss="categorical").parameters
    history = ke.fit(
        MODEL, (INPUTS, targets), loss=loss, optimizer="sgd", batch_size=N, steps=1,
        schedule="constant",
    )  # fmt: skip
    trained = history.engine.parameters
    return {name: (start[name] - trained[name]) / 0.01 for name in start}


def from_file(loss, targets, folder):
    found = outputs(ke.differentiate(MODEL, loss), {**INPUTS, "targets": targets})
    return {name.removeprefix("gradient/"): array for name, array in found.items()}


def from_command(loss, targets, folder):
    (folder / "m.onnx").write_bytes(MODEL.SerializeToString())
    np.savez(folder / "x.npz", **INPUTS, targets=targets)
    np.save(folder / "n.npy", NUMBERS)
    files = {k: str(folder / "n.npy") for k in loss.options if k.endswith("weights")}
    options = ", ".join(f"{k}={v!r}" for k, v in {**loss.options, **files}.items())
    out = folder / "g.safetensors"
    arguments = ["precondition", folder / "m.onnx", "--inputs", folder / "x.npz", "-o", out]
    assert main([*map(str, arguments), "--loss", f"{loss.name}({options})"]) == 0
    found = load_file(out)
    return {k.removeprefix("gradient/"): v for k, v in found.items() if k.startswith("gradient/")}


FRONTS = [from_onnx, from_step, from_precondition, from_fit, from_file, from_command]


@pytest.mark.parametrize(("name", "chosen"), CELLS)
@pytest.mark.parametrize("front", FRONTS, ids=lambda f: f.__name__.removeprefix("from_"))
def test_every_front_takes_every_option(name, chosen, front, tmp_path, capsys):
    options, targets = {key: OPTIONS[key] for key in chosen}, TARGETS[name]
    loss = LOSSES[name]("output", targets="targets", **options)
    expected = ke.Engine.from_onnx(MODEL, loss=loss).gradients(INPUTS, targets).gradients
    found = front(LossKind(name, **options), targets, tmp_path)
    capsys.readouterr()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=0, atol=2e-4 * abs(array).max())
    others = {key: value for key, value in options.items() if key == "ignore_index"}
    if others != options:  # the other option is not the cause of the agreement
        plain = ke.Engine.from_onnx(MODEL, loss=LossKind(name, **others))
        (key, array), *_ = plain.gradients(INPUTS, targets).gradients.items()
        assert abs(array - expected[key]).max() > 1e-2 * abs(array).max()


def test_the_table_has_every_loss():
    classes = {LOSSES[name] for name in LOSSES if not LOSSES[name].ordered}  # they have own tests
    assert {LOSSES[name] for name in TARGETS} == classes
