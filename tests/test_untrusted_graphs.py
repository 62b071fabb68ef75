"""Graphs that make a careless walk run forever, double at each node, or recurse too deeply."""

import signal
from itertools import pairwise

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.errors import KfacError, ModelError
from kfac_engine.graph.analysis.subgraph import SubGraph
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph, Node
from tests.models import parsed

X = np.random.default_rng(0).random((5, 4), np.float32)
# More nodes than Python allows nested calls.
DEEP = 1100
# Twice as many paths at each node: more than a walk of single paths can end.
DOUBLED = 40


@pytest.fixture(autouse=True)
def time_limit():
    """Fail a test that hangs, where the system can interrupt it."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise AssertionError("the walk does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def model(nodes, outputs=("y",), **constants):
    results = ", ".join(f"float[] {name}" for name in outputs)
    return parsed(f"g (float[n, 4] x) => ({results}) {{ {nodes} }}", constants)


def chain(op, start, end, count, operands="{}"):
    """Nodes of which each reads the result of the one before."""
    names = [start, *(f"{end}{i}" for i in range(1, count)), end]
    return "  ".join(f"{b} = {op} ({operands.format(a)})" for a, b in pairwise(names))


# -- bodies with cycles ---------------------------------------------------------------------------

CONDITIONS = {
    "copy of itself": "going = Identity (going)",
    "two copies": "going = Identity (a)  a = Identity (going)",
    "copy of nothing": "going = Identity ()",
    "cycle of Not": "going = Not (a)  a = Not (going)",
    "out of order": "going = Identity (a)  a = Identity (c)",
    "made twice": "going = Identity (c)  going = Identity (c)",
    "operand made again": "c = Identity (going)  going = Identity (c)",
}
STATES = {"copy of itself": "h = Identity (h)", "two copies": "h = Identity (b)  b = Identity (h)"}


def loop(going, state):
    """A loop of three turns, with nodes that make its condition and its state."""
    body = "body (int64 trip, bool c, float[] before) => (bool going, float[] h)"
    nodes = f"v = Loop <body = {body} {{ {state} {going} }}> (limit, true, w)  y = MatMul (x, v)"
    return model(nodes, limit=np.int64(3), true=True, w=np.ones((4, 3), np.float32))


BODIES = {
    **{f"condition: {k}": loop(n, "h = Tanh (before)") for k, n in CONDITIONS.items()},
    **{f"state: {k}": loop("going = Identity (c)", n) for k, n in STATES.items()},
}


@pytest.mark.parametrize("source", BODIES.values(), ids=BODIES)
def test_malformed_loop_body_raises_error(source):
    with pytest.raises(ModelError):
        ke.Engine.from_onnx(source, loss="normal", threads=1)


def test_copied_conditions_of_a_sound_body_are_fixed():
    copies = chain("Identity", "c", "going", 3)
    source = loop(copies, "h = Tanh (before)")
    assert load_graph(source).nodes
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.int64(2**40), "limit"))
    with pytest.raises(ModelError, match="runs"):
        load_graph(source)


# -- long chains ----------------------------------------------------------------------------------

W = np.random.default_rng(1).random((4, 3), np.float32)
MOVED: dict[str, tuple[str, dict[str, object]]] = {
    "weight": (chain("Transpose", "w", "v", DEEP), {}),
    "weight doubled": (chain("CastLike", "w", "v", DOUBLED, "{0}, {0}"), {}),
    "scaled weight": (
        "s = Mul (w, two)" + chain("Transpose", "s", "v", DEEP),
        {"two": np.float32(2)},
    ),
    "scale of integers": (
        f"q = Cast <to = 1> (whole)  {chain('Gather', 's0', 'last', DEEP + 1, '{}, rows')}"
        "  u = Mul (q, last)  v = MatMul (u, w)",
        {
            "whole": np.full((4, 4), 3, np.int8),
            "s0": np.ones((4, 1), np.float32),
            "rows": np.arange(4),
        },
    ),
}


@pytest.mark.parametrize(("nodes", "constants"), MOVED.values(), ids=MOVED)
def test_long_chains_of_weights_have_the_right_gradient(nodes, constants):
    source = model(nodes + "  y = MatMul (x, v)", w=W, **constants)
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
        chain("Cast <to = 1>", "p", "q", DEEP),
        chain("CastLike", "p", "q", DOUBLED, "{0}, {0}"),
    ],
    ids=["deep views", "deep casts", "doubled"],
)
def test_long_chains_after_softmax_have_the_right_gradient(nodes):
    source = model(f"s = MatMul (x, w)  p = Softmax (s)  {nodes}  y = Neg (q)", w=W)
    engine = ke.Engine.from_onnx(source, loss="normal", reduction="sum", threads=1)
    found = engine.gradients({"x": X}, np.zeros((5, 3), np.float32)).gradients["w"]
    p = np.exp(X @ W) / np.exp(X @ W).sum(axis=1, keepdims=True)
    g = 2 * p
    expected = X.T @ (p * (g - (p * g).sum(axis=1, keepdims=True)))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_uses_through_views_of_views_are_counted_once():
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

PLAIN_OUTPUTS = {
    "weight": ("w", ""),
    "unused initializer": ("t", ""),
    "constant": ("c", "c = Constant <value_floats = [1.0, 2.0]> ()"),
    "filled": ("c", "c = ConstantOfShape (shape)"),
    "input": ("x", ""),
}


@pytest.mark.parametrize(("name", "nodes"), PLAIN_OUTPUTS.values(), ids=PLAIN_OUTPUTS)
@pytest.mark.parametrize("alone", [True, False], ids=["only output", "second output"])
def test_outputs_without_nodes_are_predicted_and_refused_for_a_loss(name, nodes, alone):
    outputs = (name,) if alone else ("y", name)
    constants = {"w": W, "t": np.ones(2, np.float32), "shape": np.array([3, 2])}
    source = model("y = MatMul (x, w)  " + nodes, outputs, **constants)
    for make in (ke.Engine.from_onnx, ke.differentiate):
        with pytest.raises(KfacError, match=rf"\b{name}\b|no trainable parameter"):
            make(source, loss="normal", output=name)
    if not alone:
        engine = ke.Engine.from_onnx(source, loss="normal", output="y", threads=1)
        predicted = engine.predict({"x": X})
        np.testing.assert_allclose(predicted["y"], X @ W, rtol=1e-5)
        known = {"w": W, "t": np.ones(2), "x": X}
        value = [1, 2] if "value_floats" in nodes else np.zeros((3, 2))
        np.testing.assert_array_equal(predicted[name], known.get(name, value))
