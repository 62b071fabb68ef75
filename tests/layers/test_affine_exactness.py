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

# Behind a Tanh gradients differ from position to position.
NORMAL = "LayerNormalization<epsilon=0.1>"
TWICE = "x = Sin(y)  z = {}  output = Tanh(z)"
IN_STEPS = "x = Transpose<perm=[1, 0, 2]>(input)  "
OF_STEPS = "  t = Tanh(y)  output = Transpose<perm=[1, 0, 2]>(t)"
# One row for all examples before those of each, as vision transformers have it.
TOKEN = """size = Shape<end=1>(input)  times = Concat<axis=0>(size, ones)  token = {}(b, times)
    rows = Concat<axis=1>(token, input)  t = Tanh(rows)  mean = ReduceMean(t, one)
    s = Mul(mean, input)  output = Tanh(s)"""
# What a LayerNormalization subtracts, its difference, and the inverse of its deviation.
DEVIATIONS = """mean = ReduceMean(input, axis)  centred = Sub(input, mean)
    square = Mul(centred, centred)  moment = ReduceMean(square, axis)
    v = Add(moment, epsilon)  root = Sqrt(v)  rsqrt = Reciprocal(root)  """
# The products are ``x·(r·scale) + (b − mean·(r·scale))``: blocks of their own.
KERAS = """scaled = Mul(rsqrt, scale)  shifted = Mul(mean, scaled)  rest = Sub(b, shifted)
    product = Mul(input, scaled)  y = Add(product, rest)  output = Tanh(y)"""
OF_KERAS = "scale(3) b(3) axis=2 epsilon:0.1", DEVIATIONS + KERAS
UPSAMPLED, BOTH = "batch,4,3 -> batch,2,6", ("scale", "b")

# Name to the parameters of its block, and what ``models.written`` makes a model of: constants and
# nodes, behind them the sides where those of the output are others.
# fmt: off
CASES = {
    "normalization": (BOTH, "scale(3) b(3)", f"s = {NORMAL}(input, scale, b)  output = Tanh(s)"),
    "normalization over two axes": (
        "scale", "scale(4,3)",
        "s = LayerNormalization<epsilon=0.1, axis=-2>(input, scale)  output = Tanh(s)"),
    "normalization whose shift is used elsewhere": (
        "scale", "scale(3) b(3)", f"y = {NORMAL}(input, scale, b)  s = Mul(y, b)  output = Tanh(s)"
    ),
    "instance normalization": (
        BOTH, "scale(4) b(4)",
        "s = InstanceNormalization<epsilon=0.1>(input, scale, b)  output = Tanh(s)"),
    "batch normalization": (
        BOTH, "scale(4) b(4) mean=0.1,-0.2,0.3,-0.4 var=0.5,1.,1.5,2.",
        "s = BatchNormalization<epsilon=0.1>(input, scale, b, mean, var)  output = Tanh(s)"),
    "group normalization": (
        BOTH, "scale(2) b(2)",
        "s = GroupNormalization<num_groups=2, epsilon=0.1>(input, scale, b)  output = Tanh(s)"),
    "product and sum": (
        BOTH, "scale(3) b(4,1)", "x = Mul(scale, input)  s = Add(x, b)  output = Tanh(s)"),
    "product": ("scale", "scale(4,1)", "s = Mul(input, scale)  output = Tanh(s)"),
    "single number": ("scale", "scale(1,1)", "s = Mul(input, scale)  output = Tanh(s)"),
    "views": (
        BOTH, "scale(4) b(4) axis=1 sides=1,4,1",
        """u = Unsqueeze(scale, axis)  v = Reshape(b, sides)  x = Mul(input, u)  s = Add(v, x)
           output = Tanh(s)""",
    ),
    "sum whose shift is used elsewhere": (
        "scale", "scale(3) b(3)",
        "y = Mul(input, scale)  x = Add(y, b)  s = Mul(x, b)  output = Tanh(s)"),
    "slope a channel": ("slope", "slope(4,1)", "s = PRelu(input, slope)  output = Tanh(s)"),
    "slope of all": ("slope", "slope(1)", "s = PRelu(input, slope)  output = Tanh(s)"),
    "slopes used twice": (
        "slope", "slope(4,1)", "y = PRelu(input, slope)  " + TWICE.format("PRelu(x, slope)")),
    "behind a frozen product": (
        "b", "frozen(3,3) b(3)", "x = MatMul(input, frozen)  s = Add(x, b)  output = Tanh(s)"),
    "of a frozen Gemm": (
        "b", "frozen(12,2) b(1,2)", "x = Flatten(input)  s = Gemm(x, frozen, b)  output = Tanh(s)",
        "batch,4,3 -> batch,2"),
    "of a frozen convolution": (
        "b", "frozen(2,4,1) b(2)", "s = Conv(input, frozen, b)  output = Tanh(s)",
        "batch,4,3 -> batch,2,3"),
    "of a frozen normalization": (
        "b", "frozen=1.,1.,1. b(3)", f"s = {NORMAL}(input, frozen, b)  output = Tanh(s)"),
    "of a transposed convolution": (
        "b", "w(4,2,2) b(2)", "s = ConvTranspose<strides=[2]>(input, w, b)  output = Tanh(s)",
        UPSAMPLED),
    "added to a transposed convolution": (
        "b", "w(4,2,2) b(1,2,1)",
        "s = ConvTranspose<strides=[2]>(input, w)  y = Add(s, b)  output = Tanh(y)", UPSAMPLED),
    "table of positions": ("b", "b(1,4,3)", "y = Add(b, input)  output = Tanh(y)"),
    "subtracted from": ("b", "b(3)", "y = Sub(b, input)  output = Tanh(y)"),
    "subtracted": ("b", "b(4,1)", "y = Sub(input, b)  output = Tanh(y)"),
    "class token": ("b", "b(1,1,3) ones=1,1 one=1", TOKEN.format("Expand")),
    "repeated class token": ("b", "b(1,1,3) ones=1,1 one=1", TOKEN.format("Tile")),
    "shift used twice": ("b", "b(3)", "y = Add(input, b)  " + TWICE.format("Add(b, x)")),
    "scale used twice": (
        "scale", "scale(3)", "x = Mul(input, scale)  y = Mul(x, scale)  output = Tanh(y)"),
    "scale that stretches": (
        "scale", "scale(3) axis=2",
        "mean = ReduceMean(input, axis)  y = Mul(mean, scale)  output = Tanh(y)"),
    "normalization used twice": (
        BOTH, "scale(3) b(3)",
        f"""y = {NORMAL}(input, scale, b)  x = Sin(y)  v = Add(x, input)
            z = {NORMAL}(v, scale, b)  output = Tanh(z)""",
    ),
    "normalization of Flax": (
        BOTH, "scale(1,1,3) b(1,1,3) axis=2 epsilon:0.1",
        DEVIATIONS + """scaled = Mul(rsqrt, scale)  product = Mul(centred, scaled)
            y = Add(product, b)  output = Tanh(y)""",
    ),
    # The scale meets what is smaller than the data: one deviation for all positions.
    "instance normalization of Flax": (
        BOTH, "scale(3) b(3) axis=1",
        """mean = ReduceMean(input, axis)  rsqrt = Exp(mean)  scaled = Mul(rsqrt, scale)
           product = Mul(scaled, input)  y = Add(product, b)  output = Tanh(y)""",
    ),
    "of a normalization and a sum": (
        "b", "scale(3) b(3)", f"y = {NORMAL}(input, scale, b)  " + TWICE.format("Add(x, b)")),
    "scale of Keras": ("scale", *OF_KERAS),
    "shift of Keras": ("b", *OF_KERAS),
    "time-major normalization": (
        BOTH, "scale(3) b(3)", f"{IN_STEPS}y = {NORMAL}(x, scale, b){OF_STEPS}"),
    "time-major table": (
        "b", "b(3)", f"{IN_STEPS}s = Add(x, b)  v = Sin(s)  y = Add(b, v){OF_STEPS}"),
    # One number a step and a feature, the batch between them.
    "time-major slopes of steps": (
        "slope", "slope(4,1,3)", f"{IN_STEPS}y = PRelu(x, slope){OF_STEPS}"),
}  # fmt: skip
# fmt: on


@pytest.mark.parametrize("approximation", ["full", "diagonal"])
@pytest.mark.parametrize("name", CASES)
def test_block_equals_dense_fisher_matrix(name, approximation):
    key, constants, nodes, *sides = CASES[name]
    proto = models.written(*(sides or ["batch,4,3"]), constants, nodes)
    names = (key,) if isinstance(key, str) else key
    values = {entry.name for entry in proto.graph.initializer}
    kinds = dict.fromkeys(("scale_and_shift", "shift"), approximation)
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(
        proto,
        loss="normal",
        estimation_mode="exact",
        reduction="batch_mean",
        trainable=sorted(values & {"scale", "b", "slope", "w"}),
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
