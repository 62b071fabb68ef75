"""Equal functions whose weights lie otherwise in the file take equal steps, with every optimizer.

A pair is two models of one function. Both begin with equal weights, and each array of the second
model is a rearrangement of the arrays of the first.
"""

import numpy as np
import pytest

import kfac_engine as ke
from tests.training.layout_pairs import (
    EQUAL,
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
    gemm,
    matmul,
    node,
    recurrence,
    recurrent,
)

DENSE = [node("MatMul", "x W", "h"), node("Add", "h b", "s"), node("Tanh", "s", "y")]
CONVOLUTION = [node("Conv", "x W", "h"), node("Tanh", "h", "y")]


def dense(other, rearranged):
    weights = {"W": (4, 3), "b": (3,)}
    return Pair((4,), (3,), DENSE, weights, other, rearranged)


PAIRS = {
    "Gemm with transB": dense(
        [node("Gemm", "x W b", "s", transB=1), node("Tanh", "s", "y")],
        lambda w: {"W": w["W"].T, "b": w["b"]},
    ),
    "a Transpose of the weight": dense(
        [node("Transpose", "W", "V"), node("MatMul", "x V", "h"), *DENSE[1:]],
        lambda w: {"W": w["W"].T, "b": w["b"]},
    ),
    "a bias with two axes": dense(DENSE, lambda w: {"W": w["W"], "b": w["b"][None]}),
    "weight and bias in one vector": dense(
        [
            node("Slice", "all from0 bias", "flat"),
            node("Reshape", "flat shape", "W"),
            node("Slice", "all bias end", "b"),
            *DENSE,
        ],
        lambda w: {"all": np.concatenate([w["W"].ravel(), w["b"]])},
    ),
    "a convolution of single pixels": Pair(
        (5, 4),
        (5, 3),
        [node("MatMul", "x W", "h"), node("Tanh", "h", "y")],
        {"W": (4, 3)},
        [
            node("Transpose", "x", "xt", perm=[0, 2, 1]),
            node("Conv", "xt W", "h"),
            node("Transpose", "h", "ht", perm=[0, 2, 1]),
            node("Tanh", "ht", "y"),
        ],
        lambda w: {"W": w["W"].T[:, :, None]},
    ),
    "a transposed convolution of single pixels": Pair(
        (4, 3, 3),
        (2, 3, 3),
        CONVOLUTION,
        {"W": (2, 4, 1, 1)},
        [node("ConvTranspose", "x W", "h"), node("Tanh", "h", "y")],
        lambda w: {"W": w["W"].swapaxes(0, 1)},
    ),
    "groups of a convolution": Pair(
        (6, 4, 4),
        (4, 3, 3),
        [node("Conv", "x W", "h", group=2), node("Tanh", "h", "y")],
        {"W": (4, 3, 2, 2)},
        [
            node("Split", "x halves", "x0 x1", axis=1),
            *(node("Conv", f"x{g} W{g}", f"h{g}") for g in range(2)),
            node("Concat", "h0 h1", "h", axis=1),
            node("Tanh", "h", "y"),
        ],
        lambda w: {"W0": w["W"][:2], "W1": w["W"][2:]},
    ),
    "experts": Pair(
        (2, 3),
        (2, 4),
        [
            node("Transpose", "x", "xt", perm=[1, 0, 2]),
            node("MatMul", "xt W", "ht"),
            node("Transpose", "ht", "h", perm=[1, 0, 2]),
            node("Tanh", "h", "y"),
        ],
        {"W": (2, 3, 4)},
        [
            node("Split", "x", "x0 x1", axis=1, num_outputs=2),
            *(node("Squeeze", f"x{g} axis1", f"z{g}") for g in range(2)),
            *(node("MatMul", f"z{g} W{g}", f"u{g}") for g in range(2)),
            *(node("Unsqueeze", f"u{g} axis1", f"v{g}") for g in range(2)),
            node("Concat", "v0 v1", "h", axis=1),
            node("Tanh", "h", "y"),
        ],
        lambda w: {"W0": w["W"][0], "W1": w["W"][1]},
    ),
    "one array for queries, keys and values": attention(
        [node("Split", "W thirds", "Wq Wk Wv", axis=1), *QKV],
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv")},
    ),
    "one transposed array for queries, keys and values": attention(
        [
            node("Split", "W thirds", "q1 k1 v1", axis=0),
            *(node("Transpose", f"{c}1", f"W{c}") for c in "qkv"),
            *QKV,
        ],
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv").T},
    ),
    "gates of a recurrence": Pair(
        (3, 4),
        (2,),
        recurrence(matmul),
        {"W": (4, 8), "R": (2, 8)},
        recurrence(gemm),
        lambda w: {"W": w["W"].T, "R": w["R"].T},
    ),
    "an LSTM": Pair(
        (3, 4),
        (2,),
        recurrence(matmul),
        {"W": (4, 8), "R": (2, 8)},
        recurrent("LSTM"),
        lambda w: {"W": w["W"].T[None], "R": w["R"].T[None]},
    ),
}


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
    "Conv": ((3, 2, 2, 2), {}, lambda w: [w.reshape(3, 8)], lambda m: m[0].reshape(3, 2, 2, 2)),
    "Conv in groups": (
        (4, 1, 2, 2),
        {"group": 2},
        lambda w: [w[:2].reshape(2, 4), w[2:].reshape(2, 4)],
        lambda m: np.concatenate(m).reshape(4, 1, 2, 2),
    ),
    "ConvTranspose": (
        (2, 3, 2, 2),
        {},
        lambda w: [w.swapaxes(0, 1).reshape(3, 8)],
        lambda m: m[0].reshape(3, 2, 2, 2).swapaxes(0, 1),
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_first_step_has_the_singular_values_and_lengths_of_the_matrices(name):
    shape, attributes, matrices, back = STACKS[name]
    nodes = [node(name.split()[0], "x W", "h", **attributes), node("Tanh", "h", "y")]
    outputs = 4 if attributes else 3
    pair = Pair((2, 3, 3), (outputs, "h", "w"), nodes, {"W": shape}, [], lambda w: w)
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
