"""The whole Fisher matrix with every operand that a matcher accepts, against the oracle.

Entries of the matrix between two layers show the sign and the scale of the gradients of each. A
block of one layer does not show the sign.
"""

import re

import numpy as np
import pytest

from kfac_engine.layers.matchers import _MATCHERS
from kfac_engine.layers.scales import SHIFTS
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import SINGLE, dense, measured
from tests.comparing import assert_near

# The finite differences of the oracle, which some kernels of BLAS round more. A wrong sign or scale
# is as large as the entries.
DOUBLE = 1e-8
EXAMPLES = 4
FLAT = "double[batch, 3] input"
TOKENS = "double[batch, 2, 3] input"
IMAGE = "float[batch, 2, 3] input"
NORMALIZED = "w(3) b(3)"
# Operator and operand to the input, the trained parameters, the frozen ones, and the nodes between
# the input and the features of a network, which a trained dense layer follows.
# fmt: off
CASES = {
    ("Gemm", 1): (FLAT, "w(2,3) b(2)", "",
        "features = Gemm<transB=1, alpha=-0.5, beta=-2.0>(input, w, b)"),
    ("Gemm", 2): (FLAT, "b(2)", "c(3,2)", "features = Gemm(input, c, b)"),
    ("MatMul", 0): (TOKENS, "w(2,2)", "", "features = MatMul(w, input)"),
    ("MatMul", 1): (TOKENS, "w(3,2) b(2)", "", "h = MatMul(input, w)  features = Add(h, b)"),
    ("Conv", 1): (IMAGE, "w(2,2,2) b(2)", "", "features = Conv(input, w, b)"),
    ("Conv", 2): (IMAGE, "b(2)", "c(2,2,2)", "features = Conv(input, c, b)"),
    ("ConvTranspose", 1): (IMAGE, "w(2,1,2)", "", "features = ConvTranspose(input, w)"),
    ("ConvTranspose", 2): (IMAGE, "b(2)", "c(2,2,2)", "features = ConvTranspose(input, c, b)"),
    ("Gather", 0): ("int64[batch, 2] input", "w(5,2)", "", "features = Gather(w, input)"),
    ("PRelu", 1): ("float[batch, 3] input", "w(3)", "", "features = PRelu(input, w)"),
    ("Mul", 0): (FLAT, "w(3) b(3)", "", "h = Mul(w, input)  features = Add(h, b)"),
    ("Mul", 1): (FLAT, "w(3) b(3)", "", "h = Mul(input, w)  features = Sub(b, h)"),
    ("LayerNormalization", 1): (TOKENS, NORMALIZED, "",
        "features = LayerNormalization<axis=-1>(input, w, b)"),
    ("LayerNormalization", 2): (TOKENS, "b(3)", "c(3)",
        "features = LayerNormalization<axis=-1>(input, c, b)"),
    ("BatchNormalization", 1): ("float[batch, 3, 2] input", NORMALIZED, "c(3) variance(3)",
        "features = BatchNormalization(input, w, b, c, variance)"),
    ("BatchNormalization", 2): ("float[batch, 3, 2] input", "b(3)", "c(3) d(3) variance(3)",
        "features = BatchNormalization(input, d, b, c, variance)"),
    ("InstanceNormalization", 1): ("float[batch, 3, 4] input", NORMALIZED, "",
        "features = InstanceNormalization(input, w, b)"),
    ("InstanceNormalization", 2): ("float[batch, 3, 4] input", "b(3)", "c(3)",
        "features = InstanceNormalization(input, c, b)"),
    ("GroupNormalization", 1): ("float[batch, 2, 3] input", "w(2) b(2)", "",
        "features = GroupNormalization<num_groups=1>(input, w, b)"),
    ("GroupNormalization", 2): ("float[batch, 2, 3] input", "b(2)", "c(2)",
        "features = GroupNormalization<num_groups=1>(input, c, b)"),
    ("Add", 0): (TOKENS, "b(3)", "", "features = Add(b, input)"),
    ("Add", 1): (TOKENS, "b(2,3)", "", "features = Add(input, b)"),
    ("Sub", 0): (TOKENS, "b(3)", "", "features = Sub(b, input)"),
    ("Expand", 0): (FLAT, "b(3)", "",
        "shape = Shape(input)  wide = Expand(b, shape)  features = Sub(input, wide)"),
    ("Tile", 0): (FLAT, "b(1,3)", "",
        """size = Shape<end=1>(input)  one = Constant<value_ints=[1]>()
           times = Concat<axis=0>(size, one)  wide = Tile(b, times)
           features = Sub(input, wide)"""),
    # Further spellings.
    "scaled bias": (FLAT, "b(2)", "c(3,2)", "features = Gemm<beta=-2.0>(input, c, b)"),
    "subtracted": (TOKENS, "b(3)", "", "features = Sub(input, b)"),
    "negative filter": (IMAGE, "w(2,2,2) b(2)", "", "n = Neg(w)  features = Conv(input, n, b)"),
    "subtracted bias": (FLAT, "w(3,2) b(2)", "", "h = MatMul(input, w)  features = Sub(h, b)"),
    "subtracted channels": (IMAGE, "w(2,2,2) b(2,1)", "",
        "h = Conv(input, w)  features = Sub(h, b)"),
    "subtracted behind a scale": (FLAT, "w(3) b(3)", "", "h = Mul(input, w)  features = Sub(h, b)"),
    "subtracted positions": (TOKENS, "b(4,3)", "",
        """at = Constant<value_ints=[2, 0]>()  rows = Gather(b, at)
           features = Sub(input, rows)"""),
    "subtracted view": (TOKENS, "b(2)", "",
        """axis = Constant<value_ints=[1]>()  wide = Unsqueeze(b, axis)
           features = Sub(input, wide)"""),
    "subtracted negative": (FLAT, "b(3)", "", "n = Neg(b)  features = Sub(input, n)"),
    "subtracted twice": (FLAT, "b(3)", "", "h = Sub(input, b)  a = Tanh(h)  features = Sub(a, b)"),
    "subtracted and added": (FLAT, "b(3)", "",
        "h = Sub(input, b)  a = Tanh(h)  features = Add(a, b)"),
    "negative weight": (FLAT, "w(3,2) b(2)", "",
        """c = Constant<value_float=-2.0>()  d = CastLike(c, w)  s = Mul(w, d)
           h = MatMul(input, s)  features = Add(h, b)"""),
    "parts": (FLAT, "w(3,4) b(4)", "",
        """p, q = Split<axis=1, num_outputs=2>(w)  c, d = Split<axis=0, num_outputs=2>(b)
           h = MatMul(input, p)  s = Sub(h, c)  a = Tanh(s)
           g = MatMul(input, q)  r = Add(g, d)  features = Mul(a, r)"""),
    "one vector": (FLAT, "w(8)", "",
        """shape = Constant<value_ints=[3, 2]>()  sizes = Constant<value_ints=[6, 2]>()
           p, b = Split<axis=0>(w, sizes)
           m = Reshape(p, shape)  h = MatMul(input, m)  features = Add(h, b)"""),
    "recurrence": ("float[batch, 2, 3] input", "w(1,8,3) r(1,8,2) b(1,16)", "",
        """steps = Transpose<perm=[1, 0, 2]>(input)
           all, last, cell = LSTM<hidden_size=2>(steps, w, r, b)
           features = Transpose<perm=[1, 0, 2]>(last)"""),
}
# fmt: on


def network(case):
    """The network of a case, its batch, and the tolerance of its numbers."""
    if case not in CASES:
        pytest.fail(f"add a network with operand {case[1]} of {case[0]} to CASES")
    entry, trained, frozen, nodes = CASES[case]
    weights = f"{trained} {frozen}"
    single = entry.startswith("float[")
    rng = np.random.default_rng(1)
    sides = [int(side) for side in entry.split("batch, ")[1].split("]")[0].split(", ")]
    batch = rng.integers(0, 5, (EXAMPLES, *sides))
    if not entry.startswith("int"):
        batch = rng.normal(size=batch.shape).astype("f4" if single else "f8")
    model = models.network(entry, weights, nodes, " features")
    (features,) = oracle.evaluate(model, {"input": batch}, "features")
    weights += f" head({features.size // EXAMPLES},2)"
    nodes += "  flat = Flatten(features)  a_head = Tanh(flat)  output = MatMul(a_head, head)"
    model = models.network(entry, weights, nodes, "[batch, 2] output")
    return model, {"input": batch}, SINGLE if single else DOUBLE


def trained_in(case):
    return [*re.findall(r"(\w+)\(", CASES[case][1]), "head"]


ROWS = [*_MATCHERS, *SHIFTS, *(case for case in CASES if isinstance(case, str))]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_whole_matrix_is_the_fisher(case):
    model, inputs, tolerance = network(case)
    trained = trained_in(case)
    curvature = measured(model, (inputs, None), structure="full", trainable=trained)
    assert list(curvature.model.parameters) == trained
    if isinstance(case, tuple):  # the operand has a layer
        kinds = {layer.kind for layer in curvature.layout.assembly.discovery.layers}
        assert "generic" not in kinds
    expected = oracle.dense_fisher(model, inputs, "output", trained, "categorical")
    assert_near(dense(curvature), expected, tolerance)


def test_case_without_network_fails_with_its_operand():
    with pytest.raises(pytest.fail.Exception, match="operand 3 of Mine"):
        network(("Mine", 3))


@pytest.mark.parametrize("case", ["parts", "recurrence", "one vector"])
def test_gradients_of_examples_have_the_names_and_shapes_of_parameters(case):
    """The documented loop: ``gᵀ (F + λI)⁻¹ g`` of each example, a sum over the layers."""
    model, inputs, tolerance = network(case)
    labels = np.arange(EXAMPLES) % 2
    curvature = measured(model, (inputs, None), trainable=trained_in(case))
    scores, names = np.zeros(EXAMPLES), set()
    for tile in curvature.example_gradients(inputs, labels):
        products = curvature.multiply(tile.arrays, power=-1, damping=0.1)
        for name, gradients in tile.arrays.items():
            scores[tile.examples] += (gradients * products[name]).reshape(len(gradients), -1).sum(1)
        names |= tile.arrays.keys()
    assert names == curvature.model.parameters.keys()
    P = dense(curvature, power=-1, damping=0.1)
    for number in range(EXAMPLES):
        _, gradient = oracle.loss_and_gradient(
            model,
            {"input": inputs["input"][number : number + 1]},
            "output",
            list(curvature.model.parameters),
            "categorical",
            labels[number : number + 1],
        )
        g = np.concatenate([gradient[name].ravel() for name in curvature.model.parameters])
        assert_near(scores[number], g @ P @ g, tolerance)
