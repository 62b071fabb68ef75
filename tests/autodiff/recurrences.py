"""LSTM, GRU and RNN as their formulas stand in the ONNX specification: loops in float64."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray]
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DIRECTIONS = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}


def sigmoid(z: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-z))


# Name to function and the defaults of alpha and beta.
ACTIVATIONS: Mapping[str, tuple[Callable[..., NDArray], list[float]]] = {
    "relu": (lambda z: np.maximum(z, 0), []),
    "tanh": (np.tanh, []),
    "sigmoid": (sigmoid, []),
    "softsign": (lambda z: z / (1 + abs(z)), []),
    "softplus": (lambda z: np.log1p(np.exp(z)), []),
    "leakyrelu": (lambda z, a: np.where(z > 0, z, a * z), [0.01]),
    "thresholdedrelu": (lambda z, a: np.where(z > a, z, 0), [1.0]),
    "elu": (lambda z, a: np.where(z > 0, z, a * np.expm1(z)), [1.0]),
    "hardsigmoid": (lambda z, a, b: np.clip(a * z + b, 0, 1), [0.2, 0.5]),
    "affine": (lambda z, a, b: a * z + b, [1.0, 0.0]),
    "scaledtanh": (lambda z, a, b: a * np.tanh(b * z), [1.0, 1.0]),
}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}

Function = Callable[[NDArray], NDArray]


def functions(op: str, attributes: Mapping[str, object], directions: int) -> list[Function]:
    """All activations, with the numbers that the attributes list for them."""
    listed = [iter(attributes.get(f"activation_{key}", ())) for key in ("alpha", "beta")]
    made = []
    for name in attributes.get("activations", DEFAULTS[op] * directions):
        function, defaults = ACTIVATIONS[name.lower()]
        numbers = [
            next(numbers_left, default)
            for numbers_left, default in zip(listed, defaults, strict=False)
        ]
        made.append(lambda z, function=function, numbers=numbers: function(z, *numbers))
    return made


def step(
    op: str, attributes: Mapping[str, object], f: Sequence[Function], part: Arrays, state: Sequence
) -> tuple[NDArray, ...]:
    """One step of one direction: the new state."""
    gates, bound = GATES[op], float(attributes.get("clip", np.inf))
    size = part["R"].shape[1]
    x, W, R = (part[name] for name in ("x", "W", "R"))
    b = part.get("B", np.zeros(2 * gates * size))
    w, r = b[: gates * size], b[gates * size :]

    def apply(index: int, z: NDArray) -> NDArray:
        return f[index](np.clip(z, -bound, bound))

    def gate(matrix: NDArray, index: int) -> NDArray:
        return matrix[index * size : (index + 1) * size]

    def of_x(index: int) -> NDArray:
        return x @ gate(W, index).T + gate(w, index)

    def of_h(index: int, h: NDArray) -> NDArray:
        return h @ gate(R, index).T + gate(r, index)

    h = state[0]
    if op == "RNN":
        return (apply(0, of_x(0) + of_h(0, h)),)
    if op == "GRU":
        z, reset = (apply(0, of_x(i) + of_h(i, h)) for i in (0, 1))
        inner = reset * of_h(2, h) if attributes.get("linear_before_reset") else of_h(2, reset * h)
        return ((1 - z) * apply(1, of_x(2) + inner) + z * h,)
    c, p = state[1], part.get("P", np.zeros(3 * size))
    i = apply(0, of_x(0) + of_h(0, h) + gate(p, 0) * c)
    forget = apply(0, of_x(2) + of_h(2, h) + gate(p, 2) * c)
    kept = 1 - i if attributes.get("input_forget") else forget
    c = kept * c + i * apply(1, of_x(3) + of_h(3, h))
    o = apply(0, of_x(1) + of_h(1, h) + gate(p, 1) * c)
    return o * f[2](c), c


def recurrence(op: str, feeds: Arrays, attributes: Mapping[str, object]) -> list[NDArray]:
    """The results Y, Y_h and, of an LSTM, Y_c; batch first everywhere if ``layout`` is 1."""
    feeds = {name: a.astype(float) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    first = bool(attributes.get("layout"))
    if first:
        swapped = {name: feeds[name].swapaxes(0, 1) for name in ("X", "initial_h", "initial_c")
                   if name in feeds}  # fmt: skip
        feeds = {**feeds, **swapped}
    X, R = feeds["X"], feeds["R"]
    steps, n, _ = X.shape
    size, signs = R.shape[2], DIRECTIONS[str(attributes.get("direction", "forward"))]
    f = functions(op, attributes, len(signs))
    lengths = feeds.get("sequence_lens", np.full(n, steps))
    outputs = np.zeros((steps, len(signs), n, size))
    finals = []
    for d, sign in enumerate(signs):
        mine = f[d * len(DEFAULTS[op]) :]
        part = {name: feeds[name][d] for name in ("W", "R", "B", "P") if name in feeds}
        zero = np.zeros((len(signs), n, size))
        roles = ("initial_h", "initial_c") if op == "LSTM" else ("initial_h",)
        state = [feeds.get(role, zero)[d].copy() for role in roles]
        for example in range(n):
            for t in range(lengths[example])[::sign]:
                now = {**part, "x": X[t, example]}
                new = step(op, attributes, mine, now, [s[example] for s in state])
                for history, value in zip(state, new, strict=True):
                    history[example] = value
                outputs[t, d, example] = new[0]
        finals.append(state)
    results = [outputs, *(np.stack(parts) for parts in zip(*finals, strict=True))]
    if first:
        results = [outputs.transpose(2, 0, 1, 3), *(part.swapaxes(0, 1) for part in results[1:])]
    return results
