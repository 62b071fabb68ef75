"""Convolutions in blocks of channels: the results of plain ones, where they are quicker."""

from collections import Counter

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from kfac_engine.errors import BackendError
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import build_model, compact_model
from kfac_engine.runtime.cpu import graph_passes
from kfac_engine.runtime.cpu.graph_passes import channel_block, to_blocked_layout
from kfac_engine.runtime.cpu.nchwc_layout import DOMAIN, LayoutContext, convert_to_blocked
from kfac_engine.sessions.session import Session
from tests import models

# Sums of up to 600 products in float32 against the same in float64, relative to the largest.
SINGLE = 2e-6
# The same through four layers, of which tanh sees sums of some hundreds.
STEEP = 2e-4
SIZE = 16  # of a block, wherever nothing is run

has_blocks = pytest.mark.skipif(channel_block() == 0, reason="no layout in blocks on this machine")

# Images, kernel and attributes of a convolution; what is read as it lies, or in blocks.
WINDOWS = {
    "same size": ((3, 32, 5, 6), (32, 32, 3, 3), {"pads": (1, 1, 1, 1)}),
    "more channels": ((2, 32, 5, 4), (64, 32, 3, 3), {"pads": (1, 1, 1, 1)}),
    "strides": ((2, 32, 7, 8), (32, 32, 3, 3), {"strides": (2, 3), "pads": (1, 0, 1, 2)}),
    "dilations": ((2, 32, 9, 8), (32, 32, 3, 2), {"dilations": (2, 3)}),
    "auto_pad": ((2, 32, 6, 5), (32, 32, 3, 3), {"auto_pad": "SAME_LOWER", "strides": (2, 2)}),
    "few channels": ((2, 3, 9, 8), (32, 3, 5, 3), {"strides": (2, 1), "pads": (2, 1, 2, 1)}),
    "each channel alone": ((2, 32, 6, 5), (32, 1, 3, 3), {"group": 32, "pads": (1, 1, 1, 1)}),
}
PLAIN = {
    "one tap": ((2, 32, 5, 5), (32, 32, 1, 1), {}),
    "uneven results": ((2, 32, 5, 5), (20, 32, 3, 3), {}),
    "uneven image": ((2, 20, 5, 5), (32, 20, 3, 3), {}),
    "groups": ((2, 32, 5, 5), (32, 16, 3, 3), {"group": 2}),
    "two results of each channel": ((2, 32, 5, 5), (64, 1, 3, 3), {"group": 32}),
    "lines": ((2, 32, 5), (32, 32, 3), {}),
    "large kernel": ((1, 512, 3, 3), (512, 512, 3, 3), {}),
}


def run(nodes, outputs, feeds, constants=None):
    inputs = [Input(name, array.dtype, array.shape) for name, array in feeds.items()]
    model = compact_model(nodes, inputs, outputs, constants or {}, 18)
    return Session(model, threads=2, once=True, what="a test").run(outputs, feeds)


def by_definition(nodes, outputs, feeds):
    """In float64, by the reference implementation of the operators."""
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    inputs = [Input(name, array.dtype, array.shape) for name, array in wide.items()]
    declared = [Input(name, np.dtype(np.float64), None) for name in outputs]
    proto = build_model(nodes, inputs, declared, {}, 18)
    results = ReferenceEvaluator(proto).run(list(outputs), wide)
    return dict(zip(outputs, results, strict=True))


def scene(nodes, outputs, feeds, kernels=("w",)):
    shapes = {name: array.shape for name, array in feeds.items()}
    if not all(node.domain for node in nodes):
        made = [node.outputs[0] for node in nodes]
        shapes |= {name: array.shape for name, array in run(nodes, made, feeds).items()}
    return LayoutContext(outputs, {name: shapes[name] for name in kernels}, shapes, {})


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def check(nodes, outputs, feeds, kernels=("w",)):
    """Blocks in float32 against plain convolutions in float64; what was written."""
    found = convert_to_blocked(nodes, scene(nodes, outputs, feeds, kernels), channel_block())
    results = run(found.nodes, outputs, feeds, found.constants)
    for name, expected in by_definition(nodes, outputs, feeds).items():
        atol = SINGLE * np.abs(expected).max()
        np.testing.assert_allclose(results[name], expected, rtol=0, atol=atol)
    return Counter(node.op for node in found.nodes)


@has_blocks
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("x", "w", "attributes"), WINDOWS.values(), ids=WINDOWS)
def test_blocked_convolutions_equal_float64_reference(x, w, attributes, bias):
    feeds = dict(zip(("x", "w", "b"), drawn(x, w, w[0]), strict=True))
    names = ("x", "w", "b") if bias else ("x", "w")
    feeds = {name: feeds[name] for name in names}
    node = Node("Conv", names, ("y",), attributes, "conv")
    ops = check([node], ["y"], feeds)
    assert ops["ReorderOutput"] == 1
    assert ops["ReorderInput"] == (x[1] > 3)


@pytest.mark.parametrize(("x", "w", "attributes"), PLAIN.values(), ids=PLAIN)
def test_unsuitable_convolutions_are_not_blocked(x, w, attributes):
    node = Node("Conv", ("x", "w"), ("y",), attributes, "conv")
    known = LayoutContext(["y"], {"w": w}, {"x": x}, {})
    assert convert_to_blocked([node], known, SIZE).nodes == (node,)


def test_constant_or_unknown_kernels_are_not_blocked():
    node = Node("Conv", ("x", "w"), ("y",), {}, "conv")
    known = LayoutContext(["y"], {}, {"w": (32, 32, 3, 3)}, {})
    assert convert_to_blocked([node], known, SIZE).nodes == (node,)


def residual():
    """Relu(conv(Relu(conv(x))) + Relu(conv(x))), read by a third convolution."""
    same = {"pads": (1, 1, 1, 1)}
    return [
        Node("Conv", ("x", "w", "b"), ("s0",), same, "0"),
        Node("Relu", ("s0",), ("a0",), {}, "1"),
        Node("Conv", ("a0", "w1", "b"), ("s1",), same, "2"),
        Node("Add", ("a0", "s1"), ("s",), {}, "3"),
        Node("Relu", ("s",), ("a1",), {}, "4"),
        Node("Conv", ("a1", "w", "b"), ("s2",), same, "5"),
    ]


@has_blocks
def test_add_and_relu_are_fused_in_blocked_layout():
    feeds = dict(zip("xwb", drawn((2, 32, 5, 4), (32, 32, 3, 3), 32), strict=True))
    feeds["w1"] = drawn((32, 32, 3, 3))[0][::-1] / 8
    ops = check(residual(), ["s2"], feeds, ("w", "w1"))
    # One way into blocks, one way out, each of two kernels once.
    assert (ops["Conv"], ops["ReorderInput"], ops["ReorderOutput"]) == (3, 1, 1)
    assert (ops["FusedMatMul"], ops["Transpose"]) == (2, 2)
    assert not {"Add", "Relu"}.intersection(ops)


@has_blocks
def test_graph_results_keep_name_and_plain_layout():
    feeds = dict(zip("xwb", drawn((2, 32, 5, 4), (32, 32, 3, 3), 32), strict=True))
    feeds["w1"] = drawn((32, 32, 3, 3))[0][::-1] / 8
    handed = ["s0", "a0", "s1", "s", "a1", "s2"]
    ops = check(residual(), handed, feeds, ("w", "w1"))
    assert (ops["Relu"], ops["Add"], ops["ReorderOutput"]) == (2, 1, 3)


@has_blocks
def test_sum_of_three_convolutions_is_correct():
    names = ("x", "w", "w1", "w2")
    feeds = dict(zip(names, drawn((2, 32, 5, 4), *[(32, 32, 3, 3)] * 3), strict=True))
    feeds["w1"], feeds["w2"] = feeds["w1"][::-1].copy(), feeds["w2"] / 2
    convolutions = [Node("Conv", ("x", w), (f"of {w}",), {}, w) for w in names[1:]]
    for operands in (("two", "of w2"), ("of w2", "two")):
        sums = [
            Node("Add", ("of w", "of w1"), ("two",), {}, "3"),
            Node("Add", operands, ("y",), {}, "4"),
        ]
        ops = check([*convolutions, *sums], ["y"], feeds, names[1:])
        assert (ops["Add"], ops["ReorderOutput"]) == (0, 1)


def two(x, other):
    """A convolution, and its sum with another value."""
    return [Node("Conv", (x, "w"), ("s",), {}, "0"), Node("Add", (other, "s"), ("y",), {}, "1")]


IMAGES, KERNEL = (2, 32, 5, 4), (32, 32, 3, 3)
# Nodes, shapes of what they read, and numbers of operators in blocks.
SUMS = {
    "of two convolutions": (
        [Node("Conv", ("x", "w"), ("p",), {}, "2"), *two("x", "p")], {"x": IMAGES, "w": KERNEL},
        {"Add": 0, "ReorderOutput": 1}),
    "of different shapes": (
        [Node("Conv", ("z", "w"), ("p",), {}, "2"), *two("x", "p")],
        {"x": IMAGES, "z": (2, 32, 3, 3), "w": KERNEL}, {"Add": 1}),
    "with a stretched value": (
        two("x", "z"), {"x": IMAGES, "w": KERNEL, "z": (1, 32, 1, 1)}, {"Add": 1}),
    "with a value not in blocks": (
        two("x", "z"), {"x": IMAGES, "w": KERNEL, "z": (2, 32, 3, 2)}, {"Add": 1}),
    "of a value with two readers": (
        [
            Node("Conv", ("x", "w"), ("s",), {}, "0"), Node("Relu", ("s",), ("a",), {}, "1"),
            Node("Add", ("s", "s"), ("d",), {}, "2"), Node("Mul", ("a", "d"), ("y",), {}, "3")],
        {"x": IMAGES, "w": KERNEL}, {"Relu": 1, "Add": 1}),
}  # fmt: skip


@has_blocks
@pytest.mark.parametrize(("nodes", "shapes", "counts"), SUMS.values(), ids=SUMS)
def test_sums_are_fused_with_convolutions_of_one_shape_alone(nodes, shapes, counts):
    ops = check(nodes, ["y"], dict(zip(shapes, drawn(*shapes.values()), strict=True)))
    assert {op: ops[op] for op in counts} == counts


# Start, end, axes and step of a slice that turns a kernel around; those after the first do not.
SLICES = {
    "whole": ((-1, -1), (-(2**63) + 1,) * 2, (2, 3), (-1, -1)),
    "cut": ((-1, -1), (-(2**63) + 1, 0), (2, 3), (-1, -1)),
    "one axis": ((-1,), (-(2**63) + 1,), (3,), (-1,)),
    "channels": ((-1, -1), (-(2**63) + 1,) * 2, (0, 1), (-1, -1)),
}


@has_blocks
@pytest.mark.parametrize("way", SLICES)
def test_flipped_kernel_equals_slice(way):
    x, w = drawn((2, 32, 5, 4), (32, 32, 3, 2))
    constants = {name: np.array(values) for name, values in zip("seap", SLICES[way], strict=True)}
    nodes = [
        Node("Slice", ("w", *"seap"), ("v",), {}, "0"),
        Node("Conv", ("x", "v"), ("y",), {}, "1"),
        Node("Slice", ("w", *"seap"), ("u",), {}, "2"),
    ]
    known = LayoutContext(["y", "u"], {"w": w.shape}, {}, constants)
    found = convert_to_blocked(nodes, known, channel_block())
    results = run(found.nodes, ["y", "u"], {"x": x, "w": w}, constants | dict(found.constants))
    expected = run(nodes, ["y", "u"], {"x": x, "w": w}, constants)
    np.testing.assert_array_equal(results["u"], expected["u"])
    atol = SINGLE * np.abs(expected["y"]).max()
    np.testing.assert_allclose(results["y"], expected["y"], rtol=0, atol=atol)
    ops = [node.op for node in found.nodes]
    assert ("Slice" in ops) == (way != "whole")


def convolutional():
    """Four layers, the last with a stride, around a residual connection."""
    net, same = models.Net(), {"pads": [1, 1, 1, 1]}
    x = net.op("Relu", net.conv("first", "input", 3, 32, 3, **same), to="x")
    y = net.op("Relu", net.conv("second", x, 32, 32, 3, **same), to="y")
    y = net.op("Relu", net.op("Add", x, net.conv("third", y, 32, 32, 3, **same), to="+"), to="z")
    y = net.conv("fourth", y, 32, 32, 3, strides=[2, 2], **same)
    net.op("GlobalAveragePool", net.op("Tanh", y, to="t"), to="output")
    return net.model({"input": ["batch", 3, 6, 7]}, {"output": ["batch", 32, 1, 1]})


def gradients():
    model = ke.load_model(convolutional())
    x = np.random.default_rng(0).standard_normal((3, 3, 6, 7), dtype=np.float32)
    trace = model.run({"input": x})
    names = [*model.parameters, "input", "second", "third"]
    found = trace.vjp({"output": np.ones((3, 32, 1, 1), np.float32)}, names)
    return model, [trace["output"], *(found[name] for name in names)]


def blocked_convolutions(model):
    """In the forward pass, and in the backward pass."""
    backward, constants = model.backwards()[-1], model.graph.constants
    ways = (
        to_blocked_layout(
            model.context(), model.extended_graph().nodes, model.fetched(), constants
        ),
        to_blocked_layout(
            model.context(), backward.nodes, {*backward.gradients.values()}, backward.constants
        ),
    )
    return [sum(n.op == "Conv" and n.domain == DOMAIN for n in way.nodes) for way in ways]


@has_blocks
def test_blocked_network_has_gradients_of_plain_network(monkeypatch):
    model, found = gradients()
    assert blocked_convolutions(model) == [4, 2]
    monkeypatch.setattr(graph_passes, "channel_block", lambda: 0)
    plain, expected = gradients()
    assert blocked_convolutions(plain) == [0, 0]
    for array, same in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, same, rtol=0, atol=STEEP * np.abs(same).max())


@pytest.fixture
def _fresh_trial():
    channel_block.cache_clear()
    yield
    channel_block.cache_clear()


def refused(nodes, x, constants=None):
    raise BackendError("no such operator.")


def wrong(nodes, x, constants=None):
    if nodes[0].op == "ReorderInput" and len(nodes) == 1:
        return [x.reshape(2, 16, 2).swapaxes(1, 2)]
    return [np.full((1, 32), len(constants or ()), np.float32)]


def empty(nodes, x, constants=None):
    return [np.zeros_like(x)]


@pytest.mark.usefixtures("_fresh_trial")
@pytest.mark.parametrize("trial", [refused, wrong, empty])
def test_failed_trial_disables_blocked_layout(trial, monkeypatch):
    monkeypatch.setattr(graph_passes, "_tried", trial)
    assert channel_block() == 0
