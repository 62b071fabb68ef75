"""The matrices of a product whose outputs a graph reads in parts are those of several products."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.training.layout_pairs import (
    EQUAL,
    MATMUL,
    OPTIMIZERS,
    QKV,
    TOKENS,
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


def gated_recurrence():
    """Nodes of a GRU with 2 units over 3 tokens, in a product for each gate."""
    nodes, h = TOKENS, "h"
    for t in range(3):
        for gate, activation in [("z", "Sigmoid"), ("r", "Sigmoid"), ("g", "Tanh")]:
            state = h if gate != "g" else f"rh{t}"
            nodes += f"""a{gate}{t} = MatMul (in{t}, W{gate})
                b{gate}{t} = MatMul ({state}, R{gate})
                s{gate}{t} = Add (a{gate}{t}, b{gate}{t})  {gate}{t} = {activation} (s{gate}{t}) """
            nodes += f"rh{t} = Mul (r{t}, {h}) " if gate == "r" else ""
        nodes += f"""zh{t} = Mul (z{t}, {h})  zg{t} = Mul (z{t}, g{t})  d{t} = Sub (g{t}, zg{t})
            h{t} = Add (d{t}, zh{t}) """
        h = f"h{t}"
    return nodes + "y = Identity (h2)"


def rows_of_gates(w, gates):
    """Return the weights of a recurrent operator from those of its gates."""
    return {name: columns(w, *(name + gate for gate in gates)).T[None] for name in "WR"}


WIDE = """ q0, q1 = Split <axis = 2> (q, units22)  m = Mul (q0, k)  u = Mul (q1, v)
    sum = Add (m, u)  tq = Tanh (q)  mean = ReduceMean (tq, axis2)  y = Add (sum, mean)"""
GATED = " sa = Sigmoid (a)  y = Mul (sa, b)"

# A product for each part, and one product whose outputs are divided. One product is one layer, with
# the curvature of all its outputs, so that its natural gradient is another.
JOINED = {
    "queries, keys and values": attention(
        "h = MatMul (x, W)  q, k, v = Split <axis = 2> (h, thirds)",
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv")}),
    "an axis of queries, keys and values": attention(
        """h = MatMul (x, W)  h5 = Reshape (h, by_three)
        first = Transpose <perm = [2, 0, 1, 3]> (h5)  q = Gather <axis = 0> (first, number0)
        k = Gather <axis = 0> (first, number1)  v = Gather <axis = 0> (first, number2)""",
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv")},
    ),
    "wide queries that are also read in halves": Pair(
        (5, 4),
        (5, 2),
        QKV + WIDE,
        {"Wq": (4, 4), "Wk": (4, 2), "Wv": (4, 2)},
        """Wt = Transpose (W)  h = MatMul (x, Wt)  k = Slice (h, from0, units, axis2)
        q = Slice (h, units, six, axis2)  v = Slice (h, six, eight, axis2)"""
        + WIDE,
        lambda w: {"W": columns(w, "Wk", "Wq", "Wv").T},
    ),
    "gates of experts": Pair(
        (2, 3),
        (2, 2),
        """xt = Transpose <perm = [1, 0, 2]> (x)  at = MatMul (xt, Wa)  bt = MatMul (xt, Wb)
        a = Transpose <perm = [1, 0, 2]> (at)  b = Transpose <perm = [1, 0, 2]> (bt)"""
        + GATED,
        {"Wa": (2, 3, 2), "Wb": (2, 3, 2)},
        """xt = Transpose <perm = [1, 0, 2]> (x)  ht = MatMul (xt, W)
        h = Transpose <perm = [1, 0, 2]> (ht)  a, b = Split <axis = 2> (h, units22)"""
        + GATED,
        lambda w: {"W": np.concatenate([w["Wa"], w["Wb"]], axis=2)},
    ),
    "channels of a convolution": Pair(
        (2, 4, 4), (2, 3, 3), "a = Conv (x, Wa)  b = Conv (x, Wb)" + GATED,
        {"Wa": (2, 2, 2, 2), "Wb": (2, 2, 2, 2)},
        "h = Conv (x, W)  a, b = Split <axis = 1> (h, units22)" + GATED,
        lambda w: {"W": np.concatenate([w["Wa"], w["Wb"]])}),
    "gates of a recurrence": Pair(
        (3, 4), (2,), recurrence(MATMUL, apart=True),
        {f"W{gate}": (4, 2) for gate in "iofg"} | {f"R{gate}": (2, 2) for gate in "iofg"},
        recurrence(MATMUL),
        lambda w: {name: columns(w, *(name + gate for gate in "iofg")) for name in "WR"}),
    "an LSTM": Pair(
        (3, 4), (2,), recurrence(MATMUL, apart=True),
        {f"W{gate}": (4, 2) for gate in "iofg"} | {f"R{gate}": (2, 2) for gate in "iofg"},
        recurrent("LSTM"), lambda w: rows_of_gates(w, "iofg")),
    "a GRU": Pair(
        (3, 4), (2,), gated_recurrence(),
        {f"W{gate}": (4, 2) for gate in "zrg"} | {f"R{gate}": (2, 2) for gate in "zrg"},
        recurrent("GRU"), lambda w: rows_of_gates(w, "zrg")),
}  # fmt: skip


@pytest.mark.parametrize("pair", JOINED)
def test_one_product_and_several_take_equal_steps_with_muon(pair):
    chosen = JOINED[pair]
    assert difference(chosen, OPTIMIZERS["muon"]) < EQUAL[chosen.dtype]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_product_and_several_take_equal_steps_without_natural_gradients_only(optimizer):
    chosen = JOINED["queries, keys and values"]
    equal = difference(chosen, OPTIMIZERS[optimizer]) < EQUAL[chosen.dtype]
    assert equal == ("kfac" not in optimizer)


THIRDS = [[0, 1], [2, 3], [4, 5]]
# Operators that read h, with 6 features; values that nobody reads; the features of each part.
DIVISIONS = {
    "a Split": ("a, b, c = Split <axis = 2> (h, thirds)", "abc", THIRDS),
    "Slices": (
        """wide = Slice (h, units, six, axis2)  a = Slice (h, from0, units, axis2)
        b, c = Split <axis = 2> (wide, units22)  d = Mul (wide, wide)""",
        "abcd",
        [[2, 3, 4, 5], [0, 1]],
    ),
    "a Split behind an activation": (
        "t = Tanh (h)  a, b, c = Split <axis = 2> (t, thirds)", "abc", THIRDS),
    "a Split of a sum of two tokens": (
        """early = Slice (h, from0, units, axis1)  late = Slice (h, three, five, axis1)
        s = Add (early, late)  a, b, c = Split <axis = 2> (s, thirds)""",
        "abc",
        THIRDS,
    ),
    "a sum of parts": ("a, b, c = Split <axis = 2> (h, thirds)  d = Add (a, b)", "cd", THIRDS),
    "a Split and a use of all": (
        "a, b, c = Split <axis = 2> (h, thirds)  d = Mul (h, h)", "abcd", [range(6)]),
    "a Split behind a normalization": (
        "t = Softmax (h)  a, b, c = Split <axis = 2> (t, thirds)", "abc", [range(6)]),
    "a Split of the tokens": ("a, b = Split <axis = 1> (h, units3)", "ab", [range(6)]),
    "Slices that overlap": (
        "a = Slice (h, from0, three, axis2)  b = Slice (h, units, six, axis2)", "ab", [range(6)]),
    "Slices that leave outputs out": (
        "a = Slice (h, from0, units, axis2)  b = Slice (h, units, three, axis2)", "ab", [range(6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_matrices_of_a_product_are_the_parts_of_its_outputs_that_are_read_apart(name):
    division, ends, parts = DIVISIONS[name]
    # The sum over every value that no operator reads has a gradient for each part.
    nodes = f"h = MatMul (x, W)  {division}"
    for end in ends:
        nodes += (
            f" {end}2 = Mul ({end}, {end})  m{end} = ReduceMean <keepdims = 0> ({end}2, last_two)"
        )
    nodes += f" y = Sum ({', '.join(f'm{end}' for end in ends)})"
    pair = Pair((5, 4), (), nodes, {"W": (4, 6)}, "", lambda w: w)
    start, rng = draws(pair), np.random.default_rng(1)
    x, y = rng.standard_normal((N, 5, 4)), rng.standard_normal(N)
    changes = []
    for make in (ke.Muon, lambda e: ke.KfacOptimizer(e, weight_decay=0.0)):
        engine = ke.Engine.from_onnx(built(pair, nodes, start), loss="normal", threads=1)
        gradient = engine.gradients({"x": x}, y).gradients["W"]
        make(engine).step({"x": x}, y)
        changes.append(engine.parameters["W"] - start["W"])
    assert len(engine.pieces["W"]) == len(parts)
    for part in map(list, parts):
        # The first velocity with Nesterov's momentum is (1 + μ) g.
        direction = np.sqrt(max(1, len(part) / 4)) * by_svd(1.95 * gradient[:, part])
        np.testing.assert_allclose(changes[0][:, part], -0.03 * direction, rtol=1e-6, atol=1e-9)
        length = np.linalg.norm(changes[1][:, part])
        np.testing.assert_allclose(length, 0.03 * np.sqrt(len(part)), rtol=1e-6)
