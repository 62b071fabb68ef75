"""Files of a few bytes that would take all memory or run without end: refused before they run."""

import numpy as np
import pytest

from kfac_engine.errors import ModelError
from kfac_engine.graph.load import load_graph
from tests.models import parsed

FOREVER = 2**63 - 1  # exporters write it for loops that a condition ends


def model(nodes, functions="", **constants):
    graph = f"g (float[n,4] x) => (float[] y) {{ {nodes} }} {functions}"
    return parsed(graph, constants, '"": 18, "my": 1')


def doubling(count):
    """Functions that each call the one before twice: 2**(count - 1) nodes."""
    bodies = ["y = Tanh (x)"]
    bodies += [f"h = my.F{i} (x)  y = my.F{i} (h)" for i in range(count - 1)]
    head = '<domain: "my", opset_import: ["": 18, "my": 1]>'
    functions = [f"{head} F{i} (x) => (y) {{ {body} }}" for i, body in enumerate(bodies)]
    return model(f"y = my.F{count - 1} (x)", " ".join(functions))


def loop(limit, condition="kept", inner="", name="outer", ends="x y"):
    """A Loop whose body hands its condition on, or makes it from its state."""
    start, end = ends.split()
    inner = inner or f"result_{name} = Tanh (state_{name})"
    return f"""[{name}] {end} = Loop <body = body
      (int64 trip_{name}, bool going_{name}, float[] state_{name})
      => (bool {condition}_{name}, float[] result_{name}) {{
        most_{name} = ReduceMax <keepdims = 0> (state_{name})
        computed_{name} = Less (most_{name}, ten)  kept_{name} = Identity (going_{name})  {inner}
      }}> ({limit or '""'}, true, {start})"""


def loops(node, **limits):
    numbers = {name: np.int64(limit) for name, limit in limits.items()}
    return load_graph(model(node, true=True, ten=np.float32(10), **numbers))


def nested(outer, inner):
    body = loop("inner", name="inside", ends="state_outer result_outer")
    return loops(loop("limit", inner=body), inner=inner, limit=outer)


def test_exponential_functions_error_names_function():
    with pytest.raises(ModelError, match=r"function 'F20' of the model has 1.05e\+06 nodes"):
        load_graph(doubling(30))


def test_nested_functions_are_inlined_at_each_call():
    assert len(load_graph(doubling(8)).nodes) == 2**7


@pytest.mark.parametrize("limit", [1_000_001, 253403070467, FOREVER])
def test_loop_with_too_many_trips_error_names_node(limit):
    with pytest.raises(ModelError, match="Loop node 'outer' runs"):
        loops(loop("limit"), limit=limit)
    with pytest.raises(ModelError, match="Loop node 'outer' runs inf times"):
        loops(loop(""))


def test_trip_counts_of_nested_loops_are_multiplied():
    with pytest.raises(ModelError, match="Loop node 'inside' runs"):
        nested(1000, 1001)
    assert nested(1000, 1000).nodes


@pytest.mark.parametrize(
    ("limit", "condition"), [(1000, "kept"), (1_000_000, "kept"), (FOREVER, "computed")]
)
def test_finite_loops_are_loaded(limit, condition):
    assert loops(loop("limit", condition), limit=limit).nodes


SIDE = 2**20
MAKERS = {
    "ConstantOfShape": ("sides", {"sides": [SIDE, SIDE]}),
    "Expand": ("x, sides", {"sides": [SIDE, SIDE]}),
    "Tile": ("x, sides", {"sides": [SIDE, SIDE]}),
    "Pad": ("x, sides", {"sides": [0, 0, SIDE, SIDE]}),
    "Range": ("low, high, step", {"low": 0, "high": 2**40, "step": 1}),
    "OneHot": ("x, depth, pair", {"depth": 2**40, "pair": np.float32([0, 1])}),
    "Resize": ('x, "", scales', {"scales": np.float32([SIDE, SIDE])}),
}


@pytest.mark.parametrize("op", MAKERS)
def test_too_large_value_error_states_bytes(op):
    operands, constants = MAKERS[op]
    with pytest.raises(ModelError, match=f"{op} node 'huge' .*GB"):
        load_graph(model(f"[huge] y = {op} ({operands})", **constants))


@pytest.mark.parametrize("op", MAKERS)
def test_small_values_are_loaded(op):
    operands, constants = MAKERS[op]
    kept = ("low", "step", "pair")
    few = {n: a if n in kept else np.asarray(a) // 2**18 for n, a in constants.items()}
    few = {n: np.asarray(a).astype(np.asarray(constants[n]).dtype) for n, a in few.items()}
    if op == "Range":
        few["high"] = np.asarray(4)
    graph = load_graph(model(f"[huge] y = {op} ({operands})", **few))
    # The only node stays, or becomes a constant.
    assert [node.op for node in graph.nodes] == [op] or "y" in graph.constants
