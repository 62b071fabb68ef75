"""Picking goes back as adding, whatever the number of threads."""

import numpy as np
import pytest

from kfac_engine.runtime.model import load_model
from tests.models import parsed

# Enough additions into few rows that ONNX Runtime spreads an operator over its threads.
ROWS, WIDTH, PICKS = 4, 256, 4096
THREADS = 4
ATTEMPTS = 5

# Operator to the nodes that bring a vector of row numbers into the form of its indices.
COLUMN = "column = Unsqueeze (rows, axes)"
PICKERS = {
    "Gather": "picked = Gather (table, rows)",
    "GatherND": f"{COLUMN}  picked = GatherND (table, column)",
    "GatherElements": f"{COLUMN}  grid = Expand (column, sides)"
    "  picked = GatherElements (table, grid)",
}


def lookup(op, table):
    """``table[rows]`` for a fed vector ``rows``, written with ``op``."""
    return parsed(
        f"lookup (int64[picks] rows) => (float[picks,{table.shape[1]}] picked) {{ {PICKERS[op]} }}",
        {"table": table, "axes": [-1], "sides": [1, table.shape[1]]},
    )


@pytest.mark.parametrize("op", PICKERS)
def test_gather_gradient_sums_repeated_rows_with_several_threads(op):
    rng = np.random.default_rng(0)
    model = load_model(lookup(op, np.ones((ROWS, WIDTH), "float32")), threads=THREADS)
    rows = rng.integers(-ROWS, ROWS, PICKS)
    # Small integers: float32 adds them exactly in any order.
    cotangent = rng.integers(-3, 4, (PICKS, WIDTH)).astype("float32")
    truth = np.zeros((ROWS, WIDTH))
    np.add.at(truth, rows, cotangent)
    trace = model.run({"rows": rows})
    for _ in range(ATTEMPTS):
        found = trace.vjp({"picked": cotangent}, ["table"])["table"]
        np.testing.assert_array_equal(found, truth)
