"""Scales, shifts and slopes against the dense Fisher matrix: their full blocks are exact.

The block is the second moment of per-example gradients, which is the Fisher matrix itself, cross
terms of scale and shift included, whatever the network around it.
"""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few hundred terms, relative to the largest entry.
SINGLE = 2e-5
BATCH = 5  # unlike all other sides
SIDES = ("batch", 4, 3)  # of input and output, but where a case says otherwise


def tanh(net, value, to="output"):
    """Through a Tanh gradients differ from position to position."""
    return net.op("Tanh", value, to=to)


def slope_a_channel(net):
    tanh(net, net.op("PRelu", "input", net.weight("slope", 4, 1), to="y"))


def slope_of_all(net):
    tanh(net, net.op("PRelu", "input", net.weight("slope", 1), to="y"))


def slopes_used_twice(net):
    net.weight("slope", 4, 1)
    x = net.op("Sin", net.op("PRelu", "input", "slope", to="y0"), to="x1")
    tanh(net, net.op("PRelu", x, "slope", to="y1"))


def behind_frozen_product(net):
    x = net.op("MatMul", "input", net.weight("frozen", 3, 3), to="product")
    tanh(net, net.op("Add", x, net.weight("b", 3), to="y"))


def of_frozen_gemm(net):
    rows = net.op("Flatten", "input", to="rows")
    net.op("Gemm", rows, net.weight("frozen", 12, 2), net.weight("b", 1, 2), to="s")
    tanh(net, "s")


def of_frozen_convolution(net):
    net.op("Conv", "input", net.weight("frozen", 2, 4, 1), net.weight("b", 2), to="s")
    tanh(net, "s")


def of_frozen_normalization(net):
    ones = net.constant("frozen", np.ones(3, np.float32))
    net.op("LayerNormalization", "input", ones, net.weight("b", 3), to="y", epsilon=0.1)
    tanh(net, "y")


def of_transposed_convolution(net):
    w = net.weight("w", 4, 2, 2)
    tanh(net, net.op("ConvTranspose", "input", w, net.weight("b", 2), to="s", strides=[2]))


def added_to_transposed_convolution(net):
    s = net.op("ConvTranspose", "input", net.weight("w", 4, 2, 2), to="s", strides=[2])
    tanh(net, net.op("Add", s, net.weight("b", 1, 2, 1), to="y"))


def table_of_positions(net):
    tanh(net, net.op("Add", net.weight("b", 1, 4, 3), "input", to="y"))


def subtracted_from(net):
    tanh(net, net.op("Sub", net.weight("b", 3), "input", to="y"))


def subtracted(net):
    tanh(net, net.op("Sub", "input", net.weight("b", 4, 1), to="y"))


def class_token(net, op="Expand"):
    """One row for all examples before those of each, as vision transformers have it."""
    ones = net.constant("ones", np.array([1, 1]))
    one = net.constant("one", np.array([1]))
    batch = net.op("Shape", "input", to="batch size", end=1)
    times = net.op("Concat", batch, ones, to="times", axis=0)
    token = net.op(op, net.weight("b", 1, 1, 3), times, to="token")
    x = net.op("Concat", token, "input", to="rows", axis=1)
    mean = net.op("ReduceMean", tanh(net, x, "t"), one, to="mean", keepdims=1)
    tanh(net, net.op("Mul", mean, "input", to="product"))


def repeated_class_token(net):
    class_token(net, "Tile")


def shift_used_twice(net):
    net.weight("b", 3)
    x = net.op("Sin", net.op("Add", "input", "b", to="y0"), to="x1")
    tanh(net, net.op("Add", "b", x, to="y1"))


def scale_used_twice(net):
    net.positive("scale", 3)
    tanh(net, net.op("Mul", net.op("Mul", "input", "scale", to="y0"), "scale", to="y1"))


def normalization_used_twice(net):
    names = net.positive("scale", 3), net.weight("b", 3)
    x = net.op("LayerNormalization", "input", *names, to="y0", epsilon=0.1)
    x = net.op("Add", net.op("Sin", x, to="x1"), "input", to="x2")
    tanh(net, net.op("LayerNormalization", x, *names, to="y1", epsilon=0.1))


def scale_that_stretches(net):
    mean = net.op("ReduceMean", "input", net.constant("axis", np.array([2])), to="mean")
    tanh(net, net.op("Mul", mean, net.positive("scale", 3), to="y"))


def deviations(net):
    """What a LayerNormalization subtracts, its difference, and the inverse of its deviation."""
    axis, epsilon = net.constant("axis", np.array([2])), net.constant("epsilon", np.float32(0.1))
    mean = net.op("ReduceMean", "input", axis, to="mean")
    centred = net.op("Sub", "input", mean, to="centred")
    square = net.op("Mul", centred, centred, to="square")
    variance = net.op("Add", net.op("ReduceMean", square, axis, to="mean square"), epsilon, to="v")
    return mean, centred, net.op("Reciprocal", net.op("Sqrt", variance, to="root"), to="rsqrt")


def normalization_of_flax(net):
    _, centred, rsqrt = deviations(net)
    scaled = net.op("Mul", rsqrt, net.positive("scale", 1, 1, 3), to="scaled")
    product = net.op("Mul", centred, scaled, to="product")
    tanh(net, net.op("Add", product, net.weight("b", 1, 1, 3), to="y"))


def instance_normalization_of_flax(net):
    """The scale meets what is smaller than the data: one deviation for all positions."""
    axis = net.constant("axis", np.array([1]))
    rsqrt = net.op("Exp", net.op("ReduceMean", "input", axis, to="mean"), to="rsqrt")
    scaled = net.op("Mul", rsqrt, net.positive("scale", 3), to="scaled")
    product = net.op("Mul", scaled, "input", to="product")
    tanh(net, net.op("Add", product, net.weight("b", 3), to="y"))


def shift_of_a_normalization_and_a_sum(net):
    names = net.positive("scale", 3), net.weight("b", 3)
    x = net.op("LayerNormalization", "input", *names, to="y0", epsilon=0.1)
    tanh(net, net.op("Add", net.op("Sin", x, to="x1"), "b", to="y1"))


def normalization_of_keras(net):
    """``x·(r·scale) + (b − mean·(r·scale))``: blocks of their own."""
    mean, _, rsqrt = deviations(net)
    scaled = net.op("Mul", rsqrt, net.positive("scale", 3), to="scaled")
    rest = net.op("Sub", net.weight("b", 3), net.op("Mul", mean, scaled, to="shifted"), to="rest")
    tanh(net, net.op("Add", net.op("Mul", "input", scaled, to="product"), rest, to="y"))


def time_major(build):
    """A case with the examples on axis 1."""

    def built(net):
        build(net)
        last = net._nodes[-1]
        for node in net._nodes:
            node.input[:] = ["steps" if name == "input" else name for name in node.input]
        last.output[0] = "steps out"
        net.op("Transpose", "input", to="steps", perm=[1, 0, 2])
        net._nodes.insert(0, net._nodes.pop())
        net.op("Transpose", "steps out", to="output", perm=[1, 0, 2])

    return built


def normalization(net):
    names = net.positive("scale", 3), net.weight("b", 3)
    tanh(net, net.op("LayerNormalization", "input", *names, to="y", epsilon=0.1))


def slopes_of_steps(net):
    """One number a step and a feature, the batch between them."""
    tanh(net, net.op("PRelu", "input", net.weight("slope", 4, 1, 3), to="y"))


# Name to builder, the parameters of its block, and sides of the output.
CASES = {
    "slope a channel": (slope_a_channel, "slope", SIDES),
    "slope of all": (slope_of_all, "slope", SIDES),
    "slopes used twice": (slopes_used_twice, "slope", SIDES),
    "behind a frozen product": (behind_frozen_product, "b", SIDES),
    "of a frozen Gemm": (of_frozen_gemm, "b", ("batch", 2)),
    "of a frozen convolution": (of_frozen_convolution, "b", ("batch", 2, 3)),
    "of a frozen normalization": (of_frozen_normalization, "b", SIDES),
    "of a transposed convolution": (of_transposed_convolution, "b", ("batch", 2, 6)),
    "added to a transposed convolution": (added_to_transposed_convolution, "b", ("batch", 2, 6)),
    "table of positions": (table_of_positions, "b", SIDES),
    "subtracted from": (subtracted_from, "b", SIDES),
    "subtracted": (subtracted, "b", SIDES),
    "class token": (class_token, "b", SIDES),
    "repeated class token": (repeated_class_token, "b", SIDES),
    "shift used twice": (shift_used_twice, "b", SIDES),
    "scale used twice": (scale_used_twice, "scale", SIDES),
    "scale that stretches": (scale_that_stretches, "scale", SIDES),
    "normalization used twice": (normalization_used_twice, ("scale", "b"), SIDES),
    "normalization of Flax": (normalization_of_flax, ("scale", "b"), SIDES),
    "instance normalization of Flax": (instance_normalization_of_flax, ("scale", "b"), SIDES),
    "of a normalization and a sum": (shift_of_a_normalization_and_a_sum, "b", SIDES),
    "scale of Keras": (normalization_of_keras, "scale", SIDES),
    "shift of Keras": (normalization_of_keras, "b", SIDES),
    "time-major normalization": (time_major(normalization), ("scale", "b"), SIDES),
    "time-major table": (time_major(shift_used_twice), "b", SIDES),
    "time-major slopes of steps": (time_major(slopes_of_steps), "slope", SIDES),
}


def built(name):
    build, key, outputs = CASES[name]
    net = models.Net()
    build(net)
    return net.model({"input": SIDES}, {"output": outputs}), key


@pytest.mark.parametrize("approximation", ["full", "diagonal"])
@pytest.mark.parametrize("name", CASES)
def test_block_equals_dense_fisher_matrix(name, approximation):
    proto, key = built(name)
    names = (key,) if isinstance(key, str) else key
    constants = {entry.name for entry in proto.graph.initializer}
    kinds = dict.fromkeys(("scale_and_shift", "shift"), approximation)
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto,
        loss="normal",
        estimation_mode="exact",
        reduction="batch_mean",
        trainable=sorted(constants & {"scale", "b", "slope", "w"}),
        approximations=kinds,
    )
    (layer,) = [entry for entry in engine.layers if entry.key == key]
    assert (layer.kind, layer.reason) == ("shift" if key == "b" else "scale_and_shift", "")
    assert layer.formula == {"full": "F", "diagonal": "diag(F)"}[approximation]
    engine.observe(feeds)
    F = oracle.dense_fisher(proto, feeds, "output", names, "normal")
    found = engine.collection.fisher_blocks[key].full_fisher_block()
    expected = F if approximation == "full" else np.diag(np.diag(F))
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(F).max())
