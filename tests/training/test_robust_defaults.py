"""The defaults of K-FAC on inputs from 0 to 255, targets of any unit and batches of any size.

No run may return to earlier parameters, and all learn. ``PAIRS`` are sixty settings and seeds; a
sample of them runs each night.
"""

import warnings

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.bench.training.data import load_digits, smooth_function

STEPS = 150
UNITS = (1e-3, 1.0, 1e3, 1e6)
NETWORKS = {
    "mlp": lambda seed: models.perceptron((64, 64, 32, 10), "Relu", seed),
    "cnn": lambda seed: models.cnn(8, seed),
    "regression": lambda seed: models.perceptron((8, 64, 32, 4), "Relu", seed),
}
# Network, unit of the targets (None for classes), size of a batch, seed.
PAIRS = [
    *(("regression", unit, size, seed)
      for unit in UNITS for size in (8, 64, 512, 2048) for seed in (0, 1)),
    *((name, None, size, seed)
      for name in ("mlp", "cnn") for size in (8, 16, 64, 128, 512, 1024, 1400) for seed in (0, 1)),
]  # fmt: skip


def data_of(network, unit):
    if unit is not None:
        data = smooth_function(2048, 1)
        return ((data.x + 1) * 127.5).astype(np.float32), (unit * data.y).astype(np.float32)
    images = load_digits()
    shape = (1, 8, 8) if network == "cnn" else (64,)
    return 255 * images.pixels.reshape(-1, *shape), images.labels


def run(network, unit, size, seed):
    """Return the records of a run with defaults; a warning is an error."""
    loss = "categorical" if unit is None else "normal"
    engine = ke.Engine.from_onnx(NETWORKS[network](seed).data, loss=loss, threads=1, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ke.fit(
            engine, data_of(network, unit), batch_size=size, steps=STEPS, seed=seed
        ).records


@pytest.mark.nightly
@pytest.mark.parametrize("pair", PAIRS[::5], ids=str)
def test_runs_with_defaults_learn(pair):
    records = run(*pair)
    assert len(records) == STEPS
    assert not any(record["rolled_back"] for record in records)
    losses = [record["loss"] for record in records]
    assert max(losses[:20]) < 2 * losses[0]
    network, unit, *_ = pair
    _, targets = data_of(network, unit)
    if unit is None:
        assert np.median(losses[-10:]) < 1
    else:
        error = np.median(losses[-10:]) - targets.shape[1] / 2 * np.log(np.pi)
        assert error < 0.7 * targets.var(axis=0).sum()


# Scale and centre of the inputs, deviations and mean of the targets.
OTHER_UNITS = {
    "inputs from 0 to 255": (128.0, 128.0, 1.0, 0.0),
    "small targets": (1.0, 0.0, 1e-3, 0.0),
    "large inputs, small targets": (1000.0, 5000.0, 1e-3, 0.0),
    "targets far from zero": (1.0, 0.0, 10.0, 300.0),
    "both far from zero": (300.0, 1000.0, 10.0, -300.0),
}


@pytest.mark.parametrize(
    ("unit", "loss", "outliers"),
    [
        *((unit, "normal", 0) for unit in OTHER_UNITS),
        *((unit, loss, 0) for unit in ("small targets", "targets far from zero")
          for loss in ("l1", "huber")),
        ("targets far from zero", "l1", 40),
        ("targets far from zero", "huber", 40),
    ],
)  # fmt: skip
def test_functions_are_learned_in_any_unit(unit, loss, outliers):
    """The truth: the targets of rows that are held out, of which none is an outlier."""
    scale, centre, of_targets, mean = OTHER_UNITS[unit]
    rng = np.random.default_rng(0)
    z = rng.uniform(-1, 1, (2000, 4))
    y = np.stack([np.sin(3 * z[:, 0]) + z[:, 1], z[:, 2] * z[:, 3] - z[:, 0]], axis=1)
    x = (scale * z + centre).astype(np.float32)
    y = (of_targets * y + mean).astype(np.float32)
    y[:outliers] += 1000 * rng.standard_normal((outliers, 2)).astype(np.float32)
    model = models.perceptron((4, 32, 32, 2), "Relu", 0)
    engine = ke.Engine.from_onnx(model.data, loss=loss, threads=1, seed=0)
    ke.fit(engine, (x[:1600], y[:1600]), batch_size=64, steps=100, seed=0)
    errors = ((engine.predict(x[1600:]) - y[1600:]) ** 2).mean()
    assert errors < 0.6 * y[1600:].var(axis=0).mean()
