"""Tables whose rows are picked by identifiers."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 2e-5
BATCH, VOCABULARY, WIDTH = 5, models.VOCABULARY, 3


def vector_of_ids(net):
    net.op("Gather", net.weight("table", VOCABULARY, WIDTH), "input", to="y")
    return ["y"]


def sentences(net):
    net.op("Gather", net.weight("table", VOCABULARY, WIDTH), "input", to="y")
    return ["y"]


def two_uses(net):
    """The ids, and one more than the ids."""
    table = net.weight("table", VOCABULARY + 1, WIDTH)
    first = net.op("Gather", table, "input", to="y0")
    following = net.op("Add", "input", net.constant("one", np.array(1)), to="following")
    net.op("Mul", first, net.op("Gather", table, following, to="y1"), to="y")
    return ["y0", "y1"]


# Name to builder, sides of the ids, kind, and the rows of each use as ids.
CASES = {
    "vector": (vector_of_ids, ("batch",), "embedding"),
    "sentences": (sentences, ("batch", 4), "embedding"),
    "two_uses": (two_uses, ("batch", 4), "embedding_multi"),
    "two_uses_of_a_vector": (two_uses, ("batch",), "embedding_multi"),
}


def finished(build, sides):
    net = models.Net()
    outputs = build(net)
    net.op("Tanh", net._nodes[-1].output[0], to="output")
    return net.model({"input": list(sides)}, {"output": [*sides, WIDTH]}, "int64"), outputs


@pytest.mark.parametrize("name", CASES)
def test_embedding_block_is_id_frequency_times_gradient_moment(name):
    build, sides, kind = CASES[name]
    proto, values = finished(build, sides)
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


@pytest.mark.parametrize("kind", ["int64", "float32"])
@pytest.mark.parametrize("sides", [("batch",), ("batch", 4)], ids=["vector", "sentences"])
def test_one_hot_rows_of_ids_outside_the_table_are_zero(sides, kind):
    net = models.Net()
    depth, values = np.array(VOCABULARY, kind), np.array([0, 1], np.float32)
    hot = net.op("OneHot", "input", net.constant("n", depth), net.constant("v", values), to="hot")
    net.op("MatMul", hot, net.weight("table", VOCABULARY, WIDTH), to="y")
    net.op("Tanh", "y", to="output")
    model = net.model({"input": list(sides)}, {"output": [*sides, WIDTH]}, kind)
    shape = (BATCH, *sides[1:])
    ids = np.random.default_rng(0).integers(-2 * VOCABULARY, 2 * VOCABULARY, shape)
    feeds = {"input": ids.astype(kind)}
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
