"""Pairs of models of one function: their graphs, and the difference of their steps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import helper, numpy_helper

import kfac_engine as ke

N, STEPS = 6, 3
# Rounding, multiplied by condition numbers and by the iterations of Muon. ONNX Runtime has no
# convolution and no recurrence in float64.
EQUAL = {"float64": 1e-6, "float32": 1e-3}
SINGLE = {"Conv", "ConvTranspose", "GRU", "LSTM"}

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
    "from0": [0], "units": [2], "six": [6], "three": [3], "five": [5], "units3": [2, 3],
    "last_two": [1, 2], "eight": [8], "units22": [2, 2], "axis2": [2],
    "number0": 0, "number1": 1, "number2": 2,
    "by_three": [0, 5, 3, 2], "bias": [12], "end": [15], "shape": [4, 3],
}  # fmt: skip

# Attention without a softmax, so that queries, keys and values are three layers.
ATTENTION = [
    node("Transpose", "k", "kt", perm=[0, 2, 1]),
    node("MatMul", "q kt", "scores"),
    node("MatMul", "scores v", "y"),
]
QKV = [node("MatMul", f"x W{c}", c) for c in "qkv"]


def attention(other, rearranged):
    weights = {"Wq": (4, 2), "Wk": (4, 2), "Wv": (4, 2)}
    return Pair((5, 4), (5, 2), QKV + ATTENTION, weights, other + ATTENTION, rearranged)


def columns(w, *names):
    return np.concatenate([w[name] for name in names], axis=1)


# The tokens of an example, and states of zeros.
TOKENS = [
    node("Split", "x", "x0 x1 x2", axis=1, num_outputs=3),
    *(node("Squeeze", f"x{t} axis1", f"in{t}") for t in range(3)),
    node("Slice", "in0 from0 units axis1", "part"),
    node("Sub", "part part", "h"),
    node("Identity", "h", "c"),
]


def recurrence(product, apart=False):
    """Nodes of an LSTM with 2 units over 3 tokens.

    Args:
        product: Operator of the products, with attributes.
        apart: Whether each gate has a product of its own.
    """
    nodes, h, c = list(TOKENS), "h", "c"
    for t in range(3):
        for end in "iofg" if apart else [""]:
            nodes += [
                product(f"in{t} W{end}", f"a{end}{t}"),
                product(f"{h} R{end}", f"r{end}{t}"),
                node("Add", f"a{end}{t} r{end}{t}", f"{end or 's'}{t}"),
            ]
        if not apart:
            nodes.append(node("Split", f"s{t} gates", f"i{t} o{t} f{t} g{t}", axis=1))
        nodes += [
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


def matmul(operands, result):
    return node("MatMul", operands, result)


def gemm(operands, result):
    return node("Gemm", operands, result, transB=1)


def recurrent(operator):
    """Nodes of a recurrent operator over 3 tokens."""
    return [
        node("Transpose", "x", "xt", perm=[1, 0, 2]),
        helper.make_node(operator, ["xt", "W", "R"], ["", "h"], hidden_size=2),
        node("Squeeze", "h axis0", "y"),
    ]


def by_svd(matrix):
    """The polynomial of Muon on the singular values themselves."""
    u, s, vt = np.linalg.svd(matrix.astype(float), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt
