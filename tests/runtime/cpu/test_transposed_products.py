"""Backward graphs as they are run: transposes within products, and the order of nodes."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.runtime.cpu.graph_passes import (
    FUSED_TRANSPOSES,
    _fused_products,
    _without_round_trips,
    fused_backward,
    fused_forward,
)
from kfac_engine.sessions import session
from kfac_engine.sessions.session import Session
from tests import models

# Products of float32 numbers against the same in float64, relative to the largest entry.
SINGLE = 1e-6


def attention(dtype):
    """``softmax(x xᵀ) x`` of several heads: operands of products come turned on the way back."""
    net = models.Net(dtype=dtype)
    x = net.op("MatMul", "input", net.weight("weight", 4, 4), to="x")
    turned = net.op("Transpose", x, to="turned", perm=[0, 1, 3, 2])
    p = net.op("Softmax", net.op("MatMul", x, turned, to="scores"), to="p", axis=-1)
    net.op("MatMul", p, x, to="output")
    return net.model({"input": ["batch", 2, 3, 4]}, {"output": ["batch", 2, 3, 4]})


def gradients(dtype):
    proto = attention(dtype)
    model = ke.load_model(proto)
    x, c = np.random.default_rng(0).standard_normal((2, 5, 2, 3, 4)).astype(dtype)
    names = ["weight", "input"]
    found = model.run({"input": x}).vjp({"output": c}, names)
    kept = fused_backward(model.context(), model.backwards()[0])
    return model.backwards()[0], kept, [found[name] for name in names]


def test_fused_products_have_gradients_of_plain_products():
    (_, fused, single), (plain, kept, double) = gradients("float32"), gradients("float64")
    ops = [node.op for node in fused]
    assert ops.count("FusedMatMul") > 2
    # What is left turns the gradient of the transpose of the forward pass.
    assert ops.count("Transpose") == 1
    assert kept == plain.nodes
    for found, expected in zip(single, double, strict=True):
        np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


@pytest.mark.parametrize("name", ["mlp", "token_mlp", "layer_norm", "cnn"])
def test_fusion_keeps_order_and_results(name):
    model = ke.load_model(models.MODELS[name]())
    backward = model.backward(["output"], list(model.parameters))
    kept = [node.outputs for node in fused_backward(model.context(), backward)]
    assert kept == [node.outputs for node in backward.nodes if node.outputs in kept]
    dropped = {node.op for node in backward.nodes if node.outputs not in kept}
    assert dropped <= {"Transpose"}


@pytest.mark.parametrize(
    ("first", "second", "back"),
    [
        ((2, 0, 1), (1, 2, 0), True),
        ((2, 0, 1), (2, 0, 1), False),
        ((1, 0, 2), (1, 0, 2), True),
        (None, None, True),
        (None, (0, 1, 2), False),
    ],
)
def test_only_inverse_transposes_are_removed(first, second, back):
    turns = [{} if perm is None else {"perm": perm} for perm in (first, second)]
    nodes = (
        Node("Transpose", ("x",), ("turned",), turns[0], "first"),
        Node("Transpose", ("turned",), ("y",), turns[1], "second"),
    )
    x = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(x.transpose(first).transpose(second), x) == back
    *_, last = _without_round_trips(nodes, ["y"])
    assert (last.op, last.inputs) == (("Identity", ("x",)) if back else ("Transpose", ("turned",)))
    reader = Node("Relu", ("y",), ("z",), {}, "reader")
    *_, last = _without_round_trips((*nodes, reader), ["z"])
    assert last.inputs == (("x",) if back else ("y",))


def test_transposed_weights_are_not_stored_for_the_backward_pass():
    """A layer of PyTorch's newer exporter: ``x Wᵀ``, with a reshape of the weight before."""
    net = models.Net()
    flat = net.weight("flat", 12)
    weight = net.op("Reshape", flat, net.constant("sides", np.array([3, 4])), to="weight")
    turned = net.op("Transpose", weight, to="turned", perm=[1, 0])
    net.op("Relu", net.op("MatMul", "input", turned, to="product"), to="output")
    model = ke.load_model(net.model({"input": ["batch", 2, 4]}, {"output": ["batch", 2, 3]}))
    x, c = (np.random.default_rng(0).standard_normal((5, 2, k)).astype("f") for k in (4, 3))
    trace = model.run({"input": x})
    found = trace.vjp({"output": c}, ["flat", "input"])
    (backward,) = model.backwards()
    assert {"weight", "turned"}.isdisjoint(model.fetched())
    assert "flat" in backward.saved
    forward = fused_forward(model.context(), model.graph.nodes, model.fetched())
    assert [node.op for node in forward].count("FusedMatMul") == 1
    matrix = trace["weight"]
    slope = c * (trace["product"] > 0)
    np.testing.assert_allclose(found["input"], slope @ matrix, rtol=SINGLE, atol=SINGLE)
    expected = np.einsum("bto,bti->oi", slope, x).ravel()
    np.testing.assert_allclose(found["flat"], expected, rtol=1e-5, atol=1e-5)


def fused(nodes, results):
    context = SimpleNamespace(graph_passes={FUSED_TRANSPOSES})
    return _fused_products(context, nodes, results, lambda _: True)


def opened(nodes, shapes, results, constants=()):
    inputs = [Input(name, np.dtype("f"), shape) for name, shape in shapes.items()]
    return Session(compact_model(nodes, inputs, results, dict(constants), 18), threads=1, what="x")


@pytest.mark.parametrize("turned", ["operand", "result", "both", "read twice", "returned"])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_gemm_computes_the_transposes_around_it(left, right, turned):
    before, after = turned in ("operand", "both"), turned != "operand"
    a = [Node("Transpose", ("a",), ("aT",), {"perm": [1, 0]}, "before")] if before else []
    flags = {"transA": left, "transB": right, "alpha": 2.0}
    y = Node("Gemm", ("aT" if before else "a", "b"), ("y",), flags, "product")
    out = [Node("Transpose", ("y",), ("out",), {"perm": [1, 0]}, "after")] if after else []
    other = [Node("Relu", ("y",), ("also",), {}, "other")] if turned == "read twice" else []
    results = ["out" if after else "y", *(["also"] if other else [])]
    results += ["y"] if turned == "returned" else []
    nodes = fused((*a, y, *out, *other), results)
    kept = turned in ("read twice", "returned")
    assert [node.op for node in nodes].count("Transpose") == kept
    random, is_turned = np.random.default_rng(0), bool(left) != before
    x = random.standard_normal((4, 3) if is_turned else (3, 4)).astype("f")
    w = random.standard_normal((5, 4) if right else (4, 5)).astype("f")
    found = opened(nodes, {"a": x.shape, "b": w.shape}, results).run(results, {"a": x, "b": w})
    truth = 2 * (x.T if is_turned else x) @ (w.T if right else w)
    expected = {"out": truth.T, "y": truth, "also": np.maximum(truth, 0)}
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=SINGLE, atol=SINGLE)


SIDES = {"sides": np.array([2, 8]), "more": np.array([4, 4])}
# Nodes that ONNX Runtime would replace by one node.
REPLACED = {
    "transposed operand": [("Transpose", "x", "u"), ("Gemm", "u x", "y")],
    "transposed result": [("Gemm", "x x", "u"), ("Transpose", "u", "y")],
    "transposed factor": [("Transpose", "x", "u"), ("MatMul", "u x", "y")],
    "two reshapes": [("Abs", "x", "t"), ("Reshape", "t sides", "u"), ("Reshape", "u more", "y")],
}


@pytest.mark.parametrize("name", REPLACED)
def test_nodes_run_in_the_order_of_the_graph(name, monkeypatch, tmp_path):
    perm = {"Transpose": {"perm": [1, 0]}}
    masks = ["Tanh", "Sin", "Cos"]
    rows = [*REPLACED[name], ("Exp", "y", "z")]
    for op in masks:
        rows += [(op, "x", op), ("Mul", f"z {op}", f"z{op}")]
    nodes = [Node(op, (*r.split(),), (y,), perm.get(op, {}), y) for op, r, y in rows]
    results = [f"z{op}" for op in masks]
    plain = session.options_for

    def options_for(*args, **kwargs):
        options = plain(*args, **kwargs)
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "run")
        return options

    monkeypatch.setattr(session, "options_for", options_for)
    nodes = fused(nodes, results)
    run = opened(nodes, {"x": (4, 4)}, results, SIDES)
    run.run(results, {"x": np.ones((4, 4), "f")})
    events = json.loads(Path(run._open[0].end_profiling()).read_text(encoding="utf-8"))
    times = [event["name"] for event in events if event["name"].endswith("_kernel_time")]
    assert [time.removesuffix("_kernel_time") for time in times] == [node.name for node in nodes]
