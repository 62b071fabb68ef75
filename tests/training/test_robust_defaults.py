"""The defaults of K-FAC on inputs from 0 to 255, targets of any unit and batches of any size.

No run may return to earlier parameters. ``PAIRS`` are sixty settings and seeds; a sample of them
runs each night.
"""

import warnings

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.bench.training.data import load_digits, smooth_function

STEPS = 60
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
def test_no_run_with_defaults_diverges(pair):
    records = run(*pair)
    assert len(records) == STEPS
    assert not any(record["rolled_back"] for record in records)
    losses = [record["loss"] for record in records]
    assert np.median(losses[-5:]) < losses[0]
