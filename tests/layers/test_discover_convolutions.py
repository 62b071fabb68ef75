"""Convolutions of every kind: their registration, and that their blocks have the right rows."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few hundred terms, relative to the largest entry.
SINGLE = 5e-5
BATCH = 4

# Name to spatial sides, kernel, attributes, kind.
CASES = {
    "line": ((9,), (3,), {"strides": [2], "pads": [1, 0]}, "conv1d"),
    "line_dilated": ((9,), (3,), {"dilations": [3]}, "conv1d"),
    "line_bare": ((6,), (2,), {}, "conv1d"),
    "image": ((6, 5), (3, 2), {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 0, 2]},
              "conv2d"),
    "volume": ((4, 3, 4), (2, 3, 1), {"strides": [1, 2, 1], "pads": [1, 0, 0, 0, 1, 0]},
               "convolution"),
}  # fmt: skip


def convolution(sides, kernel, attributes):
    net = models.Net()
    w, b = net.weight("w", 3, 2, *kernel), net.weight("b", 3)
    net.op("Conv", "input", w, b, to="output", **attributes)
    return net.model(
        {"input": ["batch", 2, *sides]}, {"output": ["batch", 3, *[None] * len(sides)]}
    )


@pytest.mark.parametrize("name", CASES)
def test_convolution_is_registered_with_geometry(name):
    sides, kernel, attributes, kind = CASES[name]
    proto = convolution(sides, kernel, attributes)
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto, loss="normal", class_axis=1, estimation_mode="empirical", reduction="batch_mean"
    )
    (layer,) = engine.layers
    assert (layer.kind, layer.parameters) == (kind, ("w", "b"))
    trace = ke.load_model(proto).run(feeds)
    targets = np.zeros_like(trace["output"])
    engine.observe(feeds, targets)
    ones, none = [1] * len(sides), [0] * len(sides)
    pads = attributes.get("pads", none * 2)
    a = oracle.conv_patches(
        feeds["input"].astype("float64"),
        kernel,
        attributes.get("strides", ones),
        attributes.get("dilations", ones),
        pads[: len(sides)],
        pads[len(sides) :],
    )
    positions = a.shape[1]
    a = a.reshape(BATCH * positions, -1)
    a = np.hstack([a, np.ones((len(a), 1))])
    g = np.moveaxis(2.0 * trace["output"], 1, -1).reshape(-1, 3)  # of the squared error
    expected = positions * np.kron(a.T @ a / len(a), g.T @ g / len(g))
    found = engine.collection.get_blocks()[0].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


# Name to channels in, channels out, groups, bias.
GROUPED = {"groups": (4, 6, 2, True), "depthwise": (3, 3, 3, True), "multiplied": (2, 4, 2, False)}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_convolution_has_factor_pair_per_group(name):
    ins, outs, groups, has_bias = GROUPED[name]
    net = models.Net()
    parameters = [net.weight("w", outs, ins // groups, 3, 2)]
    parameters += [net.weight("b", outs)] if has_bias else []
    net.op("Conv", "input", *parameters, to="output", group=groups, strides=[2, 1],
           pads=[1, 0, 0, 1])  # fmt: skip
    proto = net.model({"input": ["batch", ins, 6, 5]}, {"output": ["batch", outs, None, None]})
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto, loss="normal", class_axis=1, estimation_mode="empirical", reduction="batch_mean"
    )
    (layer,) = engine.layers
    assert (layer.kind, layer.parameters) == ("grouped_convolution", tuple(parameters))
    trace = ke.load_model(proto).run(feeds)
    engine.observe(feeds, np.zeros_like(trace["output"]))
    block = engine.collection.get_blocks()[0].full_fisher_block()
    side = len(block) // groups
    for group in range(groups):
        seen = slice(group * ins // groups, (group + 1) * ins // groups)
        x = feeds["input"][:, seen].astype("float64")
        a = oracle.conv_patches(x, (3, 2), (2, 1), (1, 1), (1, 0), (0, 1))
        positions = a.shape[1]
        a = a.reshape(-1, a.shape[-1])
        a = np.hstack([a, np.ones((len(a), 1))]) if has_bias else a
        made = slice(group * outs // groups, (group + 1) * outs // groups)
        g = np.moveaxis(2.0 * trace["output"][:, made], 1, -1).reshape(-1, outs // groups)
        expected = positions * np.kron(a.T @ a / len(a), g.T @ g / len(g))
        where = slice(group * side, (group + 1) * side)
        found = block[where, where].copy()
        np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())
        block[where, where] = 0
    assert not block.any()


def test_grouped_transposed_convolution_is_generic():
    net = models.Net()
    net.op("ConvTranspose", "input", net.weight("w", 4, 3, 2, 2), to="output", group=2)
    proto = net.model({"input": ["batch", 4, 3, 3]}, {"output": ["batch", 6, 4, 4]})
    (layer,) = ke.Engine.from_onnx(proto, loss="normal").layers
    assert layer.kind == "generic"
    assert layer.reason == "transposed convolution over 2 axes in 2 group(s)"
