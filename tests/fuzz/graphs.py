"""Random models: valid graphs of float64 operators.

Data flows from the input ``x`` of shape ``(n, 4, 6)``; every value made from it keeps the batch on
its first axis, so that a model serves any batch. Parameters enter on the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Sides = tuple[int, ...]  # without the batch axis
OPSET = 20
MOST_NUMBERS = 200  # of an example, in any value


@dataclass
class Draft:
    """A graph in the making."""

    rng: np.random.Generator  # decides everything
    # Data values and their sides.
    values: dict[str, Sides] = field(default_factory=lambda: {"x": (4, 6)})
    nodes: list[onnx.NodeProto] = field(default_factory=list)  # so far
    # Parameters and other initializers.
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def pick(self, wanted: Callable[[Sides], bool] = lambda sides: True) -> str | None:
        """A value whose sides are as wanted; recent ones more often."""
        fitting = [name for name, sides in self.values.items() if wanted(sides)]
        if not fitting:
            return None
        return fitting[-1] if self.rng.random() < 0.6 else str(self.rng.choice(fitting))

    def parameter(self, *sides: int) -> str:
        return self.constant(self.rng.normal(size=sides) * 0.7, "w")

    def constant(self, array: object, name: str = "c") -> str:
        label = f"{name}{len(self.constants)}"
        self.constants[label] = np.asarray(array)
        return label

    def add(self, op: str, inputs: Sequence[str], sides: Sides, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        self.values[name] = sides
        return name

    def model(self) -> onnx.ModelProto:
        output = list(self.values)[-1]
        return helper.make_model(
            helper.make_graph(
                self.nodes,
                "random",
                [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["n", 4, 6])],
                [
                    helper.make_tensor_value_info(
                        output, TensorProto.DOUBLE, ["n", *self.values[output]]
                    )
                ],
                [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
            ),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=10,
        )


# -- steps -----------------------------------------------------------------------------------------

# ONNX Runtime has these in float64.
UNARY = ("Tanh", "Sigmoid", "Sin", "Cos", "Neg", "Identity", "Abs", "Relu")
BOUNDED = {"Exp": (-2, 2), "Sqrt": (0.5, 3), "Log": (0.5, 3), "Reciprocal": (0.5, 2)}
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp",
              "ReduceSumSquare", "ReduceL1")  # fmt: skip


def unary(d: Draft) -> None:
    x = d.pick()
    op = str(d.rng.choice(UNARY))
    d.add(op, [x], d.values[x])


def bounded(d: Draft) -> None:
    op = str(d.rng.choice(list(BOUNDED)))
    x = d.pick()
    low, high = (d.constant(np.float64(bound)) for bound in BOUNDED[op])
    d.add(op, [d.add("Clip", [x, low, high], d.values[x])], d.values[x])


def binary(d: Draft) -> None:
    """With another value, or with a parameter that broadcasts."""
    x = d.pick()
    sides = d.values[x]
    other = d.pick(lambda found: found == sides)
    if d.rng.random() < 0.5:
        kept = [side if d.rng.random() < 0.7 else 1 for side in sides]
        other = d.parameter(*kept[int(d.rng.integers(0, len(kept) + 1)) :])
    pair = [x, other] if d.rng.random() < 0.5 else [other, x]
    d.add(str(d.rng.choice(BINARY)), pair, sides)


def divide(d: Draft) -> None:
    x = d.pick()
    below = d.add("Exp", [d.add("Tanh", [d.pick(lambda s: s == d.values[x])], d.values[x])],
                  d.values[x])  # fmt: skip
    d.add("Div", [x, below], d.values[x])


def matmul(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1)
    *lead, k = d.values[x]
    n = int(d.rng.integers(1, 6))
    y = d.add("MatMul", [x, d.parameter(k, n)], (*lead, n))
    if d.rng.random() < 0.5:
        d.add("Add", [y, d.parameter(n)], (*lead, n))


def gemm(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) == 1)
    if x is None:
        return
    (k,), n = d.values[x], int(d.rng.integers(1, 6))
    turned = int(d.rng.integers(0, 2))
    weight = d.parameter(n, k) if turned else d.parameter(k, n)
    d.add("Gemm", [x, weight, d.parameter(n)], (n,), transB=turned, alpha=0.5, beta=2.0)


def product_of_values(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) == 2)
    if x is None:
        return
    m, k = d.values[x]
    y = d.pick(lambda sides: len(sides) == 2 and sides[0] == k)
    if y is not None and m * d.values[y][1] <= MOST_NUMBERS:
        d.add("MatMul", [x, y], (m, d.values[y][1]))


def einsum(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) == 2)
    if x is None:
        return
    a, b = d.values[x]
    n = int(d.rng.integers(1, 5))
    equation, weight, sides = {
        0: ("nab,bc->nac", (b, n), (a, n)),
        1: ("nab,abc->nc", (a, b, n), (n,)),
        2: ("nab,cab->nbc", (n, a, b), (b, n)),
        3: ("nab,ab->na", (a, b), (a,)),
        4: ("...b,cb->...c", (n, b), (a, n)),
    }[int(d.rng.integers(0, 5))]
    d.add("Einsum", [x, d.parameter(*weight)], sides, equation=equation)


def transpose(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 2)
    if x is None:
        return
    order = d.rng.permutation(len(d.values[x]))
    sides = tuple(d.values[x][i] for i in order)
    d.add("Transpose", [x], sides, perm=[0, *(int(i) + 1 for i in order)])


def reshape(d: Draft) -> None:
    x = d.pick()
    size = int(np.prod(d.values[x]))
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    k = int(d.rng.choice(divisors))
    sides = (size,) if d.rng.random() < 0.4 else (k, size // k)
    d.add("Reshape", [x, d.constant(np.array([0, *sides]))], sides)


def squeeze(d: Draft) -> None:
    x = d.pick(lambda sides: 1 in sides)
    if x is None or d.rng.random() < 0.5:
        x = d.pick(lambda sides: len(sides) < 3)
        if x is not None:
            at = int(d.rng.integers(1, len(d.values[x]) + 2))
            sides = d.values[x]
            d.add("Unsqueeze", [x, d.constant(np.array([at]))],
                  (*sides[: at - 1], 1, *sides[at - 1 :]))  # fmt: skip
        return
    sides = d.values[x]
    at = sides.index(1)
    d.add("Squeeze", [x, d.constant(np.array([at + 1]))], (*sides[:at], *sides[at + 1 :]))


def reduce(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1 and np.prod(sides) > 1)
    if x is None:
        return
    at, keep = int(d.rng.integers(0, len(d.values[x]))), int(d.rng.integers(0, 2))
    sides = list(d.values[x])
    sides[at : at + 1] = [1] * keep
    if not sides:
        return
    axes = d.constant(np.array([at + 1 if d.rng.random() < 0.5 else at - len(d.values[x])]))
    d.add(str(d.rng.choice(REDUCTIONS)), [x, axes], tuple(sides), keepdims=keep)


def concatenate(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1)
    sides = d.values[x]
    at = int(d.rng.integers(0, len(sides)))
    y = d.pick(
        lambda s: len(s) == len(sides) and s[:at] + s[at + 1 :] == sides[:at] + sides[at + 1 :]
    )
    both = sides[at] + d.values[y][at]
    new = (*sides[:at], both, *sides[at + 1 :])
    if np.prod(new) <= MOST_NUMBERS:
        d.add("Concat", [x, y], new, axis=at + 1)


def cut(d: Draft) -> None:
    x = d.pick(lambda sides: max(sides, default=0) >= 2)
    if x is None:
        return
    sides = list(d.values[x])
    at = int(np.argmax(sides))
    step = int(d.rng.choice([1, 2, -1]))
    start, end = (sides[at] - 1, -(2**31)) if step < 0 else (int(d.rng.integers(0, 2)), 2**31)
    kept = len(range(sides[at])[start::step] if step > 0 else range(sides[at]))
    operands = [d.constant(np.array([v])) for v in (start, end, at + 1, step)]
    sides[at] = kept
    d.add("Slice", [x, *operands], tuple(sides))


def gather(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1)
    sides = list(d.values[x])
    at = int(d.rng.integers(0, len(sides)))
    ids = d.rng.integers(-sides[at], sides[at], 3)
    sides[at] = 3
    if np.prod(sides) <= MOST_NUMBERS:
        d.add("Gather", [x, d.constant(ids)], tuple(sides), axis=at + 1)


def pad(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1)
    sides = list(d.values[x])
    begins, ends = d.rng.integers(0, 2, (2, len(sides)))
    new = tuple(int(s + b + e) for s, b, e in zip(sides, begins, ends, strict=True))
    if np.prod(new) <= MOST_NUMBERS:
        d.add("Pad", [x, d.constant(np.array([0, *begins, 0, *ends]))], new)


def normalise(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1 and sides[-1] > 1)
    if x is None:
        return
    sides = d.values[x]
    op = str(
        d.rng.choice(["Softmax", "LogSoftmax", "LayerNormalization", "RMS", "LpNormalization"])
    )
    if op == "LayerNormalization":
        scale, shift = d.parameter(sides[-1]), d.parameter(sides[-1])
        d.add(op, [x, scale, shift], sides, axis=-1)
    elif op == "RMS":
        axes = d.constant(np.array([-1]))
        mean = d.add("ReduceMean", [d.add("Mul", [x, x], sides), axes], (*sides[:-1], 1))
        root = d.add("Sqrt", [d.add("Add", [mean, d.constant(np.array(0.1))], (*sides[:-1], 1))],
                     (*sides[:-1], 1))  # fmt: skip
        d.add("Mul", [d.add("Div", [x, root], sides), d.parameter(sides[-1])], sides)
    else:
        d.add(op, [x], sides, axis=-1)


def choose(d: Draft) -> None:
    x = d.pick()
    y = d.pick(lambda sides: sides == d.values[x])
    zero = d.constant(np.float64(0.1))
    name = d.add("Greater", [x, zero], d.values[x])
    del d.values[name]
    d.add("Where", [name, x, y], d.values[x])


def accumulate(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1)
    at = int(d.rng.integers(1, len(d.values[x]) + 1))
    flags = {"exclusive": int(d.rng.integers(0, 2)), "reverse": int(d.rng.integers(0, 2))}
    d.add("CumSum", [x, d.constant(np.array(at))], d.values[x], **flags)


def tile(d: Draft) -> None:
    x = d.pick(lambda sides: len(sides) >= 1)
    times = d.rng.integers(1, 3, len(d.values[x]))
    sides = tuple(int(s * t) for s, t in zip(d.values[x], times, strict=True))
    if np.prod(sides) <= MOST_NUMBERS:
        d.add("Tile", [x, d.constant(np.array([1, *times]))], sides)


STEPS = (unary, unary, bounded, binary, binary, divide, matmul, matmul, gemm, product_of_values,
         einsum, transpose, reshape, squeeze, reduce, concatenate, cut, gather, pad, normalise,
         choose, accumulate, tile)  # fmt: skip


def random_model(seed: int) -> onnx.ModelProto:
    """A valid model of three to fourteen steps."""
    draft = Draft(np.random.default_rng(seed))
    matmul(draft)
    for _ in range(int(draft.rng.integers(2, 14))):
        draft.rng.choice(np.array(STEPS, object))(draft)
    return draft.model()
