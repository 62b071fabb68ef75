"""Tables whose rows are picked by positions that the shape of the data tells."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few dozen terms of size one.
SINGLE = 1e-5
BATCH, TIME, ROWS, WIDTH = 5, 4, 10, 3
# Positions ``0 … time − 1``, cut out of a constant as exporters of transformers write it.
NUMBERS = ", ".join(map(str, range(ROWS)))
COUNTED = f"""numbers = Constant<value=int64[{ROWS}] {{{NUMBERS}}}>()
    time = Shape<start=1, end=2>(input)  ids = Slice(numbers, zero, time, zero)  """
ADDED = COUNTED + "rows = Gather(table, ids)  output = Add(input, rows)"
CASES = {
    "added": ADDED,
    "added with an axis": COUNTED
    + "rows = Gather(table, ids)  wide = Unsqueeze(rows, zero)  output = Add(wide, input)",
    "of narrow identifiers": ADDED.replace("int64", "int32"),
    # Identifiers that are expanded to those of each example, as token types are.
    "of each example": COUNTED
    + """sides = Shape<start=0, end=2>(input)  wide = Expand(ids, sides)
        rows = Gather(table, wide)  output = Add(rows, input)""",
}


def model_of(name):
    return models.written(f"batch,time,{WIDTH}", f"table({ROWS},{WIDTH}) zero=0", CASES[name])


def feeds_of(batch, time):
    rng = np.random.default_rng(0)
    return {"input": rng.standard_normal((batch, time, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize("name", CASES)
def test_position_table_block_equals_dense_fisher_matrix(name):
    proto, feeds = model_of(name), feeds_of(BATCH, TIME)
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
        model_of("added"), loss="normal", estimation_mode="exact", ema_decay=0.0
    )
    for batch, time in ((BATCH, TIME), (2, 6)):
        engine.observe(feeds_of(batch, time))
        found = np.diag(engine.collection.fisher_blocks["table"].full_fisher_block())
        # The variance is 1/2, and the loss is a mean over positions.
        expected = np.repeat(np.arange(ROWS) < time, WIDTH) * 2 / time
        np.testing.assert_allclose(found, expected, atol=SINGLE)
