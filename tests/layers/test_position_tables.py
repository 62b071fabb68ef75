"""Tables whose rows are picked by positions that the shape of the data tells."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few dozen terms of size one.
SINGLE = 1e-5
BATCH, TIME, ROWS, WIDTH = 5, 4, 10, 3
TOKENS = ("batch", "time", WIDTH)


def counted(net, dtype="int64"):
    """``0 … time − 1``, cut out of a constant as exporters of transformers write it."""
    axis = net.constant("axis", np.array([0]))
    time = net.op("Shape", "input", to="time", start=1, end=2)
    numbers = net.constant("numbers", np.arange(ROWS, dtype=dtype))
    return net.op("Slice", numbers, net.constant("start", np.array([0])), time, axis, to="ids")


def rows_of(net, ids):
    return net.op("Gather", net.weight("table", ROWS, WIDTH), ids, to="rows")


def added(net):
    net.op("Add", "input", rows_of(net, counted(net)), to="output")


def added_with_an_axis(net):
    rows = net.op("Unsqueeze", rows_of(net, counted(net)), "axis", to="wide")
    net.op("Add", rows, "input", to="output")


def of_narrow_identifiers(net):
    net.op("Add", "input", rows_of(net, counted(net, "int32")), to="output")


def of_each_example(net):
    """Identifiers that are expanded to those of each example, as token types are."""
    sides = net.op("Shape", "input", to="sides", start=0, end=2)
    net.op("Add", rows_of(net, net.op("Expand", counted(net), sides, to="wide")), "input",
           to="output")  # fmt: skip


def model_of(build, sides=TOKENS):
    net = models.Net()
    build(net)
    return net.model({"input": sides}, {"output": sides})


def feeds_of(batch, time):
    rng = np.random.default_rng(0)
    return {"input": rng.standard_normal((batch, time, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize(
    "build", [added, added_with_an_axis, of_narrow_identifiers, of_each_example]
)
def test_position_table_block_equals_dense_fisher_matrix(build):
    proto, feeds = model_of(build), feeds_of(BATCH, TIME)
    engine = ke.Engine.from_onnx(
        proto, loss="normal", estimation_mode="exact", reduction="batch_mean"
    )
    (layer,) = engine.layers
    assert (layer.kind, layer.parameters) == ("embedding", ("table",))
    engine.observe(feeds)
    expected = oracle.dense_fisher(proto, feeds, "output", ["table"], "normal")
    found = engine.collection.fisher_blocks["table"].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE)


def test_other_sequence_lengths_count_their_positions():
    engine = ke.Engine.from_onnx(
        model_of(added), loss="normal", estimation_mode="exact", ema_decay=0.0
    )
    for batch, time in ((BATCH, TIME), (2, 6)):
        engine.observe(feeds_of(batch, time))
        found = np.diag(engine.collection.fisher_blocks["table"].full_fisher_block())
        # The variance is 1/2, and the loss is a mean over positions.
        expected = np.repeat(np.arange(ROWS) < time, WIDTH) * 2 / time
        np.testing.assert_allclose(found, expected, atol=SINGLE)
