"""Graphs that make a careless walk run forever, double at each node, or recurse too deeply."""

import signal
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, numpy_helper
from onnx.helper import (
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
)

import kfac_engine as ke
from kfac_engine.errors import KfacError, ModelError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph, Node

X = np.random.default_rng(0).random((5, 4), np.float32)
# More nodes than Python allows nested calls.
DEEP = 1100
# Twice as many paths at each node: more than a walk of single paths can end.
DOUBLED = 40


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Fail a test that hangs, where the system can interrupt it."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise AssertionError("the walk does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def model(
    *nodes: NodeProto, outputs: tuple[str, ...] = ("y",), **constants: object
) -> onnx.ModelProto:
    graph = make_graph(
        nodes,
        "g",
        [make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()],
    )
    return make_model(graph, opset_imports=[make_opsetid("", 18)], ir_version=10)


def chain(op: str, start: str, end: str, count: int, operands: int = 1) -> list[NodeProto]:
    """Nodes of which each reads the result of the one before as every operand."""
    names = [start, *(f"{end}{i}" for i in range(1, count)), end]
    return [make_node(op, [a] * operands, [b]) for a, b in pairwise(names)]


# -- bodies with cycles ---------------------------------------------------------------------------

CONDITIONS = {
    "copy of itself": [make_node("Identity", ["going"], ["going"])],
    "two copies": [
        make_node("Identity", ["a"], ["going"]),
        make_node("Identity", ["going"], ["a"]),
    ],
    "copy of nothing": [make_node("Identity", [], ["going"])],
    "cycle of Not": [make_node("Not", ["a"], ["going"]), make_node("Not", ["going"], ["a"])],
    "out of order": [make_node("Identity", ["a"], ["going"]), make_node("Identity", ["c"], ["a"])],
    "made twice": [make_node("Identity", ["c"], ["going"])] * 2,
    "operand made again": [
        make_node("Identity", ["going"], ["c"]),
        make_node("Identity", ["c"], ["going"]),
    ],
}
STATES = {
    "copy of itself": [make_node("Identity", ["h"], ["h"])],
    "two copies": [make_node("Identity", ["b"], ["h"]), make_node("Identity", ["h"], ["b"])],
}


def loop(going: list[NodeProto], state: list[NodeProto]) -> onnx.ModelProto:
    info = make_tensor_value_info
    body = make_graph(
        [*state, *going],
        "body",
        [
            info("trip", TensorProto.INT64, []),
            info("c", TensorProto.BOOL, []),
            info("before", TensorProto.FLOAT, None),
        ],
        [info("going", TensorProto.BOOL, []), info("h", TensorProto.FLOAT, None)],
    )
    node = make_node("Loop", ["limit", "true", "w"], ["v"], body=body)
    product = make_node("MatMul", ["x", "v"], ["y"])
    w = np.ones((4, 3), np.float32)
    return model(node, product, limit=np.int64(3), true=True, w=w)


BODIES = {
    **{f"condition: {k}": loop(n, chain("Tanh", "before", "h", 1)) for k, n in CONDITIONS.items()},
    **{f"state: {k}": loop(chain("Identity", "c", "going", 1), n) for k, n in STATES.items()},
}


@pytest.mark.parametrize("source", BODIES.values(), ids=BODIES)
def test_malformed_loop_body_raises_error(source: onnx.ModelProto) -> None:
    with pytest.raises(ModelError):
        ke.Engine.from_onnx(source, loss="normal", threads=1)


def test_copied_conditions_of_a_sound_body_are_fixed() -> None:
    copies = chain("Identity", "c", "going", 3)
    source = loop(copies, chain("Tanh", "before", "h", 1))
    assert load_graph(source).nodes
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.int64(2**40), "limit"))
    with pytest.raises(ModelError, match="runs"):
        load_graph(source)


# -- long chains ----------------------------------------------------------------------------------

W = np.random.default_rng(1).random((4, 3), np.float32)
MATMUL = [make_node("MatMul", ["x", "v"], ["y"])]
MOVED: dict[str, tuple[list[NodeProto], dict[str, object]]] = {
    "weight": (chain("Transpose", "w", "v", DEEP), {}),
    "weight doubled": (chain("CastLike", "w", "v", DOUBLED, operands=2), {}),
    "scaled weight": (
        [make_node("Mul", ["w", "two"], ["s"]), *chain("Transpose", "s", "v", DEEP)],
        {"two": np.float32(2)},
    ),
    "scale of integers": (
        [
            make_node("Cast", ["whole"], ["q"], to=TensorProto.FLOAT),
            *[
                make_node("Gather", [f"s{i}", "rows"], [f"s{i + 1}" if i < DEEP else "last"])
                for i in range(DEEP + 1)
            ],
            make_node("Mul", ["q", "last"], ["u"]),
            make_node("MatMul", ["u", "w"], ["v"]),
        ],
        {
            "whole": np.full((4, 4), 3, np.int8),
            "s0": np.ones((4, 1), np.float32),
            "rows": np.arange(4),
        },
    ),
}


@pytest.mark.parametrize(("nodes", "constants"), MOVED.values(), ids=MOVED)
def test_long_chains_of_weights_have_the_right_gradient(
    nodes: list[NodeProto], constants: dict[str, object]
) -> None:
    source = model(*nodes, *MATMUL, w=W, **constants)
    engine = ke.Engine.from_onnx(source, loss="normal", reduction="sum", threads=1)
    targets = np.zeros((5, 3), np.float32)
    found = engine.gradients({"x": X}, targets).gradients["w"]
    before = 2.0 if "two" in constants else 3 * np.ones((4, 4)) if "whole" in constants else 1.0
    matrix = before * np.eye(4) if np.ndim(before) == 0 else before
    # The loss is Σ (x M w)², because the variance of a normal loss is 0.5.
    expected = 2 * (X @ matrix).T @ (X @ matrix @ W)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "nodes",
    [
        chain("Transpose", "p", "q", DEEP),
        chain("Cast", "p", "q", DEEP),
        chain("CastLike", "p", "q", DOUBLED, operands=2),
    ],
    ids=["deep views", "deep casts", "doubled"],
)
def test_long_chains_after_softmax_have_the_right_gradient(nodes: list[NodeProto]) -> None:
    for node in nodes:
        if node.op_type == "Cast":
            node.attribute.add(name="to", type=onnx.AttributeProto.INT, i=TensorProto.FLOAT)
    source = model(
        make_node("MatMul", ["x", "w"], ["s"]),
        make_node("Softmax", ["s"], ["p"]),
        *nodes,
        make_node("Neg", ["q"], ["y"]),
        w=W,
    )
    engine = ke.Engine.from_onnx(source, loss="normal", reduction="sum", threads=1)
    found = engine.gradients({"x": X}, np.zeros((5, 3), np.float32)).gradients["w"]
    p = np.exp(X @ W) / np.exp(X @ W).sum(axis=1, keepdims=True)
    g = 2 * p
    expected = X.T @ (p * (g - (p * g).sum(axis=1, keepdims=True)))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_uses_through_views_of_views_are_counted_once() -> None:
    # Each Reshape reads the two values before it, so that the paths are Fibonacci numbers.
    names = ["w", "v0", *(f"v{i}" for i in range(1, 60))]
    views = [Node("Identity", ("w",), ("v0",))]
    views += [
        Node("Reshape", (b, a), (c,)) for a, b, c in zip(names, names[1:], names[2:], strict=False)
    ]
    last = Node("MatMul", ("x", names[-1]), ("y",))
    graph = Graph(nodes=(*views, last), inputs=(), outputs=("y",), constants={"w": W}, opset=18)
    assert SubGraph(graph, ["y"]).variable_uses("w") == 1


# -- outputs that no node computes ----------------------------------------------------------------

PRODUCT = make_node("MatMul", ["x", "w"], ["y"])
PLAIN_OUTPUTS = {
    "weight": ("w", []),
    "unused initializer": ("t", []),
    "constant": ("c", [make_node("Constant", [], ["c"], value_floats=[1.0, 2.0])]),
    "filled": ("c", [make_node("ConstantOfShape", ["shape"], ["c"])]),
    "input": ("x", []),
}


@pytest.mark.parametrize(("name", "nodes"), PLAIN_OUTPUTS.values(), ids=PLAIN_OUTPUTS)
@pytest.mark.parametrize("alone", [True, False], ids=["only output", "second output"])
def test_outputs_without_nodes_are_predicted_and_refused_for_a_loss(
    name: str, nodes: list[NodeProto], alone: bool
) -> None:
    outputs = (name,) if alone else ("y", name)
    source = model(
        PRODUCT, *nodes, outputs=outputs, w=W, t=np.ones(2, np.float32), shape=np.array([3, 2])
    )
    for make in (ke.Engine.from_onnx, ke.differentiate):
        with pytest.raises(KfacError, match=rf"\b{name}\b|no trainable parameter"):
            make(source, loss="normal", output=name)
    if not alone:
        engine = ke.Engine.from_onnx(source, loss="normal", output="y", threads=1)
        predicted = engine.predict({"x": X})
        np.testing.assert_allclose(predicted["y"], X @ W, rtol=1e-5)
        known = {"w": W, "t": np.ones(2), "x": X}
        value = [1, 2] if name == "c" and nodes[0].op_type == "Constant" else np.zeros((3, 2))
        np.testing.assert_array_equal(predicted[name], known.get(name, value))
