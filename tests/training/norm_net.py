"""A classifier with a batch normalization in training form, whose running statistics move."""

import numpy as np

import kfac_engine as ke
from tests import models

FEATURES, CLASSES = 3, 2


def engine(seed=0):
    rng = np.random.default_rng(seed)
    net = models.Net(seed=seed)
    net.op(
        "BatchNormalization", "x", net.constant("scale", np.ones(FEATURES, np.float32)),
        net.constant("shift", np.zeros(FEATURES, np.float32)),
        net.constant("mean", rng.standard_normal(FEATURES).astype(np.float32)),
        net.constant("variance", np.ones(FEATURES, np.float32)), to="normal",
    )  # fmt: skip
    net.dense("z", "normal", FEATURES, CLASSES)
    model = net.model({"x": ["batch", FEATURES]}, {"z": ["batch", CLASSES]})
    return ke.Engine.from_onnx(model, loss="categorical", train_form=True, backend="numpy")


def batch(seed=0, n=48):
    """Inputs whose mean and variance are far from the initial running statistics."""
    rng = np.random.default_rng(seed)
    x = (3 + 2 * rng.standard_normal((n, FEATURES))).astype(np.float32)
    return x, (x.sum(axis=1) > 9).astype(np.int64)


def weights(engine):
    """Copies of the parameters and the running statistics by name."""
    return {n: np.array(v) for n, v in {**engine.parameters, **engine.buffers}.items()}
