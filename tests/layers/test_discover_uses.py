"""Weights used several times: what is registered, and that the block is the one of all uses."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 2e-5


def made(build, inputs, outputs=("batch", 3)):
    net = models.Net()
    build(net)
    return net.model({"input": list(inputs)}, {"output": list(outputs)})


def layers_of(model):
    return ke.Engine.from_onnx(model, loss="normal").layers


def dense_twice(net):
    """One weight and bias, by Gemm with the weight transposed."""
    w, b = net.weight("w", 3, 3), net.weight("b", 3)
    x = net.op("Tanh", net.op("Gemm", "input", w, b, to="s0", transB=1), to="a1")
    net.op("Gemm", x, w, b, to="output", transB=1)


def bias_outside(net):
    """The same weight with a bias of its own in each use."""
    w = net.weight("w", 3, 3)
    x = net.op("Add", net.op("MatMul", "input", w, to="p0"), net.weight("b0", 3), to="s0")
    x = net.op("MatMul", net.op("Tanh", x, to="a1"), w, to="p1")
    net.op("Add", x, net.weight("b1", 3), to="output")


def tokens_and_summary(net):
    """A weight on every token, then on their mean."""
    w = net.weight("w", 3, 3)
    x = net.op("Tanh", net.op("MatMul", "input", w, to="s0"), to="act")
    mean = net.op("ReduceMean", x, net.constant("axis", np.array([1])), to="a1", keepdims=0)
    net.op("MatMul", mean, w, to="output")


def conv_twice(net):
    w, b = net.weight("w", 2, 2, 3, 3, spread=0.3), net.weight("b", 2)
    x = net.op("Tanh", net.op("Conv", "input", w, b, to="s0", pads=[1] * 4), to="a1")
    net.op("Conv", x, w, b, to="output", pads=[1] * 4)


_FLAT, _TOKENS, _IMAGE = ("batch", 3), ("batch", 4, 3), ("batch", 2, 4, 5)
CASES = {
    "dense": (dense_twice, _FLAT, _FLAT, "fully_connected_multi", ("w", "b"), ("s0", "output")),
    "bias_outside": (bias_outside, _FLAT, _FLAT, "fully_connected_multi", ("w",),
                     ("p0", "p1")),
    "tokens": (tokens_and_summary, _TOKENS, _FLAT, "fully_connected_multi", ("w",),
               ("s0", "output")),
    "conv": (conv_twice, _IMAGE, _IMAGE, "conv2d_multi", ("w", "b"), ("s0", "output")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weight_used_twice_is_layer_with_two_uses(name):
    build, inputs, outputs, kind, parameters, values = CASES[name]
    layer, *rest = layers_of(made(build, inputs, outputs))
    assert (layer.kind, layer.parameters, layer.outputs) == (kind, parameters, values)
    assert layer.inputs == ("input", "a1")
    assert {other.kind for other in rest} <= {"shift"}


def test_uses_without_influence_on_loss_are_ignored():
    net = models.Net()
    w = net.weight("w", 3, 3)
    net.op("MatMul", "input", w, to="output")
    net.op("MatMul", net.op("Tanh", "output", to="act"), w, to="aside")
    sides = ["batch", 3]
    proto = net.model({"input": sides}, {"output": sides, "aside": sides})
    (layer,) = ke.Engine.from_onnx(proto, loss="normal", output="output").layers
    assert (layer.kind, layer.inputs, layer.outputs) == ("fully_connected", "input", "output")


# -- other kinds, by the layers that the uses make alone -------------------------------------------


def line(net, x, w, b, to):
    net.op("Conv", x, w, b, to=to, pads=[1, 1])


def volume(net, x, w, b, to):
    net.op("Conv", x, w, b, to=to, pads=[1] * 6)


def in_groups(net, x, w, b, to):
    net.op("Conv", x, w, b, to=to, pads=[1] * 4, group=2)


def spread(net, x, w, b, to):
    net.op("ConvTranspose", x, w, to=to, pads=[1] * 4)


def from_the_left(net, x, w, b, to):
    net.op("MatMul", w, x, to=to)


# Operation, sides of the data, of the weight, kinds of one use and of two.
KINDS = {
    "line": (line, (2, 6), (2, 2, 3), "conv1d", "convolution_multi"),
    "volume": (volume, (2, 2, 3, 2), (2, 2, 3, 3, 3), "convolution", "convolution_multi"),
    "groups": (in_groups, (4, 3, 3), (4, 2, 3, 3), "grouped_convolution",
               "grouped_convolution_multi"),
    "transposed": (spread, (2, 4, 3), (2, 2, 3, 3), "conv_transpose", "conv_transpose_multi"),
    "left": (from_the_left, (3, 4), (3, 3), "fully_connected", "fully_connected_multi"),
}  # fmt: skip


def used_twice(name, shared):
    write, sides, weight, *_ = KINDS[name]
    net = models.Net()
    rng = np.random.default_rng(0)
    w, b = 0.5 * rng.standard_normal(weight), rng.standard_normal(weight[0])
    x = "input"
    for use in range(2):
        own = "" if shared else str(use)
        names = [net.constant(n + own, v.astype("float32")) for n, v in (("w", w), ("b", b))]
        write(net, x, *names, f"s{use}")
        x = net.op("Tanh", f"s{use}", to=f"a{use}" if use == 0 else "output")
    read = {name for node in net._nodes for name in node.input}
    net._constants = {key: v for key, v in net._constants.items() if key in read}
    return net.model({"input": ["batch", *sides]}, {"output": ["batch", *sides]})


@pytest.mark.parametrize("name", KINDS)
def test_factors_of_two_uses_are_means_of_single_uses(name):
    *_, single, several = KINDS[name]
    factors = []
    for shared in (True, False):
        proto = used_twice(name, shared)
        feeds = models.random_inputs(proto, 4)
        engine = ke.Engine.from_onnx(
            proto, loss="normal", estimation_mode="empirical", reduction="batch_mean"
        )
        engine.observe(feeds, np.zeros_like(feeds["input"]))
        layers = [layer for layer in engine.layers if layer.parameters[0].startswith("w")]
        assert {layer.kind for layer in layers} == {several if shared else single}
        blocks = [engine.collection.fisher_blocks[layer.key] for layer in layers]
        factors.append([[f.average.read() for f in block.factors] for block in blocks])
        repeats = {block.repeats for block in blocks}
        assert len(repeats) == 1
        factors[-1].append(repeats.pop())
    ((both, uses), (first, second, positions)) = factors
    assert uses == 2 * positions
    for shared, *alone in zip(both, first, second, strict=True):
        np.testing.assert_allclose(shared, sum(alone) / 2, atol=SINGLE * np.abs(shared).max())
