"""Equal functions whose weights lie otherwise in the file take equal steps, with every optimizer.

A pair is two models of one function. Both begin with equal weights, and each array of the second
model is a rearrangement of the arrays of the first.
"""

import numpy as np
import pytest

import kfac_engine as ke
from tests.training.layout_pairs import (
    EQUAL,
    GEMM,
    MATMUL,
    OPTIMIZERS,
    QKV,
    N,
    Pair,
    attention,
    built,
    by_svd,
    columns,
    difference,
    draws,
    recurrence,
    recurrent,
)

ADDED = " s = Add (h, b)  y = Tanh (s) "
DENSE = "h = MatMul (x, W)" + ADDED
CONVOLUTION = "h = Conv (x, W)  y = Tanh (h)"


def dense(other, rearranged):
    weights = {"W": (4, 3), "b": (3,)}
    return Pair((4,), (3,), DENSE, weights, other, rearranged)


PAIRS = {
    "Gemm with transB": dense(
        "s = Gemm <transB = 1> (x, W, b)  y = Tanh (s)", lambda w: {"W": w["W"].T, "b": w["b"]}),
    "a Transpose of the weight": dense(
        "V = Transpose (W)  h = MatMul (x, V)" + ADDED, lambda w: {"W": w["W"].T, "b": w["b"]}),
    "a bias with two axes": dense(DENSE, lambda w: {"W": w["W"], "b": w["b"][None]}),
    "weight and bias in one vector": dense(
        """flat = Slice (all, from0, bias)  W = Reshape (flat, shape)
        b = Slice (all, bias, end) """
        + DENSE,
        lambda w: {"all": np.concatenate([w["W"].ravel(), w["b"]])},
    ),
    "a convolution of single pixels": Pair(
        (5, 4),
        (5, 3),
        "h = MatMul (x, W)  y = Tanh (h)",
        {"W": (4, 3)},
        """xt = Transpose <perm = [0, 2, 1]> (x)  h = Conv (xt, W)
        ht = Transpose <perm = [0, 2, 1]> (h)  y = Tanh (ht)""",
        lambda w: {"W": w["W"].T[:, :, None]},
    ),
    "a transposed convolution of single pixels": Pair(
        (4, 3, 3), (2, 3, 3), CONVOLUTION, {"W": (2, 4, 1, 1)},
        "h = ConvTranspose (x, W)  y = Tanh (h)", lambda w: {"W": w["W"].swapaxes(0, 1)}),
    "groups of a convolution": Pair(
        (6, 4, 4),
        (4, 3, 3),
        "h = Conv <group = 2> (x, W)  y = Tanh (h)",
        {"W": (4, 3, 2, 2)},
        """x0, x1 = Split <axis = 1> (x, halves)  h0 = Conv (x0, W0)  h1 = Conv (x1, W1)
        h = Concat <axis = 1> (h0, h1)  y = Tanh (h)""",
        lambda w: {"W0": w["W"][:2], "W1": w["W"][2:]},
    ),
    "experts": Pair(
        (2, 3),
        (2, 4),
        """xt = Transpose <perm = [1, 0, 2]> (x)  ht = MatMul (xt, W)
        h = Transpose <perm = [1, 0, 2]> (ht)  y = Tanh (h)""",
        {"W": (2, 3, 4)},
        """x0, x1 = Split <axis = 1, num_outputs = 2> (x)
        z0 = Squeeze (x0, axis1)  u0 = MatMul (z0, W0)  v0 = Unsqueeze (u0, axis1)
        z1 = Squeeze (x1, axis1)  u1 = MatMul (z1, W1)  v1 = Unsqueeze (u1, axis1)
        h = Concat <axis = 1> (v0, v1)  y = Tanh (h)""",
        lambda w: {"W0": w["W"][0], "W1": w["W"][1]},
    ),
    "one array for queries, keys and values": attention(
        "Wq, Wk, Wv = Split <axis = 1> (W, thirds)" + QKV,
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv")}),
    "one transposed array for queries, keys and values": attention(
        """q1, k1, v1 = Split <axis = 0> (W, thirds)
        Wq = Transpose (q1)  Wk = Transpose (k1)  Wv = Transpose (v1) """
        + QKV,
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv").T},
    ),
    "gates of a recurrence": Pair(
        (3, 4), (2,), recurrence(MATMUL), {"W": (4, 8), "R": (2, 8)}, recurrence(GEMM),
        lambda w: {"W": w["W"].T, "R": w["R"].T}),
    "an LSTM": Pair(
        (3, 4), (2,), recurrence(MATMUL), {"W": (4, 8), "R": (2, 8)}, recurrent("LSTM"),
        lambda w: {"W": w["W"].T[None], "R": w["R"].T[None]}),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_functions_take_equal_steps(pair, optimizer):
    chosen = PAIRS[pair]
    assert difference(chosen, OPTIMIZERS[optimizer]) < EQUAL[chosen.dtype]


@pytest.mark.parametrize("optimizer", ["kfac auto", "muon"])
@pytest.mark.parametrize("pair", ["experts", "one array for queries, keys and values"])
def test_a_run_resumes_with_equal_bits(pair, optimizer, tmp_path):
    chosen, rng = PAIRS[pair], np.random.default_rng(1)
    joined = pair != "experts"
    weights = chosen.rearranged(draws(chosen)) if joined else draws(chosen)
    model = built(chosen, chosen.other if joined else chosen.one, weights)
    whole, resumed = (
        OPTIMIZERS[optimizer](ke.Engine.from_onnx(model, loss="normal", threads=1))
        for _ in range(2)
    )
    for step in range(4):
        x, y = rng.standard_normal((N, *chosen.x)), rng.standard_normal((N, *chosen.y))
        whole.step({"x": x}, y)
        if step == 1:
            whole.save(tmp_path / "state")
            resumed.load(tmp_path / "state")
        elif step > 1:
            resumed.step({"x": x}, y)
    for name, value in whole.engine.parameters.items():
        assert np.array_equal(value, resumed.engine.parameters[name])


STACKS = {
    # Weight (outputs, inputs, taps…) to matrices (outputs, inputs · taps), and back.
    "Conv": ((3, 2, 2, 2), "", lambda w: [w.reshape(3, 8)], lambda m: m[0].reshape(3, 2, 2, 2)),
    "Conv in groups": (
        (4, 1, 2, 2),
        "<group = 2>",
        lambda w: [w[:2].reshape(2, 4), w[2:].reshape(2, 4)],
        lambda m: np.concatenate(m).reshape(4, 1, 2, 2),
    ),
    "ConvTranspose": (
        (2, 3, 2, 2),
        "",
        lambda w: [w.swapaxes(0, 1).reshape(3, 8)],
        lambda m: m[0].reshape(3, 2, 2, 2).swapaxes(0, 1),
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_first_step_has_the_singular_values_and_lengths_of_the_matrices(name):
    shape, attributes, matrices, back = STACKS[name]
    nodes = f"h = {name.split()[0]} {attributes} (x, W)  y = Tanh (h)"
    outputs = 4 if attributes else 3
    pair = Pair((2, 3, 3), (outputs, "h", "w"), nodes, {"W": shape}, "", lambda w: w)
    start = draws(pair)
    x = np.random.default_rng(1).standard_normal((N, 2, 3, 3)).astype(np.float32)
    y = np.zeros((N, outputs, *([2, 2] if "Transpose" not in name else [4, 4])), np.float32)
    changes = []
    for make in (ke.Muon, lambda e: ke.KfacOptimizer(e, weight_decay=0.0)):
        engine = ke.Engine.from_onnx(built(pair, nodes, start), loss="normal", threads=1)
        gradient = engine.gradients({"x": x}, y).gradients["W"]
        make(engine).step({"x": x}, y)
        changes.append(engine.parameters["W"] - start["W"])
    steps = [np.sqrt(max(1, len(m) / m.shape[1])) * by_svd(m) for m in matrices(gradient)]
    np.testing.assert_allclose(changes[0], -0.03 * back(steps), rtol=1e-3, atol=1e-5)
    lengths = [np.linalg.norm(m) for m in matrices(changes[1])]
    np.testing.assert_allclose(lengths, [0.03 * np.sqrt(len(m)) for m in steps], rtol=1e-4)
