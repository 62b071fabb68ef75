"""Every kind of layer through the engine, against the dense Fisher matrix, where blocks are exact.

The networks are linear in their weights and the loss is Gaussian: gradients of different outputs
are uncorrelated, so that sums over groups, positions and uses lose nothing. Scales and shifts have
blocks that are exact behind anything.
"""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.approximations import KINDS
from tests import models, oracle
from tests.test_exactness import packed_order

# float32 sums of some hundred terms, relative to the largest entry.
SINGLE = 2e-5
# So little that what it adds to a product is below rounding: its root, times a factor.
DAMPING = 1e-14
BATCH, WIDTH = 5, 3


IDS, LINE, IMAGE, SQUARE = "batch,4", "batch,4,6", "batch,4,4,6", f"batch,{WIDTH},{WIDTH}"
TABLE = f"w({models.VOCABULARY},{WIDTH}) depth:{models.VOCABULARY}"
ONE_OF = "hot = OneHot(input, depth, known)  y = MatMul(hot, w)  "
WB, BOTH = ("w", "b"), ("scale", "shift")
# Sides of the input, constants and nodes up to y, and the parameters of the block with its kind.
# fmt: off
CASES = {
    "line": (LINE, "w(3,4,3) b(3)", "y = Conv(input, w, b)", WB, "conv1d"),
    "dilated": (
        IMAGE, "w(3,4,2,3) b(3)",
        "y = Conv<pads=[1, 0, 2, 1], dilations=[2, 1], strides=[1, 2]>(input, w, b)", WB, "conv2d"),
    "groups": (
        IMAGE, "w(6,2,2,2) b(6)", "y = Conv<group=2>(input, w, b)", WB, "grouped_convolution"),
    "groups of a line": (
        LINE, "w(2,2,3) b(2)", "y = Conv<group=2>(input, w, b)", WB, "grouped_convolution"),
    "depthwise": (
        IMAGE, "w(8,1,2,3) b(8)", "y = Conv<group=4>(input, w, b)", WB, "grouped_convolution"),
    "embedding": ("batch", TABLE, "y = Gather(w, input)", ("w",), "embedding"),
    "embedding of sentences": (IDS, TABLE, "y = Gather(w, input)", ("w",), "embedding"),
    # Rows of a matrix, picked by a product with vectors of two values.
    "one-hot": ("batch", TABLE + " known=0.,1.", ONE_OF, ("w",), "embedding"),
    "zero or three": ("batch", TABLE + " known=0.,3.", ONE_OF, ("w",), "fully_connected"),
    "one-cold": ("batch", TABLE + " known=1.,0.", ONE_OF, ("w",), "fully_connected"),
    # Ones lie along the axis before the last: what meets the weight are positions.
    "one-hot along the middle": (
        IDS, f"w(4,{WIDTH}) depth:{models.VOCABULARY} known=0.,1.",
        "hot = OneHot<axis=1>(input, depth, known)  y = MatMul(hot, w)", ("w",), "fully_connected"),
    # The same layer on the data and on the data turned around.
    "uses": (
        "batch,3", "w(3,3) b(3) order=2,1,0",
        """turned = Gather<axis=1>(input, order)  s = Gemm(input, w, b)  t = Gemm(turned, w, b)
           y = Concat<axis=1>(s, t)""",
        WB, "fully_connected_multi",
    ),
    # Positions lie on the first axis, of which there are fewer than examples.
    "time first": (
        "2,batch,3", "w(3,3)", "tokens = MatMul(input, w)  y = Transpose<perm=[1, 0, 2]>(tokens)",
        ("w",), "fully_connected"),
    "normalization": (
        "batch,2,3", "scale(3) shift(3)",
        "normal = LayerNormalization(input, scale, shift)  y = Tanh(normal)", BOTH,
        "scale_and_shift"),
    # A scale for each row of an example, a shift for each column, of which there are as many.
    "different axes": (
        SQUARE, "scale(3,1) shift(3)",
        "scaled = Mul(input, scale)  shifted = Add(scaled, shift)  y = Tanh(shifted)", BOTH,
        "scale_and_shift"),
    # The same with a scale of one axis, which only a view lays along the rows.
    "a view": (
        SQUARE, "scale(3) shift(3) axis=1",
        """wide = Unsqueeze(scale, axis)  scaled = Mul(input, wide)  shifted = Add(scaled, shift)
           y = Tanh(shifted)""",
        ("scale",), "scale_and_shift",
    ),
}  # fmt: skip
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_block_products_equal_dense_fisher_products(name):
    sides, constants, nodes, parameters, kind = CASES[name]
    fed = "int64" if sides in ("batch", IDS) else "float"
    model = models.written(
        f"{sides} -> batch,features", constants, f"{nodes}  output = Flatten(y)", fed
    )
    inputs = models.random_inputs(model, BATCH)
    engine = ke.Engine.from_onnx(
        model, loss="normal", estimation_mode="exact", reduction="batch_mean", damping=DAMPING
    )
    kinds = {layer.parameters: layer.kind for layer in engine.layers}
    engine.observe(inputs)
    rng = np.random.default_rng(1)
    V = {key: rng.standard_normal(v.shape).astype("f") for key, v in engine.parameters.items()}
    found = engine.precondition(V, exp=1)
    assert kinds[parameters] == kind
    F = oracle.dense_fisher(model, inputs, "output", parameters, "normal")
    expected = F @ np.concatenate([V[key].ravel() for key in parameters])
    product = np.concatenate([found[key].ravel() for key in parameters])
    np.testing.assert_allclose(product, expected, rtol=0, atol=SINGLE * np.abs(expected).max())


# -- batches of different lengths ------------------------------------------------------------------

# Engines recognize depthwise convolutions as grouped ones, whose rows are the same, and use blocks
# of generic parameters that differentiate single examples: the diagonal only.
NOT_RECOGNIZED = {
    *(("depthwise_conv2d", name) for name in KINDS["depthwise_conv2d"].approximations),
    ("generic", "full"),
}
ROWS = [(kind, name) for kind, row in KINDS.items() for name in row.approximations]
ROWS = [row for row in ROWS if row not in NOT_RECOGNIZED]

_TURNED = "order = Constant<value_ints=[1, 0]>()  turned = Gather<axis={}>(input, order)  "
_TWICE = _TURNED.format(1) + "h = {0}(input, w)  g = {0}(turned, w)  output = Concat<axis=1>(h, g)"
_USES = "float[batch, 2, T, 2] input", "w(2,2,2,1)"
# The input, of which T is the length, the parameters, and the nodes of a network in which a layer
# of this kind is exact; of one approximation where the others need another network.
# fmt: off
NETWORKS = {
    "fully_connected": ("double[batch, T, 3] input", "w(3,2) b(2)",
        "h = MatMul(input, w)  output = Add(h, b)"),
    ("fully_connected", "kron_reduce"): ("double[batch, T, 3] input", "w(3,2) b(2)",
        """h = MatMul(input, w)  s = Add(h, b)
           axis = Constant<value_ints=[1]>()  output = ReduceMean(s, axis)"""),
    "conv2d": ("float[batch, 2, T, 3] input", "w(3,2,2,2) b(3)", "output = Conv(input, w, b)"),
    ("conv2d", "kron_reduce"): ("float[batch, 2, T, 3] input", "w(3,2,2,2) b(3)",
        "s = Conv(input, w, b)  output = GlobalAveragePool(s)"),
    # The pixels of different taps are correlated: a window has one tap.
    ("conv2d", "kron_sua"): ("float[batch, 2, T, 3] input", "w(3,2,1,1)",
        "output = Conv(input, w)"),
    "conv1d": ("float[batch, 2, T] input", "w(2,2,2)", "output = Conv(input, w)"),
    "convolution": ("float[batch, 2, T, 2, 2] input", "w(2,2,2,1,2)", "output = Conv(input, w)"),
    "conv_transpose": ("float[batch, 2, T, 2] input", "w(2,2,2,2)",
        "output = ConvTranspose<strides=[2, 2]>(input, w)"),
    "fully_connected_multi": ("double[batch, T, 2] input", "w(2,2)",
        _TURNED.format(2)
        + "h = MatMul(input, w)  g = MatMul(turned, w)  output = Concat<axis=2>(h, g)"),
    "conv2d_multi": (*_USES, _TWICE.format("Conv")),
    "convolution_multi": ("float[batch, 2, T] input", "w(2,2,2)", _TWICE.format("Conv")),
    "conv_transpose_multi": (*_USES, _TWICE.format("ConvTranspose<strides=[2, 1]>")),
    "grouped_convolution": ("float[batch, 4, T, 2] input", "w(4,2,2,1)",
        "output = Conv<group=2>(input, w)"),
    "grouped_convolution_multi": ("float[batch, 2, T, 2] input", "w(2,1,2,1)",
        _TWICE.format("Conv<group=2>")),
    "stacked_dense": ("double[batch, T, 2, 1, 3] input", "w(2,3,2)", "output = MatMul(input, w)"),
    "embedding": ("int64[batch, T] input", "w(5,2)", "output = Gather(w, input)"),
    "embedding_multi": ("int64[batch, T] input", "w(5,2)",
        """last = Constant<value_int=4>()  turned = Sub(last, input)
           h = Gather(w, input)  g = Gather(w, turned)  output = Concat<axis=2>(h, g)"""),
    # Outputs of their own for the rows of ids and for products: no gradient has both.
    "tied_embedding": ("int64[batch, T] input", "w(5,1)",
        """x = Cast<to=11>(input)  axis = Constant<value_ints=[2]>()  a = Unsqueeze(x, axis)
           t = Transpose<perm=[1, 0]>(w)  h = MatMul(a, t)  g = Gather(w, input)
           output = Concat<axis=2>(g, h)"""),
    "scale_and_shift": ("double[batch, T, 3] input", "w(3) b(3)",
        "h = Mul(input, w)  s = Add(h, b)  output = Tanh(s)"),
    "shift": ("double[batch, T, 3] input", "b(3)", "s = Add(input, b)  output = Tanh(s)"),
    "generic": ("double[batch, T, 3] input", "w(3)", "h = Sin(w)  output = Mul(input, h)"),
}
# fmt: on


def network_of_any_length(kind, name):
    """A model with a layer of a kind, and batches of different lengths and sizes of numbers."""
    entry = NETWORKS.get((kind, name)) or NETWORKS.get(kind)
    if entry is None:
        pytest.fail(f"add a network with a layer of kind '{kind}' to NETWORKS")
    head, weights, nodes = entry
    dtype, sides = head.split(" input")[0].split("[")
    model, rng = models.network(head, weights, nodes, " output"), np.random.default_rng(1)
    batches = []
    for length, scale in ((2, 1), (5, 2)):
        shape = [{"batch": 4, "T": length}.get(s) or int(s) for s in sides[:-1].split(", ")]
        if dtype == "int64":
            x = rng.integers(0, 5 // scale, shape)
        else:
            x = scale * rng.normal(size=shape)
            x = np.concatenate([x[:2], -x[:2]]) if name == "kron_sua" else x  # of mean zero
        batches.append({"input": x.astype({"float": "f4", "double": "f8", "int64": "i8"}[dtype])})
    return model, batches


def approximated(name, F, model, parameters, block):
    """What an approximation makes of a Fisher block, in the order of the file."""
    if name == "ekfac":  # the basis is that of the first batch; the diagonal in it is exact
        bases = block.factor.bases
        order = packed_order(model, parameters, "OIHW" if "Conv" in str(model.graph) else "IO")
        Q = np.empty_like(F)
        Q[order] = np.kron(bases.input, bases.output)
        return (Q * np.diag(Q.T @ F @ Q)) @ Q.T
    if name == "diagonal":
        return np.diag(np.diag(F))
    if name.endswith(("in_diag", "both_diag")):
        rows = np.arange(len(F)) // 2  # two outputs for each input; the bias is the last input
        return np.where(rows[:, None] == rows, F, 0)
    return F


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_block_of_batches_of_different_lengths_is_the_mean_of_their_fisher_matrices(kind, name):
    model, batches = network_of_any_length(kind, name)
    parameters = [entry.name for entry in model.graph.initializer]
    F = sum(oracle.dense_fisher(model, b, "output", parameters, "normal") for b in batches) / 2
    for ordered in (batches, batches[::-1]):
        engine = ke.Engine.from_onnx(
            model,
            loss="normal",
            estimation_mode="exact",
            reduction="batch_mean",
            damping=DAMPING,
            approximations={kind: name},
            schedule=ke.Schedule(refresh_every=1000),
        )
        engine.estimator.cov_ema_decay = 1.0  # a mean of the batches
        for batch in ordered:
            engine.observe(batch)
        (layer,) = engine.layers
        assert (layer.kind, engine.collection.approximation_of(layer.key)) == (kind, name)
        block = engine.collection.fisher_blocks[layer.key]
        expected = approximated(name, F, model, parameters, block)
        for v in np.eye(len(F))[:: max(1, len(F) // 4)]:
            V, start = {}, 0
            for key in parameters:
                size = engine.parameters[key].size
                V[key] = v[start : start + size].reshape(engine.parameters[key].shape)
                start += size
            found = engine.precondition(V, exp=1)
            product = np.concatenate([found[key].ravel() for key in parameters])
            np.testing.assert_allclose(product, expected @ v, rtol=0, atol=SINGLE * abs(F).max())
