"""Every kind of layer through the engine, against the dense Fisher matrix, where blocks are exact.

The networks are linear in their weights and the loss is Gaussian: gradients of different outputs
are uncorrelated, so that sums over groups, positions and uses lose nothing. Scales and shifts have
blocks that are exact behind anything.
"""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# float32 sums of some hundred terms, relative to the largest entry.
SINGLE = 2e-5
# So little that what it adds to a product is below rounding: its root, times a factor.
DAMPING = 1e-14
BATCH, WIDTH = 5, 3


def convolution(weight, **attributes):
    def build(net):
        w, b = net.weight("w", *weight), net.weight("b", weight[0])
        return net.op("Conv", "input", w, b, to="y", **attributes)

    return build


def one_of(*values):
    """Rows of a matrix, picked by a product with vectors of two values."""

    def build(net):
        depth = net.constant("depth", np.array(models.VOCABULARY))
        known = net.constant("values", np.array(values, np.float32))
        hot = net.op("OneHot", "input", depth, known, to="hot")
        return net.op("MatMul", hot, net.weight("w", models.VOCABULARY, WIDTH), to="y")

    return build


def one_hot_along_the_middle(net):
    """Ones lie along the axis before the last: what meets the weight are positions."""
    depth = net.constant("depth", np.array(models.VOCABULARY))
    known = net.constant("values", np.array([0, 1], np.float32))
    hot = net.op("OneHot", "input", depth, known, to="hot", axis=1)
    return net.op("MatMul", hot, net.weight("w", 4, WIDTH), to="y")


def embedding(net):
    return net.op("Gather", net.weight("w", models.VOCABULARY, WIDTH), "input", to="y")


def two_uses(net):
    """The same layer on the data and on the data turned around."""
    w, b = net.weight("w", WIDTH, WIDTH), net.weight("b", WIDTH)
    order = net.constant("order", np.arange(WIDTH)[::-1].copy())
    turned = net.op("Gather", "input", order, to="turned", axis=1)
    uses = [net.op("Gemm", x, w, b, to=f"{x} through w") for x in ("input", turned)]
    return net.op("Concat", *uses, to="y", axis=1)


def time_first(net):
    """Positions lie on the first axis, of which there are fewer than examples."""
    tokens = net.op("MatMul", "input", net.weight("w", WIDTH, WIDTH), to="tokens")
    return net.op("Transpose", tokens, to="y", perm=[1, 0, 2])


def layer_normalization(net):
    operands = net.positive("scale", WIDTH), net.weight("shift", WIDTH)
    y = net.op("LayerNormalization", "input", *operands, to="normal")
    return net.op("Tanh", y, to="y")


def along_different_axes(net):
    """A scale for each row of an example, a shift for each column, of which there are as many."""
    scaled = net.op("Mul", "input", net.positive("scale", WIDTH, 1), to="scaled")
    shifted = net.op("Add", scaled, net.weight("shift", WIDTH), to="shifted")
    return net.op("Tanh", shifted, to="y")


def view_along_another_axis(net):
    """The same with a scale of one axis, which only a view lays along the rows."""
    axis = net.constant("axis", np.array([1]))
    wide = net.op("Unsqueeze", net.positive("scale", WIDTH), axis, to="wide")
    shifted = net.op(
        "Add", net.op("Mul", "input", wide, to="scaled"), net.weight("shift", WIDTH), to="shifted"
    )
    return net.op("Tanh", shifted, to="y")


_IDS, _SENTENCES, _SQUARE = (BATCH,), (BATCH, 4), (BATCH, WIDTH, WIDTH)
_EVEN, _LINE, _IMAGE = {"group": 2}, (BATCH, 4, 6), (BATCH, 4, 4, 6)
_UNEVEN = {"pads": [1, 0, 2, 1], "dilations": [2, 1], "strides": [1, 2]}
# Name to builder, shape of the input, and the parameters of each block with its layer's kind.
CASES = {
    "line": (convolution((3, 4, 3)), _LINE, {("w", "b"): "conv1d"}),
    "dilated": (convolution((3, 4, 2, 3), **_UNEVEN), _IMAGE, {("w", "b"): "conv2d"}),
    "groups": (convolution((6, 2, 2, 2), **_EVEN), _IMAGE, {("w", "b"): "grouped_convolution"}),
    "groups of a line": (
        convolution((2, 2, 3), **_EVEN),
        _LINE,
        {("w", "b"): "grouped_convolution"},
    ),
    "depthwise": (
        convolution((8, 1, 2, 3), group=4),
        _IMAGE,
        {("w", "b"): "grouped_convolution"},
    ),
    "embedding": (embedding, _IDS, {("w",): "embedding"}),
    "embedding of sentences": (embedding, _SENTENCES, {("w",): "embedding"}),
    "one-hot": (one_of(0, 1), _IDS, {("w",): "embedding"}),
    "zero or three": (one_of(0, 3), _IDS, {("w",): "fully_connected"}),
    "one-cold": (one_of(1, 0), _IDS, {("w",): "fully_connected"}),
    "one-hot along the middle": (
        one_hot_along_the_middle,
        _SENTENCES,
        {("w",): "fully_connected"},
    ),
    "uses": (two_uses, (BATCH, WIDTH), {("w", "b"): "fully_connected_multi"}),
    "time first": (time_first, (2, BATCH, WIDTH), {("w",): "fully_connected"}),
    "normalization": (
        layer_normalization,
        (BATCH, 2, WIDTH),
        {("scale", "shift"): "scale_and_shift"},
    ),
    "different axes": (along_different_axes, _SQUARE, {("scale", "shift"): "scale_and_shift"}),
    "a view": (view_along_another_axis, _SQUARE, {("scale",): "scale_and_shift"}),
}


def network(build, sides):
    """The case's model, with its result as rows, and a batch."""
    net = models.Net()
    build(net)
    net.op("Flatten", "y", to="output")
    ids = "int64" if sides in (_IDS, _SENTENCES) else None
    shape = ["batch" if side == BATCH else side for side in sides]
    model = net.model({"input": shape}, {"output": ["batch", "features"]}, ids)
    return model, models.random_inputs(model, BATCH)


@pytest.mark.parametrize("name", CASES)
def test_block_products_equal_dense_fisher_products(name):
    build, sides, blocks = CASES[name]
    model, inputs = network(build, sides)
    engine = ke.Engine.from_onnx(
        model,
        loss="normal",
        estimation_mode="exact",
        reduction="batch_mean",
        damping=DAMPING,
    )
    kinds = {layer.parameters: layer.kind for layer in engine.layers}
    engine.observe(inputs)
    rng = np.random.default_rng(1)
    V = {key: rng.standard_normal(v.shape).astype("f") for key, v in engine.parameters.items()}
    found = engine.precondition(V, exp=1)
    for parameters, kind in blocks.items():
        assert kinds[parameters] == kind
        F = oracle.dense_fisher(model, inputs, "output", parameters, "normal")
        expected = F @ np.concatenate([V[key].ravel() for key in parameters])
        product = np.concatenate([found[key].ravel() for key in parameters])
        np.testing.assert_allclose(product, expected, rtol=0, atol=SINGLE * np.abs(expected).max())
