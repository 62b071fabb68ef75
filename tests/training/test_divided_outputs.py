"""The matrices of a product whose outputs a graph reads in parts are those of several products."""

import numpy as np
import pytest
from onnx import helper

import kfac_engine as ke
from tests.training.layout_pairs import (
    EQUAL,
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
    matmul,
    node,
    recurrence,
    recurrent,
)


def gated_recurrence():
    """Nodes of a GRU with 2 units over 3 tokens, in a product for each gate."""
    nodes, h = list(TOKENS), "h"
    for t in range(3):
        for gate, activation in [("z", "Sigmoid"), ("r", "Sigmoid"), ("g", "Tanh")]:
            nodes += [
                matmul(f"in{t} W{gate}", f"a{gate}{t}"),
                matmul(f"{h if gate != 'g' else f'rh{t}'} R{gate}", f"b{gate}{t}"),
                node("Add", f"a{gate}{t} b{gate}{t}", f"s{gate}{t}"),
                node(activation, f"s{gate}{t}", f"{gate}{t}"),
                *([node("Mul", f"r{t} {h}", f"rh{t}")] if gate == "r" else []),
            ]
        nodes += [
            node("Mul", f"z{t} {h}", f"zh{t}"),
            node("Mul", f"z{t} g{t}", f"zg{t}"),
            node("Sub", f"g{t} zg{t}", f"d{t}"),
            node("Add", f"d{t} zh{t}", f"h{t}"),
        ]
        h = f"h{t}"
    return [*nodes, node("Identity", "h2", "y")]


def rows_of_gates(w, gates):
    """Return the weights of a recurrent operator from those of its gates."""
    return {name: columns(w, *(name + gate for gate in gates)).T[None] for name in "WR"}


WIDE = [
    node("Split", "q units22", "q0 q1", axis=2),
    node("Mul", "q0 k", "m"),
    node("Mul", "q1 v", "u"),
    node("Add", "m u", "sum"),
    node("Tanh", "q", "tq"),
    node("ReduceMean", "tq axis2", "mean"),
    node("Add", "sum mean", "y"),
]

# A product for each part, and one product whose outputs are divided. One product is one layer, with
# the curvature of all its outputs, so that its natural gradient is another.
JOINED = {
    "queries, keys and values": attention(
        [matmul("x W", "h"), node("Split", "h thirds", "q k v", axis=2)],
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv")},
    ),
    "an axis of queries, keys and values": attention(
        [
            matmul("x W", "h"),
            node("Reshape", "h by_three", "h5"),
            node("Transpose", "h5", "first", perm=[2, 0, 1, 3]),
            *(node("Gather", f"first number{i}", c, axis=0) for i, c in enumerate("qkv")),
        ],
        lambda w: {"W": columns(w, "Wq", "Wk", "Wv")},
    ),
    "wide queries that are also read in halves": Pair(
        (5, 4),
        (5, 2),
        QKV + WIDE,
        {"Wq": (4, 4), "Wk": (4, 2), "Wv": (4, 2)},
        [
            node("Transpose", "W", "Wt"),
            matmul("x Wt", "h"),
            node("Slice", "h from0 units axis2", "k"),
            node("Slice", "h units six axis2", "q"),
            node("Slice", "h six eight axis2", "v"),
            *WIDE,
        ],
        lambda w: {"W": columns(w, "Wk", "Wq", "Wv").T},
    ),
    "gates of experts": Pair(
        (2, 3),
        (2, 2),
        [
            node("Transpose", "x", "xt", perm=[1, 0, 2]),
            *(matmul(f"xt W{c}", f"{c}t") for c in "ab"),
            *(node("Transpose", f"{c}t", c, perm=[1, 0, 2]) for c in "ab"),
            node("Sigmoid", "a", "sa"),
            node("Mul", "sa b", "y"),
        ],
        {"Wa": (2, 3, 2), "Wb": (2, 3, 2)},
        [
            node("Transpose", "x", "xt", perm=[1, 0, 2]),
            matmul("xt W", "ht"),
            node("Transpose", "ht", "h", perm=[1, 0, 2]),
            node("Split", "h units22", "a b", axis=2),
            node("Sigmoid", "a", "sa"),
            node("Mul", "sa b", "y"),
        ],
        lambda w: {"W": np.concatenate([w["Wa"], w["Wb"]], axis=2)},
    ),
    "channels of a convolution": Pair(
        (2, 4, 4),
        (2, 3, 3),
        [
            *(node("Conv", f"x W{c}", c) for c in "ab"),
            node("Sigmoid", "a", "sa"),
            node("Mul", "sa b", "y"),
        ],
        {"Wa": (2, 2, 2, 2), "Wb": (2, 2, 2, 2)},
        [
            node("Conv", "x W", "h"),
            node("Split", "h units22", "a b", axis=1),
            node("Sigmoid", "a", "sa"),
            node("Mul", "sa b", "y"),
        ],
        lambda w: {"W": np.concatenate([w["Wa"], w["Wb"]])},
    ),
    "gates of a recurrence": Pair(
        (3, 4),
        (2,),
        recurrence(matmul, apart=True),
        {f"W{gate}": (4, 2) for gate in "iofg"} | {f"R{gate}": (2, 2) for gate in "iofg"},
        recurrence(matmul),
        lambda w: {name: columns(w, *(name + gate for gate in "iofg")) for name in "WR"},
    ),
    "an LSTM": Pair(
        (3, 4),
        (2,),
        recurrence(matmul, apart=True),
        {f"W{gate}": (4, 2) for gate in "iofg"} | {f"R{gate}": (2, 2) for gate in "iofg"},
        recurrent("LSTM"),
        lambda w: rows_of_gates(w, "iofg"),
    ),
    "a GRU": Pair(
        (3, 4),
        (2,),
        gated_recurrence(),
        {f"W{gate}": (4, 2) for gate in "zrg"} | {f"R{gate}": (2, 2) for gate in "zrg"},
        recurrent("GRU"),
        lambda w: rows_of_gates(w, "zrg"),
    ),
}


@pytest.mark.parametrize("pair", JOINED)
def test_one_product_and_several_take_equal_steps_with_muon(pair):
    chosen = JOINED[pair]
    assert difference(chosen, OPTIMIZERS["muon"]) < EQUAL[chosen.dtype]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_product_and_several_take_equal_steps_without_natural_gradients_only(optimizer):
    chosen = JOINED["queries, keys and values"]
    equal = difference(chosen, OPTIMIZERS[optimizer]) < EQUAL[chosen.dtype]
    assert equal == ("kfac" not in optimizer)


# Operators that read h, with 6 features, and the features of each part.
DIVISIONS = {
    "a Split": ([node("Split", "h thirds", "a b c", axis=2)], [[0, 1], [2, 3], [4, 5]]),
    "Slices": (
        [
            node("Slice", "h units six axis2", "wide"),
            node("Slice", "h from0 units axis2", "a"),
            node("Split", "wide units22", "b c", axis=2),
            node("Mul", "wide wide", "square"),
        ],
        [[2, 3, 4, 5], [0, 1]],
    ),
    "a Split behind an activation": (
        [node("Tanh", "h", "t"), node("Split", "t thirds", "a b c", axis=2)],
        [[0, 1], [2, 3], [4, 5]],
    ),
    "a Split of a sum of two tokens": (
        [
            node("Slice", "h from0 units axis1", "early"),
            node("Slice", "h three five axis1", "late"),
            node("Add", "early late", "s"),
            node("Split", "s thirds", "a b c", axis=2),
        ],
        [[0, 1], [2, 3], [4, 5]],
    ),
    "a sum of parts": (
        [node("Split", "h thirds", "a0 b c", axis=2), node("Add", "a0 b", "a")],
        [[0, 1], [2, 3], [4, 5]],
    ),
    "a Split and a use of all": (
        [node("Split", "h thirds", "a b c", axis=2), node("Mul", "h h", "square")],
        [range(6)],
    ),
    "a Split behind a normalization": (
        [node("Softmax", "h", "t"), node("Split", "t thirds", "a b c", axis=2)],
        [range(6)],
    ),
    "a Split of the tokens": (
        [node("Split", "h units3", "early late", axis=1)],
        [range(6)],
    ),
    "Slices that overlap": (
        [
            node("Slice", "h from0 three axis2", "a3"),
            node("Slice", "h units six axis2", "b4"),
        ],
        [range(6)],
    ),
    "Slices that leave outputs out": (
        [node("Slice", "h from0 units axis2", "a"), node("Slice", "h units three axis2", "b1")],
        [range(6)],
    ),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_matrices_of_a_product_are_the_parts_of_its_outputs_that_are_read_apart(name):
    division, parts = DIVISIONS[name]
    # The sum over every value that no operator reads has a gradient for each part.
    read = {operand for n in division for operand in n.input}
    ends = [v for n in division for v in n.output if v not in read]
    means = [node("ReduceMean", f"{v}_square last_two", f"{v}_mean", keepdims=0) for v in ends]
    squares = [node("Mul", f"{v} {v}", f"{v}_square") for v in ends]
    nodes = [matmul("x W", "h"), *division, *squares, *means]
    nodes.append(helper.make_node("Sum", [f"{v}_mean" for v in ends], ["y"]))
    pair = Pair((5, 4), (), nodes, {"W": (4, 6)}, [], lambda w: w)
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
