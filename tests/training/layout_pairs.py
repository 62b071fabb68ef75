"""Pairs of models of one function: their graphs, and the difference of their steps."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import kfac_engine as ke
from tests.models import parsed

N, STEPS = 6, 3
# Rounding, multiplied by condition numbers and by the iterations of Muon. ONNX Runtime has no
# convolution and no recurrence in float64.
EQUAL = {"float64": 1e-6, "float32": 1e-3}
SINGLE = re.compile(r"\b(Conv|ConvTranspose|GRU|LSTM)\b")

OPTIMIZERS = {
    "kfac auto": lambda e: ke.KfacOptimizer(e),
    "kfac": lambda e: ke.KfacOptimizer(e, 0.05, damping=0.1),
    "muon": lambda e: ke.Muon(e, weight_decay=0.1),
    "adam": lambda e: ke.Adam(e, 0.01),
    "sgd": lambda e: ke.SGD(e, 0.01),
}


@dataclass(frozen=True)
class Pair:
    """Two models of one function."""

    x: tuple[int, ...]  # shape of an input
    y: tuple[int, ...]  # shape of an output
    one: str  # nodes of the first model, from ``x`` to ``y``, as onnx's parser reads them
    weights: dict[str, tuple[int, ...]]  # shapes of the weights of the first model
    other: str  # nodes of the second model
    # The weights of the second model from those of the first.
    rearranged: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

    @property
    def dtype(self):
        return "float32" if SINGLE.search(self.one + self.other) else "float64"


def built(pair, nodes, weights):
    element = {"float32": "float", "float64": "double"}[pair.dtype]
    x, y = (", ".join(map(str, ("n", *sides))) for sides in (pair.x, pair.y))
    integers = {n: v for n, v in CONSTANTS.items() if re.search(rf"\b{n}\b", nodes)}
    graph = f"net ({element}[{x}] x) => ({element}[{y}] y) {{ {nodes} }}"
    return parsed(graph, weights | integers)


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
QKV = " q = MatMul (x, Wq)  k = MatMul (x, Wk)  v = MatMul (x, Wv) "
ATTENTION = " kt = Transpose <perm = [0, 2, 1]> (k)  s = MatMul (q, kt)  y = MatMul (s, v) "


def attention(other, rearranged):
    weights = {"Wq": (4, 2), "Wk": (4, 2), "Wv": (4, 2)}
    return Pair((5, 4), (5, 2), QKV + ATTENTION, weights, other + ATTENTION, rearranged)


def columns(w, *names):
    return np.concatenate([w[name] for name in names], axis=1)


# The tokens of an example, and states of zeros.
TOKENS = """x0, x1, x2 = Split <axis = 1, num_outputs = 3> (x)
    in0 = Squeeze (x0, axis1)  in1 = Squeeze (x1, axis1)  in2 = Squeeze (x2, axis1)
    part = Slice (in0, from0, units, axis1)  h = Sub (part, part)  c = Identity (h) """
# Operators of a product, up to its first operand.
MATMUL, GEMM = "MatMul (", "Gemm <transB = 1> ("


def recurrence(product, apart=False):
    """Nodes of an LSTM with 2 units over 3 tokens.

    Args:
        product: Operator of the products.
        apart: Whether each gate has a product of its own.
    """
    nodes, h, c = TOKENS, "h", "c"
    for t in range(3):
        for end in "iofg" if apart else [""]:
            nodes += f"""a{end}{t} = {product} in{t}, W{end})  r{end}{t} = {product} {h}, R{end})
                {end or "s"}{t} = Add (a{end}{t}, r{end}{t}) """
        if not apart:
            nodes += f"i{t}, o{t}, f{t}, g{t} = Split <axis = 1> (s{t}, gates) "
        nodes += f"""si{t} = Sigmoid (i{t})  so{t} = Sigmoid (o{t})  sf{t} = Sigmoid (f{t})
            tg{t} = Tanh (g{t})  new{t} = Mul (si{t}, tg{t})  old{t} = Mul (sf{t}, {c})
            c{t} = Add (new{t}, old{t})  tc{t} = Tanh (c{t})  h{t} = Mul (so{t}, tc{t}) """
        h, c = f"h{t}", f"c{t}"
    return nodes + "y = Identity (h2)"


def recurrent(operator):
    """Nodes of a recurrent operator over 3 tokens."""
    return f"""xt = Transpose <perm = [1, 0, 2]> (x)
        sequence, h = {operator} <hidden_size = 2> (xt, W, R)  y = Squeeze (h, axis0)"""


def by_svd(matrix):
    """The polynomial of Muon on the singular values themselves."""
    u, s, vt = np.linalg.svd(matrix.astype(float), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt
