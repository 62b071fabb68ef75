"""Picking goes back as adding, whatever the number of threads."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from kfac_engine.runtime.model import load_model

# Enough additions into few rows that ONNX Runtime spreads an operator over its threads.
ROWS, WIDTH, PICKS = 4, 256, 4096
THREADS = 4
ATTEMPTS = 5

# Operator to the axes that bring a vector of row numbers into the form of its indices.
PICKERS = {"Gather": (), "GatherND": (-1,), "GatherElements": (-1,)}


def lookup(op, table):
    """``table[rows]`` for a fed vector ``rows``, written with ``op``."""
    nodes, indices = [], "rows"
    constants = {"table": table, "axes": np.array(PICKERS[op], "int64")}
    if PICKERS[op]:
        nodes.append(helper.make_node("Unsqueeze", ["rows", "axes"], ["column"]))
        indices = "column"
    if op == "GatherElements":
        constants["sides"] = np.array([1, table.shape[1]])
        nodes.append(helper.make_node("Expand", ["column", "sides"], ["grid"]))
        indices = "grid"
    nodes.append(helper.make_node(op, ["table", indices], ["picked"]))
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "lookup",
        [helper.make_tensor_value_info("rows", TensorProto.INT64, ["picks"])],
        [helper.make_tensor_value_info("picked", TensorProto.FLOAT, ["picks", table.shape[1]])],
        [numpy_helper.from_array(array, name) for name, array in constants.items() if name in read],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


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
