"""Files of a few bytes that would take all memory or run without end: refused before they run."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from kfac_engine.errors import ModelError
from kfac_engine.graph.load import load_graph

FOREVER = 2**63 - 1  # exporters write it for loops that a condition ends


def model(nodes, functions=(), **constants):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["n", 4])],
        [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, functions=functions, opset_imports=versions, ir_version=10)


def doubling(count):
    """Functions that each call the one before twice: 2**(count - 1) nodes."""
    node, versions = helper.make_node, [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    functions = [
        helper.make_function("my", "F0", ["x"], ["y"], [node("Tanh", ["x"], ["y"])], versions)
    ]
    for i in range(1, count):
        calls = [
            node(f"F{i - 1}", ["x"], ["h"], domain="my"),
            node(f"F{i - 1}", ["h"], ["y"], domain="my"),
        ]
        functions.append(helper.make_function("my", f"F{i}", ["x"], ["y"], calls, versions))
    return model([node(f"F{count - 1}", ["x"], ["y"], domain="my")], functions)


def loop(limit, condition="kept", inner=(), name="outer"):
    """A Loop whose body hands its condition on, or makes it from its state."""
    value = helper.make_tensor_value_info
    going, state = f"going {name}", f"state {name}"
    made = [
        helper.make_node("ReduceMax", [state], [f"most {name}"], keepdims=0),
        helper.make_node("Less", [f"most {name}", "ten"], [f"computed {name}"]),
        helper.make_node("Identity", [going], [f"kept {name}"]),
        *(inner or [helper.make_node("Tanh", [state], [f"result {name}"])]),
    ]
    body = helper.make_graph(
        made,
        "body",
        [
            value(f"trip {name}", TensorProto.INT64, []),
            value(going, TensorProto.BOOL, []),
            value(state, TensorProto.FLOAT, None),
        ],
        [
            value(f"{condition} {name}", TensorProto.BOOL, []),
            value(f"result {name}", TensorProto.FLOAT, None),
        ],
    )
    return helper.make_node("Loop", [limit, "true", "x"], ["y"], body=body, name=name)


def nested(outer, inner):
    body = loop("inner", name="inside")
    body.input[2], body.output[0] = "state outer", "result outer"
    numbers = {"inner": np.int64(inner), "limit": np.int64(outer)}
    return model([loop("limit", inner=[body])], true=True, ten=np.float32(10), **numbers)


def test_exponential_functions_error_names_function():
    with pytest.raises(ModelError, match=r"function 'F20' of the model has 1.05e\+06 nodes"):
        load_graph(doubling(30))


def test_nested_functions_are_inlined_at_each_call():
    assert len(load_graph(doubling(8)).nodes) == 2**7


@pytest.mark.parametrize("limit", [1_000_001, 253403070467, FOREVER])
def test_loop_with_too_many_trips_error_names_node(limit):
    constants = {"limit": np.int64(limit), "true": True, "ten": np.float32(10)}
    with pytest.raises(ModelError, match="Loop node 'outer' runs"):
        load_graph(model([loop("limit")], **constants))


def test_infinite_loop_raises_error():
    with pytest.raises(ModelError, match="Loop node 'outer' runs inf times"):
        load_graph(model([loop("")], true=True, ten=np.float32(10)))


def test_trip_counts_of_nested_loops_are_multiplied():
    with pytest.raises(ModelError, match="Loop node 'inside' runs"):
        load_graph(nested(1000, 1001))
    assert load_graph(nested(1000, 1000)).nodes


@pytest.mark.parametrize(
    ("limit", "condition"), [(1000, "kept"), (1_000_000, "kept"), (FOREVER, "computed")]
)
def test_finite_loops_are_loaded(limit, condition):
    constants = {"limit": np.int64(limit), "true": True, "ten": np.float32(10)}
    assert load_graph(model([loop("limit", condition)], **constants)).nodes


SIDE = 2**20
MAKERS = {
    "ConstantOfShape": (["sides"], {"sides": [SIDE, SIDE]}),
    "Expand": (["x", "sides"], {"sides": [SIDE, SIDE]}),
    "Tile": (["x", "sides"], {"sides": [SIDE, SIDE]}),
    "Pad": (["x", "sides"], {"sides": [0, 0, SIDE, SIDE]}),
    "Range": (["low", "high", "step"], {"low": 0, "high": 2**40, "step": 1}),
    "OneHot": (["x", "depth", "pair"], {"depth": 2**40, "pair": np.float32([0, 1])}),
    "Resize": (["x", "", "scales"], {"scales": np.float32([SIDE, SIDE])}),
}


@pytest.mark.parametrize("op", MAKERS)
def test_too_large_value_error_states_bytes(op):
    operands, constants = MAKERS[op]
    node = helper.make_node(op, operands, ["y"], name="huge")
    with pytest.raises(ModelError, match=f"{op} node 'huge' .*GB"):
        load_graph(model([node], **constants))


@pytest.mark.parametrize("op", MAKERS)
def test_small_values_are_loaded(op):
    operands, constants = MAKERS[op]
    kept = ("low", "step", "pair")
    few = {n: a if n in kept else np.asarray(a) // 2**18 for n, a in constants.items()}
    few = {n: np.asarray(a).astype(np.asarray(constants[n]).dtype) for n, a in few.items()}
    if op == "Range":
        few["high"] = np.asarray(4)
    graph = load_graph(model([helper.make_node(op, operands, ["y"], name="huge")], **few))
    # The only node stays, or becomes a constant.
    assert [node.op for node in graph.nodes] == [op] or "y" in graph.constants
