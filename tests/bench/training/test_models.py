"""The models of the suite ``train``: parameters, initial weights and outputs."""

from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.bench.training.data import TABLES
from kfac_engine.bench.training.repeated import EQUATIONS
from kfac_engine.bench.training.tasks import TASKS


def dense(*widths):
    return sum((a + 1) * b for a, b in pairwise(widths))


GPT = 96 * 96 + 3 * (2 * dense(96, 96) + 2 * dense(96, 48) + dense(96, 256, 96) + 4 * 96) + 192
# Parameters for images of 28 × 28, counted by layers: filters, biases, scales and shifts.
COUNTS = {
    "autoencoder": dense(784, 400, 200, 100, 30, 100, 200, 400, 784),
    "resnet": (
        (9 * 16 + 2 * 16)
        + (2 * 9 * 16 * 16 + 4 * 16)
        + (9 * 16 * 32 + 9 * 32 * 32 + 16 * 32 + 4 * 32)
        + (9 * 32 * 64 + 9 * 64 * 64 + 32 * 64 + 4 * 64)
        + dense(64, 10)
    ),
    "transformer": (
        96 * 96 + 64 * 96 + 2 * (4 * dense(96, 96) + dense(96, 384, 96) + 4 * 96) + 2 * 96
    )
    + dense(96, 96),
    "mlp": dense(784, 512, 256, 10),
    "lenet": dense(25, 8) + dense(25 * 8, 16) + dense(784, 64, 10),
    "digits": dense(64, 100, 50, 10),
    "cnn": dense(9, 16) + dense(9 * 16, 32) + dense(9 * 32, 32) + dense(32 * 49, 64, 10),
    "restorer": dense(25, 12) + dense(9 * 12, 12) + dense(25 * 12, 1),
    "function": dense(8, 64, 64, 4),
    "allconv": dense(9, 16) + dense(9 * 16, 32) + dense(9 * 32, 64) + dense(64, 64, 10),
    "llama": 96 * 96 + 3 * (2 * 96 * 96 + 2 * 96 * 48 + 3 * 96 * 256 + 2 * 96) + 96,
    "gpt": GPT,
    "vit": (
        dense(49, 64) + 16 * 64 + 3 * (4 * dense(64, 64) + dense(64, 128, 64) + 4 * 64) + 2 * 64
    )
    + dense(64, 10),
    "mobilenet": 9 * 16 + 32 + dense(64, 10) + sum(
        a * 4 * a + 9 * 4 * a + 4 * a * b + 2 * (8 * a + b)
        for a, b in ((16, 16), (16, 32), (32, 32), (32, 64))
    ),
    "gru": 96 * 64 + 3 * 128 * (64 + 128 + 2) + dense(128, 96),
    "unet": (
        dense(9, 16) + dense(9 * 16, 32) + dense(9 * 32, 32) + dense(9 * 32, 16) + dense(9 * 16, 1)
    )
    + 4 * 32 * 16 + 16 + 2 * (16 + 32 + 32 + 16),
    "image": dense(2, 64, 64, 64, 1),
    "colours": dense(2, 64, 64, 64, 3),
    "chirp": dense(1, 48, 48, 1),
    "surface": dense(3, 48, 48, 1),
    "compressed": dense(64, 48, 10, 48, 64),
    **{name: dense(len(e.low), 48, 48, 48, 1) for name, e in EQUATIONS.items()},
    "gpt-long": GPT,
    **{
        f"{name}{suffix}": dense(table.columns, 64, 32, table.outputs)
        for name, table in TABLES.items()
        for suffix in ("", "-raw")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_the_engine_trains_every_parameter_of_a_model(name):
    task = TASKS[name]
    model = task.model(28, 0)
    trained = {"trainable": tuple(model.weights)} if name in EQUATIONS else {}
    engine = ke.Engine.from_onnx(model.data, loss=task.loss, threads=1, **trained)
    assert sum(value.size for value in engine.parameters.values()) == COUNTS[name]
    assert set(engine.parameters) == set(model.weights)


@pytest.mark.parametrize("name", TASKS)
def test_initial_weights_depend_on_the_seed_alone(name):
    first, again, other = (TASKS[name].model(8, seed).data for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_initial_weights_have_the_deviations_of_their_rules():
    """Bounds of five standard errors of a deviation of that many numbers."""
    tanh, ramp = (models.perceptron((784, 400, 10), kind, 0).weights for kind in ("Tanh", "Relu"))
    relative = 5 / np.sqrt(2 * 400 * 784)
    assert tanh["0.weight"].std() == pytest.approx(np.sqrt(2 / (400 + 784)), rel=relative)
    assert ramp["0.weight"].std() == pytest.approx(np.sqrt(2 / 784), rel=relative)
    filters = models.cnn(28, 0).weights["conv1.weight"]
    assert abs(filters).max() <= 144**-0.5
    assert filters.std() == pytest.approx((3 * 144) ** -0.5, rel=5 / np.sqrt(2 * filters.size))
