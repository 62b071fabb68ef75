"""Arrays with a mask are refused wherever arrays are read, because NumPy would drop the mask."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.sklearn import OnnxClassifier, OnnxRegressor
from tests import models

MODEL = models.mlp()
X = models.random_inputs(MODEL, batch=8)
TARGETS = np.zeros(8, int)
ROWS, LABELS = np.random.default_rng(0).standard_normal((8, 3)), np.arange(8) % 2


def masked(arrays):
    """Arrays whose first entry is masked, of the same class as the argument."""
    if isinstance(arrays, dict):
        return {name: masked(array) for name, array in arrays.items()}
    mask = np.zeros(np.shape(arrays), bool)
    mask.flat[0] = True
    return np.ma.masked_array(arrays, mask)


@pytest.fixture(scope="module")
def engine():
    engine = ke.Engine.from_onnx(MODEL, loss="categorical", threads=1)
    engine.observe(X)
    return engine


@pytest.fixture(scope="module")
def curvature():
    return ke.curvature(MODEL, (X, TARGETS), loss="categorical")


CALLS = {
    "inputs": lambda e, c: e.predict(masked(X)),
    "targets": lambda e, c: e.loss(X, masked(TARGETS)),
    "data": lambda e, c: ke.fit(MODEL, (masked(X), TARGETS), loss="categorical"),
    "parameters": lambda e, c: e.set_parameters(masked(e.parameters)),
    "gradients": lambda e, c: e.precondition(masked(e.parameters)),
    "matched arrays": lambda e, c: ke.match_parameters(e, masked(e.parameters)),
    "converted arrays": lambda e, c: ke.match_parameters(e, e.parameters).to_engine(
        masked(e.parameters)
    ),
    "vectors": lambda e, c: c.multiply(masked(e.parameters)),
    "merged models": lambda e, c: ke.merge([e.parameters, masked(e.parameters)], [c, c]),
    "examples of a classifier": lambda e, c: OnnxClassifier().fit(masked(ROWS), LABELS),
    "images of a classifier": lambda e, c: OnnxClassifier().fit(masked(ROWS[:, None]), LABELS),
    "labels": lambda e, c: OnnxClassifier().fit(ROWS, masked(LABELS)),
    "classes": lambda e, c: OnnxClassifier().partial_fit(ROWS, LABELS, masked(np.arange(2))),
    "targets of a regressor": lambda e, c: OnnxRegressor().fit(ROWS, masked(ROWS[:, 0])),
    "predicted examples": lambda e, c: (
        OnnxClassifier(epochs=1).fit(ROWS, LABELS).predict(masked(ROWS))
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_masked_array_is_refused(engine, curvature, call):
    with pytest.raises(ke.InputError, match="a masked array cannot be used"):
        CALLS[call](engine, curvature)
