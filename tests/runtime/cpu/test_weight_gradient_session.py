"""Gradients that a backward session leaves out and the host makes."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from onnx import TensorProto, helper

import kfac_engine as ke
from kfac_engine.autodiff.rules import convolution
from kfac_engine.runtime.cpu import weight_gradient_session
from kfac_engine.runtime.cpu.weight_gradient_session import (
    MovedAxes,
    ProductTerm,
    _task,
    split_backward,
)
from tests import models, oracle
from tests.comparing import assert_near

# Sums of some thousand products in float32, relative to the largest entry.
SINGLE = 1e-5


@pytest.fixture
def _of_any_size(monkeypatch):
    monkeypatch.setattr(convolution, "_LEAST_MULTIPLIED", 0)


of_any_size = pytest.mark.usefixtures("_of_any_size")


class Layer(NamedTuple):
    """A convolution: channels and sides of its input, shape of its kernel, attributes."""

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    attributes: Mapping[str, object] = MappingProxyType({})
    op: str = "Conv"

    def model(self):
        net = models.Net()
        net.op(self.op, "input", net.weight("w", *self.kernel), to="output", **self.attributes)
        sides = ["batch", "c", *"abd"[: len(self.shape) - 1]]
        return net.model({"input": ["batch", *self.shape]}, {"output": sides})


LAYERS = {
    "3x3": Layer((4, 5, 6), (5, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
    "without padding": Layer((4, 5, 6), (4, 4, 2, 3)),
    "strides": Layer((4, 7, 6), (4, 4, 3, 3), {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    "a stride along the last axis": Layer((4, 4, 6), (4, 4, 2, 2), {"strides": [1, 2]}),
    "dilations": Layer((4, 7, 8), (4, 4, 2, 3), {"dilations": [3, 2], "pads": [1, 2, 1, 2]}),
    "groups": Layer((8, 4, 4), (8, 4, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "SAME_UPPER": Layer((4, 5, 6), (4, 4, 2, 3), {"auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": Layer((4, 5, 6), (4, 4, 2, 3), {"auto_pad": "SAME_LOWER"}),
    "SAME_UPPER, strides": Layer(
        (4, 6, 7), (4, 4, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "SAME_LOWER, strides": Layer(
        (4, 6, 7), (4, 4, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "VALID": Layer((4, 5, 6), (4, 4, 2, 3), {"auto_pad": "VALID"}),
    "one axis": Layer((4, 9), (6, 4, 3), {"pads": [2, 1], "dilations": [2]}),
    "three axes": Layer((4, 3, 4, 3), (4, 4, 2, 2, 2), {"pads": [1, 0, 1, 0, 1, 0]}),
    "transposed": Layer((4, 3, 4), (4, 5, 2, 3), {"pads": [1, 0, 0, 1]}, "ConvTranspose"),
    "transposed, strides": Layer(
        (4, 3, 4), (4, 4, 3, 3), {"strides": [2, 2], "output_padding": [1, 1]}, "ConvTranspose"),
}  # fmt: skip


def differences(layer, x, c):
    """The change of ``⟨c, output⟩``, linear in the kernel, with each entry of it, in float64."""
    proto = layer.model()
    del proto.graph.initializer[:]
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, layer.kernel))
    found = np.zeros(layer.kernel)
    for index in np.ndindex(layer.kernel):
        one = np.zeros(layer.kernel)
        one[index] = 1
        (y,) = oracle.evaluate(proto, {"input": x, "w": one}, "output")
        found[index] = np.vdot(c, y)
    return found


@of_any_size
@pytest.mark.parametrize("batch", [1, 3], ids="batch_{}".format)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_kernel_gradients_equal_finite_differences(layer, batch):
    model = ke.load_model(layer.model())
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *layer.shape)).astype(np.float32)
    trace = model.run({"input": x})
    c = rng.standard_normal(trace["output"].shape).astype(np.float32)
    expected = differences(layer, x, c)
    for found in (trace.vjp({"output": c}, ["w"]), trace.writable_vjp({"output": c}, ["w"])):
        assert_near(found["w"], expected, SINGLE)
    parts = split_backward(model.backwards()[0])
    assert not parts.session.nodes
    assert len(parts.finished) == 1


def test_grouped_transposed_convolution_gradient_equals_runtime(monkeypatch):
    # onnx's reference evaluator takes no groups here.
    layer = Layer((8, 3, 4), (8, 4, 3, 3), {"group": 2, "strides": [2, 1]}, "ConvTranspose")
    rng, found = np.random.default_rng(0), []
    x = rng.standard_normal((2, *layer.shape)).astype(np.float32)
    for least, left in ((np.inf, 0), (0, 1)):
        monkeypatch.setattr(convolution, "_LEAST_MULTIPLIED", least)
        model = ke.load_model(layer.model())
        trace = model.run({"input": x})
        c = np.random.default_rng(1).standard_normal(trace["output"].shape).astype(np.float32)
        found.append(trace.vjp({"output": c}, ["w"])["w"])
        assert len(split_backward(model.backwards()[0]).finished) == left
    assert_near(found[1], found[0], SINGLE)


# Where the kernel is one and the same weight in several places, or is computed from one.
def _shared(net):
    w = net.weight("w", 4, 4, 3, 3)
    x = net.op("Conv", "input", w, to="first", pads=[1, 1, 1, 1])
    x = net.op("Conv", net.op("Tanh", x, to="bent"), w, to="second", pads=[1, 1, 1, 1])
    return net.op("Conv", net.op("Tanh", x, to="again"), w, to="output", strides=[2, 2])


def _channels_last(net):
    kernel = net.op("Transpose", net.weight("w", 3, 3, 4, 4), to="turned", perm=[3, 2, 0, 1])
    return net.op("Conv", "input", kernel, to="output")


def _matrix(net):
    shape = net.constant("shape", np.array([5, 4, 3, 3]))
    kernel = net.op("Reshape", net.weight("w", 5, 36), shape, to="kernel")
    return net.op("Conv", "input", kernel, to="output")


def _matrix_on_its_side(net):
    shape = net.constant("shape", np.array([5, 4, 3, 3]))
    turned = net.op("Transpose", net.weight("w", 36, 5), to="turned", perm=[1, 0])
    return net.op("Conv", "input", net.op("Reshape", turned, shape, to="kernel"), to="output")


def _in_two_forms(net):
    w = net.weight("w", 4, 4, 3, 3)
    x = net.op("Conv", "input", w, to="first", pads=[1, 1, 1, 1])
    turned = net.op("Transpose", w, to="turned", perm=[1, 0, 3, 2])
    return net.op("Conv", net.op("Tanh", x, to="bent"), turned, to="output")


def _scaled(net):
    kernel = net.op("Mul", net.weight("w", 4, 4, 3, 3), net.weight("s", 4, 1, 1, 1), to="kernel")
    return net.op("Conv", "input", kernel, to="output")


def _used_otherwise(net):
    """As a kernel and in a penalty: what a product gives is part of the gradient only."""
    w = net.weight("w", 4, 4, 3, 3)
    penalty = net.op("ReduceSum", net.op("Mul", w, w, to="squares"), to="penalty")
    return net.op("Add", net.op("Conv", "input", w, to="y"), penalty, to="output")


def _used_often(net):
    w, x = net.weight("w", 4, 4, 3, 3), "input"
    for index in range(9):
        x = net.op("Conv", x, w, to=f"conv{index}", pads=[1, 1, 1, 1])
        x = net.op("Tanh", x, to="output" if index == 8 else f"bent{index}")
    return x


# The net, and how many gradients are left to the host.
NETS = {
    "shared": (_shared, 1),
    "channels last": (_channels_last, 1),
    "a matrix": (_matrix, 1),
    "a matrix on its side": (_matrix_on_its_side, 0),
    "in two forms": (_in_two_forms, 1),
    "scaled by a parameter": (_scaled, 0),
    "used otherwise": (_used_otherwise, 0),
    "used nine times": (_used_often, 0),
}


def by_the_graph(proto, x, c, names):
    """Gradients that the exported graph gives, of standard operators, in float64."""
    exported = ke.differentiate(proto, wrt=names)
    wanted = [f"gradient/{name}" for name in names]
    return dict(
        zip(names, oracle.evaluate(exported, {"input": x, "cotangent": c}, *wanted), strict=True)
    )


@of_any_size
@pytest.mark.parametrize(("build", "left"), NETS.values(), ids=NETS)
def test_kernel_gradients_equal_exported_graph(build, left):
    net = models.Net()
    build(net)
    proto = net.model({"input": ["batch", 4, 6, 7]}, {"output": ["batch", "c", "a", "b"]})
    model = ke.load_model(proto)
    names = list(model.parameters)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 6, 7)).astype(np.float32)
    trace = model.run({"input": x})
    c = rng.standard_normal(trace["output"].shape).astype(np.float32)
    expected = by_the_graph(proto, x, c, names)
    for found in (trace.vjp({"output": c}, names), trace.writable_vjp({"output": c}, names)):
        for name in names:
            assert_near(found[name], expected[name], SINGLE)
    assert len(split_backward(model.backwards()[0]).finished) == left


@of_any_size
@pytest.mark.parametrize(
    ("shape", "left"),
    [((5, 36), 1), ((-1, 36), 0), ((5, -1), 0), ((0, 36), 0)],
    ids=["known", "rows by the number of entries", "columns by it", "rows of the operand"],
)
def test_reshape_to_dynamic_shape_is_not_offloaded(shape, left):
    net = models.Net()
    _matrix(net)
    proto = net.model({"input": ["batch", 4, 6, 7]}, {"output": ["batch", "c", "a", "b"]})
    backward = ke.load_model(proto).backward(["output"], ["w"])
    (reshape,) = (node for node in backward.nodes if node.outputs[0] in backward.gradients.values())
    assert reshape.op == "Reshape"
    constants = {**backward.constants, reshape.inputs[1]: np.array(shape)}
    assert len(split_backward(replace(backward, constants=constants)).finished) == left


@of_any_size
def test_gradient_is_independent_of_other_requests():
    net = models.Net()
    _shared(net)
    proto = net.model({"input": ["batch", 4, 6, 7]}, {"output": ["batch", "c", "a", "b"]})
    model = ke.load_model(proto)
    rng = np.random.default_rng(0)
    trace = model.run({"input": rng.standard_normal((3, 4, 6, 7)).astype(np.float32)})
    cotangents = {"output": rng.standard_normal(trace["output"].shape).astype(np.float32)}
    (alone,) = trace.writable_vjp(cotangents, ["w"]).values()
    own, others = trace.vjp_pair(cotangents, ["w"], ["first", "second", "w"])
    assert np.array_equal(own["w"], alone)
    assert np.array_equal(others["w"], alone)
    assert not np.shares_memory(own["w"], others["w"])
    for name in ("first", "second"):
        expected = trace.vjp(cotangents, [name])[name]
        assert_near(others[name], expected, SINGLE)


THIN = {
    "pointwise": Layer((64, 64, 64), (64, 64, 1, 1)),
    "few channels in": Layer((3, 64, 64), (64, 3, 3, 3)),
    "few channels out": Layer((64, 64, 64), (3, 64, 3, 3)),
    "depthwise": Layer((64, 64, 64), (64, 1, 3, 3), {"group": 64}),
    "small": Layer((8, 8, 8), (8, 8, 3, 3)),
}


@pytest.mark.parametrize("layer", THIN.values(), ids=THIN)
def test_products_fast_in_runtime_are_not_offloaded(layer):
    model = ke.load_model(layer.model())
    assert not split_backward(model.backward(["output"], ["w"])).finished


def test_deep_network_gradients_equal_exported_graph():
    proto = _deep()
    model = ke.load_model(proto, threads=2)
    names = list(model.parameters)
    for batch in (2, 1, 5):
        x = models.random_inputs(proto, batch=batch)
        trace = model.run(x)
        c = np.random.default_rng(0).standard_normal(trace["output"].shape).astype(np.float32)
        expected = by_the_graph(proto, x["input"], c, names)
        found = trace.writable_vjp({"output": c}, names)
        for name in names:
            assert_near(found[name], expected[name], SINGLE)
    assert len(split_backward(model.backwards()[0]).finished) == 3


def _deep():
    net, x, channels = models.Net(), "input", 4
    for index, outs in enumerate((8, 16, 16)):
        strides = [1 + index % 2] * 2
        x = net.conv(f"conv{index}", x, channels, outs, 3, strides=strides, pads=[1, 1, 1, 1])
        x, channels = net.op("Tanh", x, to=f"bent{index}"), outs
    net.op("GlobalAveragePool", x, to="output")
    return net.model({"input": ["batch", 4, 64, 64]}, {"output": ["batch", 16, 1, 1]})


class _Given(NamedTuple):
    """A product that is already there."""

    shape: tuple[int, ...]
    operands: tuple[str, ...] = ()


def test_products_are_summed_into_noncontiguous_gradients(monkeypatch):
    """Entries that lie side by side in a product are apart in the gradient."""
    module = weight_gradient_session
    monkeypatch.setattr(module, "_add", lambda _, operands, out, *rest: np.add(out, *operands, out))
    monkeypatch.setattr(module, "_work", lambda *_: 1.0)
    p, q = np.random.default_rng(0).standard_normal((2, 5, 4, 3))
    moves = (MovedAxes((), (5, 2, 2, 3)), MovedAxes((1, 0, 2, 3), (2, 5, 2, 3)))
    gradient = np.full((2, 5, 2, 3), np.nan)
    parts = (ProductTerm(_Given(p.shape), moves),) * 2
    _task(parts, [[p], [q]], gradient, None, None).do()
    halves = np.stack([(p + q)[:, :2], (p + q)[:, 2:]])
    np.testing.assert_array_equal(gradient, halves)
