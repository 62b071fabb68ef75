"""Scales and shifts: of normalizations, and of a product with a sum."""

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

import kfac_engine as ke
from kfac_engine.graph.structure import Graph, Input, Node
from kfac_engine.layers.discover import discover
from tests import models

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 1e-4
BATCH = 5
EPSILON = 0.1


def standardised(x, axes):
    x = x.astype("float64")
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + EPSILON)


def layer_normalization(net):
    scale, shift = net.positive("scale", 3), net.weight("shift", 3)
    net.op("LayerNormalization", "input", scale, shift, to="y", epsilon=EPSILON)
    return lambda x: standardised(x, -1)


def layer_normalization_over_two_axes(net):
    scale = net.positive("scale", 4, 3)
    net.op("LayerNormalization", "input", scale, to="y", epsilon=EPSILON, axis=-2)
    return lambda x: standardised(x, (-2, -1))


def shift_used_elsewhere(net):
    """The shift is read by a later product as well: it is no part of the layer."""
    operands = net.positive("scale", 3), net.weight("shift", 3)
    y = net.op("LayerNormalization", "input", *operands, to="y", epsilon=EPSILON)
    net.op("Mul", y, "shift", to="y2")
    return lambda x: standardised(x, -1)


def instance_normalization(net):
    scale, shift = net.positive("scale", 4), net.weight("shift", 4)
    net.op("InstanceNormalization", "input", scale, shift, to="y", epsilon=EPSILON)
    return lambda x: standardised(x, 2)


def batch_normalization(net):
    operands = net.positive("scale", 4), net.weight("shift", 4)
    mean, variance = net.weight("running_mean", 4), net.positive("running_var", 4)
    net.op("BatchNormalization", "input", *operands, mean, variance, to="y", epsilon=EPSILON)

    def normalised(x):
        m, v = (net._constants[n].astype("float64")[:, None] for n in (mean, variance))
        return (x - m) / np.sqrt(v + EPSILON)

    return normalised


def product_and_sum(net):
    x = net.op("Mul", net.positive("scale", 3), "input", to="scaled")
    net.op("Add", x, net.weight("shift", 4, 1), to="y")
    return lambda x: x


def product_alone(net):
    net.op("Mul", "input", net.positive("scale", 4, 1), to="y")
    return lambda x: x


def single_number(net):
    net.op("Mul", "input", net.positive("scale", 1, 1), to="y")
    return lambda x: x


def views(net):
    """Numbers of channels, brought to the shape of the data by operators."""
    axis, sides = net.constant("axis", np.array([1])), net.constant("sides", np.array([1, 4, 1]))
    scale = net.op("Unsqueeze", net.positive("scale", 4), axis, to="wide_scale")
    shift = net.op("Reshape", net.weight("shift", 4), sides, to="wide_shift")
    net.op("Add", shift, net.op("Mul", "input", scale, to="scaled"), to="y")
    return lambda x: x


def shared_sum(net):
    """The shift is used elsewhere as well: it is no part of the layer."""
    shift = net.weight("shift", 3)
    scaled = net.op("Mul", "input", net.positive("scale", 3), to="y")
    net.op("Mul", net.op("Add", scaled, shift, to="y1"), shift, to="y2")
    return lambda x: x


# Name to builder, parameters, and the axes of ``(n, 4, 3)`` that scale and shift are summed over.
CASES = {
    "LayerNormalization": (layer_normalization, ("scale", "shift"), (1,), (1,)),
    "LayerNormalization_two_axes": (layer_normalization_over_two_axes, ("scale",), (), None),
    "shift_used_elsewhere": (shift_used_elsewhere, ("scale",), (1,), None),
    "InstanceNormalization": (instance_normalization, ("scale", "shift"), (2,), (2,)),
    "BatchNormalization": (batch_normalization, ("scale", "shift"), (2,), (2,)),
    "product_and_sum": (product_and_sum, ("scale", "shift"), (1,), (2,)),
    "product": (product_alone, ("scale",), (2,), None),
    "views": (views, ("scale", "shift"), (2,), (2,)),
    "single_number": (single_number, ("scale",), (1, 2), None),
    "shared_sum": (shared_sum, ("scale",), (1,), None),
}


def finished(build):
    """The model of a case, and what its layer scales as a function of the input."""
    net = models.Net()
    scaled = build(net)
    # Through a Tanh gradients differ from position to position.
    net.op("Tanh", net._nodes[-1].output[0], to="output")
    sides = ["batch", 4, 3]
    return net.model({"input": sides}, {"output": sides}), scaled


def proto_names(proto):
    return {entry.name for entry in proto.graph.initializer}


@pytest.mark.parametrize("name", CASES)
def test_scale_block_is_mean_outer_product_of_gradients(name):
    build, parameters, over_scale, over_shift = CASES[name]
    proto, scaled = finished(build)
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto,
        loss="normal",
        estimation_mode="empirical",
        reduction="batch_mean",
        trainable=sorted(proto_names(proto) & {"scale", "shift"}),
    )
    (layer,) = [entry for entry in engine.layers if "scale" in entry.parameters]
    assert (layer.kind, layer.parameters, layer.reason) == ("scale_and_shift", parameters, "")
    trace = ke.load_model(proto, trainable=["scale"]).run(feeds)
    targets = np.zeros((BATCH, 4, 3), np.float32)
    engine.observe(feeds, targets)
    assert layer.outputs == "y"
    ds = trace.vjp({"output": 2 * trace["output"]}, [layer.outputs])[layer.outputs]
    v = [(scaled(feeds["input"]) * ds).sum(over_scale).reshape(BATCH, -1)]
    if over_shift is not None:
        v.append(ds.sum(over_shift).reshape(BATCH, -1))
    v = np.hstack(v)
    expected = v.T @ v / BATCH
    key = parameters if len(parameters) > 1 else parameters[0]
    found = engine.collection.fisher_blocks[key].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


def test_batch_normalization_in_training_form_is_layer():
    net = models.Net()
    operands = net.positive("scale", 3), net.weight("shift", 3)
    running = net.weight("running_mean", 3), net.positive("running_var", 3)
    net._nodes.append(_in_training(*operands, *running))
    net.op("Tanh", "y", to="output")
    proto = net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(proto, loss="normal", estimation_mode="empirical")
    engine.observe(feeds, np.zeros((BATCH, 3), np.float32))
    trace = ke.load_model(proto).run(feeds)
    ds = trace.vjp({"output": 2 * trace["output"]}, ["y"])["y"]
    v = np.hstack([standardised(feeds["input"], 0) * ds, ds])
    expected = v.T @ v / BATCH
    found = engine.collection.fisher_blocks["scale", "shift"].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


def _in_training(scale, shift, mean, variance):
    return helper.make_node(
        "BatchNormalization", ["input", scale, shift, mean, variance], ["y", "mean", "variance"],
        training_mode=1, epsilon=EPSILON,
    )  # fmt: skip


@pytest.mark.parametrize(("opset", "kind"), [(20, "generic"), (21, "scale_and_shift")])
def test_group_normalization_scale_per_channel_is_layer(opset, kind):
    entries = 2 if opset < 21 else 4
    node = Node("GroupNormalization", ("x", "scale", "shift"), ("y",), {"num_groups": 2}, "made")
    constants = {name: np.ones(entries, np.float32) for name in ("scale", "shift")}
    x = Input("x", np.dtype("float32"), ("batch", 4, 3))
    shapes = {"x": (2, 4, 3), "y": (2, 4, 3), "scale": (entries,), "shift": (entries,)}
    graph = Graph((node,), (x,), ("y",), constants, opset)
    found, *rest = discover(graph, ("scale", "shift"), shapes, 2).layers
    assert found.kind == kind
    if kind == "generic":
        assert found.reason == "scale of GroupNormalization without one number for each channel"
    else:
        assert found.parameters == ("scale", "shift")
        assert (found.form.scale.feature_axis, found.form.shift.feature_axis) == (1, 1)
        assert not rest


def test_group_scales_equal_shared_channel_scales():
    """GroupNormalization of set 18: ``y = scale · x̂ + shift`` with one number a group."""
    text = (
        '<ir_version: 8, opset_import: ["": 18]> m (float[N,4,3] input) => (float[N,4,3] output) '
        "{ y = GroupNormalization <num_groups=2, epsilon=0.1> (input, scale, shift) "
        "output = Tanh (y) }"
    )
    proto = parser.parse_model(text)
    for name, values in (("scale", [0.7, 1.3]), ("shift", [0.2, -0.4])):
        array = np.array(values, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto, loss="normal", estimation_mode="empirical", reduction="batch_mean"
    )
    (layer,) = engine.layers
    assert (layer.kind, layer.parameters) == ("scale_and_shift", ("scale", "shift"))
    result = engine.step(feeds, np.zeros((BATCH, 4, 3), np.float32))
    grouped = feeds["input"].reshape(BATCH, 2, 6)
    x = standardised(grouped, -1)
    y = np.array([[[0.7], [1.3]]]) * x + np.array([[[0.2], [-0.4]]])
    # -log N(0; tanh y, 1/2), twelve numbers an example
    loss = (np.tanh(y) ** 2).sum() / BATCH + 12 * np.log(np.pi) / 2
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    ds = 2 * np.tanh(y) * (1 - np.tanh(y) ** 2)
    v = np.hstack([(ds * x).sum(-1), ds.sum(-1)])
    found = engine.collection.fisher_blocks[layer.key].full_fisher_block()
    expected = v.T @ v / BATCH
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())
