"""Tables whose rows are picked by identifiers."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 2e-5
BATCH, VOCABULARY, WIDTH = 5, models.VOCABULARY, 3


ONE = f"table({VOCABULARY},{WIDTH})", "y = Gather(table, input)  ", ["y"]
# The ids, and one more than the ids.
TWO = (
    f"table({VOCABULARY + 1},{WIDTH}) one:1",
    """y0 = Gather(table, input)  following = Add(input, one)  y1 = Gather(table, following)
       y = Mul(y0, y1)  """,
    ["y0", "y1"],
)
# Sides of the ids, kind, constants and nodes, and the rows of each use.
CASES = {
    "vector": ("batch", "embedding", *ONE),
    "sentences": ("batch,4", "embedding", *ONE),
    "two_uses": ("batch,4", "embedding_multi", *TWO),
    "two_uses_of_a_vector": ("batch", "embedding_multi", *TWO),
}


@pytest.mark.parametrize("name", CASES)
def test_embedding_block_is_id_frequency_times_gradient_moment(name):
    sides, kind, constants, nodes, values = CASES[name]
    sides = f"{sides} -> {sides},{WIDTH}"
    proto = models.written(sides, constants, nodes + "output = Tanh(y)", "int64")
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto, loss="normal", estimation_mode="empirical", reduction="batch_mean"
    )
    (layer,) = engine.layers
    assert (layer.kind, layer.parameters) == (kind, ("table",))
    trace = ke.load_model(proto).run(feeds)
    engine.observe(feeds, np.zeros_like(trace["output"]))
    ds = trace.vjp({"output": 2 * trace["output"]}, values)
    ids = np.concatenate([(feeds["input"] + k).ravel() for k in range(len(values))])
    g = np.concatenate([ds[value].reshape(-1, WIDTH) for value in values]).astype("float64")
    one_hot = np.eye(engine.parameters["table"].shape[0])[ids]
    A, G = np.diag(np.mean(one_hot, axis=0)), g.T @ g / len(g)
    expected = len(ids) / BATCH * np.kron(A, G)
    found = engine.collection.fisher_blocks["table"].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["int64", "float"])
@pytest.mark.parametrize("sides", ["batch", "batch,4"], ids=["vector", "sentences"])
def test_one_hot_rows_of_ids_outside_the_table_are_zero(sides, kind):
    model = models.written(
        f"{sides} -> {sides},{WIDTH}",
        f"n:{VOCABULARY}{'.' if kind == 'float' else ''} v=0.,1. table({VOCABULARY},{WIDTH})",
        "hot = OneHot(input, n, v)  y = MatMul(hot, table)  output = Tanh(y)",
        kind,
    )
    shape = (BATCH, 4) if "4" in sides else (BATCH,)
    ids = np.random.default_rng(0).integers(-2 * VOCABULARY, 2 * VOCABULARY, shape)
    feeds = {"input": ids.astype(kind.replace("float", "float32"))}
    engine = ke.Engine.from_onnx(
        model, loss="normal", estimation_mode="empirical", reduction="batch_mean"
    )
    trace = ke.load_model(model).run(feeds)
    engine.step(feeds, np.zeros_like(trace["output"]))
    ds = trace.vjp({"output": 2 * trace["output"]}, ["y"])["y"]
    g, wrapped = ds.reshape(-1, WIDTH).astype(float), np.where(ids < 0, ids + VOCABULARY, ids)
    rows = (wrapped.ravel()[:, None] == np.arange(VOCABULARY)).astype(float)
    assert 0 < rows.sum() < ids.size
    np.testing.assert_array_equal(trace["hot"].reshape(rows.shape), rows)
    expected = ids.size / BATCH * np.kron(rows.T @ rows / len(rows), g.T @ g / len(g))
    block = engine.collection.fisher_blocks["table"].full_fisher_block()
    np.testing.assert_allclose(block, expected, atol=SINGLE * np.abs(expected).max())
