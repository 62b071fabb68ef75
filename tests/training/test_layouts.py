"""Equal functions whose weights lie otherwise in the file take equal steps, with every optimizer.

A pair is two models of one function. Both begin with equal weights, and each array of the second
model is a rearrangement of the arrays of the first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from onnx import helper, numpy_helper

import kfac_engine as ke

N, STEPS = 6, 3
# Rounding, multiplied by condition numbers and by the iterations of Muon. ONNX Runtime has no
# convolution and no LSTM in float64.
EQUAL = {"float64": 1e-6, "float32": 1e-3}
SINGLE = {"Conv", "ConvTranspose", "LSTM"}

OPTIMIZERS = {
    "kfac auto": lambda e: ke.KfacOptimizer(e),
    "kfac": lambda e: ke.KfacOptimizer(e, 0.05, damping=0.1),
    "muon": lambda e: ke.Muon(e, weight_decay=0.1),
    "adam": lambda e: ke.Adam(e, 0.01),
    "sgd": lambda e: ke.SGD(e, 0.01),
}


@dataclass(frozen=True)
class Pair:
    """Two models of one function.

    Attributes:
        x: Shape of an input.
        y: Shape of an output.
        one: Lines of the first model, such as ``"s = MatMul(x, W)"`` and further attributes.
        weights: Shapes of the weights of the first model.
        other: Lines of the second model.
        rearranged: The weights of the second model from those of the first.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    one: list
    weights: dict[str, tuple[int, ...]]
    other: list
    rearranged: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

    @property
    def dtype(self):
        single = any(n.op_type in SINGLE for n in [*self.one, *self.other])
        return "float32" if single else "float64"


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def built(pair, nodes, weights):
    integers = {
        name: np.array(value)
        for name, value in CONSTANTS.items()
        if any(name in n.input for n in nodes)
    }
    element = helper.np_dtype_to_tensor_dtype(np.dtype(pair.dtype))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", element, ["n", *pair.x])],
        [helper.make_tensor_value_info("y", element, ["n", *pair.y])],
        [numpy_helper.from_array(v, n) for n, v in (weights | integers).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def draws(pair):
    rng = np.random.default_rng(0)
    shapes = pair.weights.items()
    return {name: 0.5 * rng.standard_normal(s).astype(pair.dtype) for name, s in shapes}


def trained(pair, nodes, weights, make):
    """Return the weights after some steps."""
    model = built(pair, nodes, weights)
    engine = ke.Engine.from_onnx(model, loss="normal", threads=1, estimation_mode="exact")
    optimizer, rng = make(engine), np.random.default_rng(1)
    for _ in range(STEPS):
        x, y = (rng.standard_normal((N, *s)).astype(pair.dtype) for s in (pair.x, pair.y))
        optimizer.step({"x": x}, y)
    return engine.parameters


def difference(pair, make):
    """Return the largest relative difference of the changes of a weight."""
    start = draws(pair)
    begin = {name: np.ascontiguousarray(v) for name, v in pair.rearranged(start).items()}
    one = pair.rearranged(dict(trained(pair, pair.one, start, make)))
    other = trained(pair, pair.other, begin, make)
    assert one.keys() == other.keys()
    changes = [(one[name] - begin[name], other[name] - begin[name]) for name in other]
    assert all(np.abs(a).max() > 0 for a, _ in changes)
    return max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in changes)


CONSTANTS = {
    "thirds": [2, 2, 2], "halves": [3, 3], "gates": [2, 2, 2, 2], "axis0": [0], "axis1": [1],
    "from0": [0], "units": [2], "bias": [12], "end": [15], "shape": [4, 3],
}  # fmt: skip

# Attention without a softmax, so that queries, keys and values are three layers.
ATTENTION = [
    node("Transpose", "k", "kt", perm=[0, 2, 1]),
    node("MatMul", "q kt", "scores"),
    node("MatMul", "scores v", "y"),
]
QKV = [node("MatMul", f"x W{c}", c) for c in "qkv"]
DENSE = [node("MatMul", "x W", "h"), node("Add", "h b", "s"), node("Tanh", "s", "y")]
CONVOLUTION = [node("Conv", "x W", "h"), node("Tanh", "h", "y")]


def dense(other, rearranged):
    weights = {"W": (4, 3), "b": (3,)}
    return Pair((4,), (3,), DENSE, weights, other, rearranged)


def attention(other, rearranged):
    weights = {"Wq": (4, 2), "Wk": (4, 2), "Wv": (4, 2)}
    return Pair((5, 4), (5, 2), QKV + ATTENTION, weights, other + ATTENTION, rearranged)


def columns(w, *names):
    return np.concatenate([w[name] for name in names], axis=1)


def recurrence(transposed):
    """Nodes of an LSTM with 2 units over the 3 tokens of an example, in products with all gates."""

    def product(value, weight, result):
        if transposed:
            return node("Gemm", f"{value} {weight}", result, transB=1)
        return node("MatMul", f"{value} {weight}", result)

    nodes = [
        node("Split", "x", "x0 x1 x2", axis=1, num_outputs=3),
        *(node("Squeeze", f"x{t} axis1", f"in{t}") for t in range(3)),
        node("Slice", "in0 from0 units axis1", "part"),
        node("Sub", "part part", "h"),
        node("Identity", "h", "c"),
    ]
    h, c = "h", "c"
    for t in range(3):
        nodes += [
            product(f"in{t}", "W", f"a{t}"),
            product(h, "R", f"r{t}"),
            node("Add", f"a{t} r{t}", f"s{t}"),
            node("Split", f"s{t} gates", f"i{t} o{t} f{t} g{t}", axis=1),
            *(node("Sigmoid", f"{gate}{t}", f"s{gate}{t}") for gate in "iof"),
            node("Tanh", f"g{t}", f"tg{t}"),
            node("Mul", f"si{t} tg{t}", f"new{t}"),
            node("Mul", f"sf{t} {c}", f"old{t}"),
            node("Add", f"new{t} old{t}", f"c{t}"),
            node("Tanh", f"c{t}", f"tc{t}"),
            node("Mul", f"so{t} tc{t}", f"h{t}"),
        ]
        h, c = f"h{t}", f"c{t}"
    return [*nodes, node("Identity", "h2", "y")]


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
        recurrence(transposed=False),
        {"W": (4, 8), "R": (2, 8)},
        recurrence(transposed=True),
        lambda w: {"W": w["W"].T, "R": w["R"].T},
    ),
    "an LSTM": Pair(
        (3, 4),
        (2,),
        recurrence(transposed=False),
        {"W": (4, 8), "R": (2, 8)},
        [
            node("Transpose", "x", "xt", perm=[1, 0, 2]),
            helper.make_node("LSTM", ["xt", "W", "R"], ["", "h"], hidden_size=2),
            node("Squeeze", "h axis0", "y"),
        ],
        lambda w: {"W": w["W"].T[None], "R": w["R"].T[None]},
    ),
}


# One product with the joined weight is one layer, with the curvature of all its outputs.
JOINED = attention(
    [node("MatMul", "x W", "h"), node("Split", "h thirds", "q k v", axis=2)],
    lambda w: {"W": columns(w, "Wq", "Wk", "Wv")},
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_functions_take_equal_steps(pair, optimizer):
    chosen = PAIRS[pair]
    assert difference(chosen, OPTIMIZERS[optimizer]) < EQUAL[chosen.dtype]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_layer_and_three_take_equal_steps_without_matrices_only(optimizer):
    equal = difference(JOINED, OPTIMIZERS[optimizer]) < EQUAL[JOINED.dtype]
    assert equal == (optimizer in ("adam", "sgd"))


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


def by_svd(matrix):
    """The polynomial of Muon on the singular values themselves."""
    u, s, vt = np.linalg.svd(matrix.astype(float), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


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
    np.testing.assert_allclose(lengths, [0.025 * np.sqrt(len(m)) for m in steps], rtol=1e-4)
