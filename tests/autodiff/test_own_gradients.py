"""Gradients in memory of the caller's own."""

from itertools import combinations

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke
from kfac_engine.sessions.session import Session
from tests import models, oracle
from tests.comparing import assert_arrays_close

# The runtime computes both into other memory: equal to the last bit but where sums are regrouped.
ROUNDING = {"rtol": 1e-6, "atol": 1e-7}


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_block", "layer_norm", "embedding", "tied"])
def test_writable_vjp_equals_vjp(name):
    proto = models.MODELS[name]()
    model = ke.load_model(proto)
    trace = model.run(models.random_inputs(proto, batch=3))
    cotangents = {"output": np.ones_like(trace["output"])}
    wrt = tuple(model.parameters)
    expected, own = trace.vjp(cotangents, wrt), trace.writable_vjp(cotangents, wrt)
    assert tuple(own) == wrt
    for gradient in own.values():
        assert gradient.flags.writeable
        assert gradient.flags.owndata
    for name in wrt:
        np.testing.assert_allclose(own[name], expected[name], **ROUNDING)
        own[name][...] = np.nan
    again = trace.writable_vjp(cotangents, wrt)
    for name in wrt:
        np.testing.assert_allclose(again[name], expected[name], **ROUNDING)


def sums():
    """``output = scale · (a + b) + words``: gradients that are one, given, constant or zero."""
    net = models.Net()
    x = net.op("Add", net.weight("a", 2, 3), net.weight("b", 2, 3), to="sum")
    x = net.op("Mul", x, net.weight("scale", 2, 3), to="product")
    net.op("Mul", "input", net.weight("unread", 3), to="aside")
    net.op("Add", x, net.op("Add", "input", net.weight("shift", 2, 3), to="moved"), to="output")
    return net.model({"input": [2, 3]}, {"output": [2, 3]})


def test_writable_gradients_of_one_graph_value_share_no_memory():
    model = ke.load_model(sums())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    cotangent = x + 1
    own = model.run({"input": x}).writable_vjp(
        {"output": cotangent}, ["a", "b", "scale", "shift", "unread", "output", "a"]
    )
    a, b, scale = (model.parameters[name] for name in ("a", "b", "scale"))
    expected = {
        "a": cotangent * scale,
        "b": cotangent * scale,
        "scale": cotangent * (a + b),
        "shift": cotangent,
        "output": cotangent,
        "unread": np.zeros(3),
    }
    assert own.keys() == expected.keys()
    assert_arrays_close(own, expected, rtol=1e-6)
    for one, other in combinations([*own.values(), cotangent, x, a, b, scale], 2):
        assert not np.shares_memory(one, other)


def test_gradients_read_by_other_nodes_are_writable():
    model = ke.load_model(sums())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    trace = model.run({"input": x})
    own, others = trace.vjp_pair(
        {"output": x + 1}, ["a", "scale", "shift"], ["a", "product", "output", "unread"]
    )
    scale = model.parameters["scale"]
    for array in own.values():
        array *= np.nan
    expected = {"a": (x + 1) * scale, "product": x + 1, "output": x + 1, "unread": np.zeros(3)}
    assert others.keys() == expected.keys()
    assert_arrays_close(others, expected, rtol=1e-6)


def test_error_in_run_into_names_node():
    model = ke.load_model(models.linear())
    trace = model.run(models.random_inputs(models.linear(), batch=3))
    backward = model.backward(("output",), ("fc.weight",))
    session = model.backward_session(backward)
    feeds = {name: trace[name] for name in model.fed(backward)}
    feeds |= {name: np.ones((5, 7), np.float32) for name in backward.cotangents.values()}
    results = {name: np.empty((2, 2), np.float32) for name in backward.gradients.values()}
    with pytest.raises(ke.BackendError, match="failed in the backward graph"):
        session.run_into(results, feeds)


def test_gradients_of_unoptimized_long_graphs_are_equal(monkeypatch):
    monkeypatch.setattr("kfac_engine.sessions.device_session._MOST_OPTIMIZED", 0)
    proto = models.mlp()
    inputs = models.random_inputs(proto, batch=3)
    trace = ke.load_model(proto).run(inputs)
    ones = np.ones_like(trace["output"])
    expected = np.einsum(
        "btc,btcp->p", ones[:, None], oracle.jacobian(proto, inputs, "output", ["fc0.weight"])
    )
    found = trace.writable_vjp({"output": ones}, ["fc0.weight"])["fc0.weight"]
    # float32 passes against float64 differences, relative to the largest entry
    np.testing.assert_allclose(found.ravel(), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("count", "optimized"), [(3, True), (4, False)])
def test_forward_graph_above_node_limit_is_not_optimized(monkeypatch, count, optimized):
    built = []

    def session(model, **options):
        built.append(options["optimize"])
        return Session(model, **options)

    monkeypatch.setattr("kfac_engine.sessions.device_session._MOST_OPTIMIZED", 3)
    monkeypatch.setattr("kfac_engine.sessions.device_session.Session", session)
    links = "  ".join(f"r{i + 1} = Tanh (r{i})" for i in range(1, count))
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> g (float[n,2] r0) => (float[n,2] r{count})
        <float[2,2] w = {{0.25, 0.25, 0.25, 0.25}}> {{ r1 = MatMul (r0, w)  {links} }}"""
    )
    model = ke.load_model(proto)
    x = np.float32([[0.5, 1.5], [-1.0, 0.25]])
    expected = x @ np.full((2, 2), 0.25)
    for _ in range(count - 1):
        expected = np.tanh(expected)
    np.testing.assert_allclose(model.run({"r0": x})[f"r{count}"], expected, rtol=1e-5)
    assert built == [optimized]
