"""Sizes of the file determine slices of weights; sizes of data do not."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from tests.graph.running import run_graph, run_model
from tests.models import Net

# The nodes that compute the size of the hidden state, 4, from a state (1, n, 4) of zeros.
STATIC = {
    "an axis": [("Shape", ["state"], {"start": 2, "end": 3})],
    "the last axis": [("Shape", ["state"], {"start": -1})],
    "an entry of the shape": [("Shape", ["state"], {}), ("Slice", ["0", "[2]", "[3]"], {})],
    "gathered": [
        ("Shape", ["state"], {"start": 2}), ("Gather", ["0", "0th"], {}),
        ("Unsqueeze", ["1", "[0]"], {}),
    ],
}  # fmt: skip
# Sizes that differ between batches, and arithmetic that no exporter writes.
VARYING = {
    "the number of examples": [("Shape", ["state"], {"start": 1, "end": 2})],
    "a whole shape": [("Shape", ["state"], {}), ("ReduceMax", ["0"], {})],
    "values": [("ArgMax", ["x"], {"axis": 0, "keepdims": 0}), ("Slice", ["0", "[0]", "[1]"], {})],
    "many entries": [
        ("Shape", ["state"], {"start": 2}),
        *(("Concat", [f"{i}", f"{i}"], {"axis": 0}) for i in range(8)),
        ("ReduceMin", ["8"], {}),
    ],
}


def model(nodes):
    """A product with the second half of a weight's rows before the first, as gates are written."""
    net = Net()
    numbers = {f"[{i}]": np.array([i]) for i in range(4)} | {"0th": np.array(0), "[4]": [4]}
    for name, array in numbers.items():
        net.constant(name, np.asarray(array))
    rows = net.op("Shape", "x", to="rows", end=1)
    shape = net.op("Concat", "[1]", rows, "[4]", to="shape", axis=0)
    net.op("Expand", net.constant("zero", np.zeros(1, np.float32)), shape, to="state")
    for place, (op, operands, attributes) in enumerate(nodes):
        to = "size" if place == len(nodes) - 1 else str(place)
        net.op(op, *operands, to=to, **attributes)
    net.op("Mul", "size", "[2]", to="double")
    w = net.weight("w", 8, 3)
    first = net.op("Slice", w, "[0]", "size", "[0]", to="first")
    second = net.op("Slice", w, "size", "double", "[0]", to="second")
    gates = net.op("Concat", second, first, to="gates", axis=0)
    net.op("MatMul", "x", net.op("Transpose", gates, to="t"), to="y")
    return net.model({"x": ["n", 3]}, {"y": ["n", 8]})


X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


@pytest.mark.parametrize("nodes", STATIC.values(), ids=STATIC)
def test_parts_of_a_weight_are_those_of_one_layer(nodes):
    proto = model(nodes)
    graph, feeds = load_graph(proto), {"x": X}
    np.testing.assert_array_equal(graph.constants["size"], [4])
    expected = run_model(proto.SerializeToString(), feeds)["y"]
    np.testing.assert_array_equal(run_graph(graph, feeds)["y"], expected)
    (layer,) = ke.Engine.from_onnx(proto, loss="normal").layers
    assert (layer.kind, layer.parameters) == ("fully_connected", ("w",))


@pytest.mark.parametrize("nodes", VARYING.values(), ids=VARYING)
def test_other_places_stay_computed(nodes):
    graph = load_graph(model(nodes))
    assert "size" not in graph.constants
    assert graph.producers["double"].op == "Mul"


def test_a_division_by_zero_is_no_place():
    nodes = [("Shape", ["state"], {"start": -1}), ("Div", ["0", "[0]"], {})]
    assert "size" not in load_graph(model(nodes)).constants


def test_a_size_that_the_file_only_claims_is_not_used():
    proto = model(VARYING["the number of examples"])
    claim = onnx.helper.make_tensor_value_info("state", onnx.TensorProto.FLOAT, [1, 4, 4])
    proto.graph.value_info.append(claim)
    assert "size" not in load_graph(proto).constants


def test_a_place_that_is_an_output_stays_one():
    proto = model(STATIC["an axis"])
    double = onnx.helper.make_tensor_value_info("double", onnx.TensorProto.INT64, [1])
    proto.graph.output.append(double)
    graph = load_graph(proto)
    assert "double" in graph.producers
    assert set(graph.outputs) == {"y", "double"}
