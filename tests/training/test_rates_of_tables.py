"""Adam's first step on embeddings, ``−rate · sign(g)`` by definition, by their width and use."""

import numpy as np
import pytest

import kfac_engine as ke
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
