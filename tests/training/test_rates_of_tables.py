"""Adam's steps on embeddings and on layers of many classes, by their width and use."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training import weight_roles
from tests.models import parsed

VOCABULARY = 12
FEATURES = "x = Gather (table, ids) r = Tanh (x) z = Mul (r, scale)"
TIED = f"{FEATURES} head = Transpose <perm = [1, 0]> (table) y = MatMul (z, head)"
UNTIED = f"{FEATURES} y = MatMul (z, head)"


def moves(body, width, scale):
    """Return the moves of the table's entries, each divided by the sign of its gradient."""
    rng = np.random.default_rng(width)
    weights = {"table": rng.standard_normal((VOCABULARY, width)) / 7, "scale": np.array(scale)}
    if body is UNTIED:
        weights["head"] = rng.standard_normal((width, VOCABULARY)) / 7
    text = f"net (int64[n,3] ids) => (double[n,3,{VOCABULARY}] y) {{ {body} }}"
    trained = [name for name in weights if name != "scale"]
    engine = ke.Engine.from_onnx(parsed(text, weights), loss="categorical", trainable=trained)
    batch = {"ids": np.arange(VOCABULARY).reshape(4, 3)}, rng.integers(0, VOCABULARY, (4, 3))
    gradient = engine.gradients(*batch).gradients["table"]
    ke.KfacOptimizer(engine, weight_decay=0).step(*batch)
    large = np.abs(gradient) > 1e-5  # far above the ε of Adam
    assert large.mean() > 0.5
    return ((weights["table"] - engine.parameters["table"]) / np.sign(gradient))[large]


@pytest.mark.parametrize(
    ("width", "scale", "rate"),
    [
        (32, 1.0, 0.004),
        (256, 1.0, 0.004),
        (1024, 1.0, 0.001),
        (1024, 0.5, 0.002),
        (1024, 1024**-0.5, 0.004),
        (128, 4.0, 0.002),
    ],
)
def test_a_table_of_logits_has_a_rate_by_the_features_and_their_scale(width, scale, rate):
    np.testing.assert_allclose(moves(TIED, width, scale), rate, rtol=2e-3)


def test_other_embeddings_have_the_whole_rate():
    np.testing.assert_allclose(moves(UNTIED, 1024, 1.0), 0.004, rtol=2e-3)


CLASSES = weight_roles.LARGEST_DIVIDED + 1
HIDDEN = "h = MatMul (x, hidden) z = Tanh (h)"
HEAD = f"{HIDDEN} y0 = MatMul (z, head) y = Add (y0, bias)"


def dense(hidden, classes):
    """A network 3-hidden-classes with the layers ``hidden`` and ``head``."""
    rng = np.random.default_rng(classes)
    weights = {
        "hidden": rng.standard_normal((3, hidden)),
        "head": rng.standard_normal((hidden, classes)) / hidden**0.5,
        "bias": np.zeros(classes),
    }
    return parsed(f"net (double[n,3] x) => (double[n,{classes}] y) {{ {HEAD} }}", weights)


def rows(step, classes, loss):
    rng = np.random.default_rng(step)
    n = (5, 2, 7)[step % 3]
    targets = rng.integers(0, classes, n) if loss == "categorical" else rng.random((n, classes))
    return {"x": rng.standard_normal((n, 3))}, targets


def by_adam(model, classes, loss="categorical", factor=1.0, steps=5):
    """Return the largest differences of the weights from Adam's steps, relative to the rate."""
    engine = ke.Engine.from_onnx(model, loss=loss)
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    expected = {name: value.copy() for name, value in engine.parameters.items()}
    mean, square = ({n: np.zeros(v.shape) for n, v in expected.items()} for _ in range(2))
    for t in range(1, steps + 1):
        batch = rows(t, classes, loss)
        gradients = engine.gradients(*batch).gradients
        optimizer.step(*batch)
        for name, g in gradients.items():
            mean[name] = 0.85 * mean[name] + 0.15 * g
            square[name] = 0.999 * square[name] + 0.001 * g**2
            m, v = mean[name] / (1 - 0.85**t), square[name] / (1 - 0.999**t)
            rate = 0.004 * (factor if name == "head" else 1.0)
            expected[name] -= rate * m / (np.sqrt(v) + 1e-8)
    return {n: np.abs(engine.parameters[n] - v).max() / 0.004 for n, v in expected.items()}


@pytest.mark.parametrize(("few", "factor"), [(256, 1.0), (2, 0.5)])
def test_adam_updates_a_layer_of_very_many_classes(few, factor, monkeypatch):
    monkeypatch.setattr(weight_roles, "_FEW_FEATURES", few)
    found = by_adam(dense(4, CLASSES), CLASSES, factor=factor)
    assert max(found["head"], found["bias"]) < 1e-9
    assert found["hidden"] > 0.1


@pytest.mark.parametrize(
    ("hidden", "outputs", "loss"),
    [
        (4, CLASSES - 1, "categorical"),  # the factor of the outputs has blocks
        (4, CLASSES, "normal"),  # outputs that are no classes
        (CLASSES, 10, "categorical"),  # a wide layer that is not the last
    ],
)
def test_other_wide_layers_are_not_updated_by_adam(hidden, outputs, loss):
    found = by_adam(dense(hidden, outputs), outputs, loss, steps=2)
    assert min(found["hidden"], found["head"]) > 0.1
