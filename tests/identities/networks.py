"""Random networks: a sequence of pieces, each in one of the spellings that exporters write.

A value is rows ``(n, d)``, tokens ``(n, t, d)``, or pixels ``(n, c, *sides)`` of n examples. Tokens
of a network with time first are ``(t, n, d)``. The pieces of a padded network give a token results
that do not depend on the tokens behind it, so that a text may be longer than its examples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import onnx

from tests.models import VOCABULARY, Net

Kind = Literal["rows", "tokens", "pixels"]
N = "batch"


@dataclass(frozen=True)
class Value:
    """A value of a network; ``sides`` are those of one example."""

    name: str
    kind: Kind
    sides: tuple[int, ...]


@dataclass
class Draft:
    """A network in the making."""

    rng: np.random.Generator  # decides everything
    net: Net  # nodes and weights
    time_first: bool = False  # whether the examples are on the second axis of tokens
    padded: bool = False  # whether a token may not depend on the tokens behind it
    inputs: dict[str, list[int | str]] = field(default_factory=dict)  # shapes of the inputs so far
    pieces: list[str] = field(default_factory=list)  # what was added, for the failure message
    length: int = 0  # number of tokens of the input
    of_ids: bool = False  # whether the input has ids of tokens
    fixed_length: bool = False  # whether the graph needs the number of tokens of the sample inputs
    _numbers: Iterator[int] = field(default_factory=count)

    def chance(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def choose(self, entries: Sequence[Any]) -> Any:
        return entries[int(self.rng.integers(len(entries)))]

    def op(self, op: str, *inputs: str, further: Sequence[str] = (), **attributes: Any) -> str:
        return self.net.op(
            op, *inputs, to=f"{op.lower()}{self._count()}", further=further, **attributes
        )

    def weight(self, *shape: int, name: str = "w", mean: float = 0.0, spread: float = 0.5) -> str:
        return self.net.weight(f"{name}{self._count()}", *shape, mean=mean, spread=spread)

    def positive(self, *shape: int) -> str:
        return self.net.positive(f"p{self._count()}", *shape)

    def number(self, value: float) -> str:
        return self.net.constant(f"c{self._count()}", np.asarray(value, self.net.dtype))

    def whole(self, *values: int) -> str:
        return self.net.constant(f"i{self._count()}", np.asarray(values, np.int64))

    def _count(self) -> int:
        return next(self._numbers)

    # -- axes of tokens --

    def by_example(self, x: str) -> str:
        """Tokens with the examples first."""
        return self.op("Transpose", x, perm=[1, 0, 2]) if self.time_first else x

    from_example = by_example  # the same exchange of two axes

    def by_time(self, x: str) -> str:
        """Tokens with the time first."""
        return x if self.time_first else self.op("Transpose", x, perm=[1, 0, 2])

    from_time = by_time


# -- products with weights -------------------------------------------------------------------------


def _matmul(d: Draft, x: str, k: int, m: int) -> str:
    return d.op("MatMul", x, d.weight(k, m))


def _matmul_add(d: Draft, x: str, k: int, m: int) -> str:
    pair = [d.op("MatMul", x, d.weight(k, m)), d.weight(m, name="b")]
    return d.op("Add", *pair[:: d.choose([1, -1])])


def _matmul_of_transpose(d: Draft, x: str, k: int, m: int) -> str:
    turned = d.op("Transpose", d.weight(m, k), perm=[1, 0])
    return d.op("Add", d.op("MatMul", x, turned), d.weight(m, name="b"))


def _einsum(d: Draft, x: str, k: int, m: int) -> str:
    return d.op("Einsum", x, d.weight(m, k), equation="...k,mk->...m")


def _gemm(d: Draft, x: str, k: int, m: int) -> str:
    turned = int(d.chance(0.5))
    weight = d.weight(m, k) if turned else d.weight(k, m)
    bias = [d.weight(m, name="b")] if d.chance(0.7) else []
    scales = {"alpha": 0.5, "beta": 2.0} if d.chance(0.3) else {}
    return d.op("Gemm", x, weight, *bias, transB=turned, **scales)


def _gemm_of_transpose(d: Draft, x: str, k: int, m: int) -> str:
    turned = d.op("Transpose", x, perm=[1, 0])
    return d.op("Gemm", turned, d.weight(k, m), d.weight(m, name="b"), transA=1)


def _weight_on_the_left(d: Draft, x: str, k: int, m: int) -> str:
    product = d.op("MatMul", d.weight(m, k), d.op("Transpose", x, perm=[1, 0]))
    return d.op("Transpose", product, perm=[1, 0])


def _gemm_of_all_tokens(d: Draft, x: str, k: int, m: int) -> str:
    rows = d.op("Reshape", x, d.whole(-1, k))
    sides = d.op("Concat", d.op("Shape", x, start=0, end=2), d.whole(m), axis=0)
    return d.op("Reshape", _gemm(d, rows, k, m), sides)


def _fused(d: Draft, x: str, k: int, m: int) -> str:
    """The products that ONNX Runtime writes into optimized files, in single precision."""
    turned = int(d.chance(0.5))
    weight = d.weight(m, k) if turned else d.weight(k, m)
    product = d.op("FusedMatMul", x, weight, domain="com.microsoft", transB=turned, alpha=0.5)
    return d.op("Add", product, d.weight(m, name="b"))


ANY_RANK = (_matmul, _matmul_add, _matmul_add, _matmul_of_transpose, _einsum)
OF_ROWS = (*ANY_RANK, _gemm, _gemm, _gemm_of_transpose, _weight_on_the_left)
OF_TOKENS = (*ANY_RANK, _gemm_of_all_tokens)


def product(d: Draft, x: Value, m: int) -> Value:
    spellings = OF_ROWS if x.kind == "rows" else OF_TOKENS
    if d.net.dtype == np.float32:
        spellings = (*spellings, _fused)
    spelling = d.choose(spellings)
    d.pieces.append(spelling.__name__.strip("_"))
    return replace(x, name=spelling(d, x.name, x.sides[-1], m), sides=(*x.sides[:-1], m))


# -- pieces ----------------------------------------------------------------------------------------


def dense(d: Draft, x: Value) -> Value:
    return product(d, x, int(d.rng.integers(2, 6)))


def activation(d: Draft, x: Value) -> Value:
    op = d.choose(["Tanh", "Sigmoid", "Relu", "swish", "LeakyRelu", "Softplus", "gelu"])
    if op == "swish":
        return replace(x, name=d.op("Mul", x.name, d.op("Sigmoid", x.name)))
    if op == "gelu":  # by the hyperbolic tangent, as exporters spell it
        cube = d.op("Mul", d.op("Mul", x.name, x.name), x.name)
        inner = d.op("Add", x.name, d.op("Mul", cube, d.number(0.044715)))
        gate = d.op("Tanh", d.op("Mul", inner, d.number(0.7978845608)))
        gate = d.op("Add", gate, d.number(1.0))
        return replace(x, name=d.op("Mul", d.op("Mul", x.name, gate), d.number(0.5)))
    if op in ("LeakyRelu", "Softplus") and d.net.dtype == np.float64:
        op = "Tanh"  # ONNX Runtime has no kernel
    return replace(x, name=d.op(op, x.name))


def scale(d: Draft, x: Value) -> Value:
    """A scale, with or without a shift, or the slopes of a PRelu."""
    sides = (x.sides[0], *[1] * (len(x.sides) - 1)) if x.kind == "pixels" else x.sides[-1:]
    if d.chance(0.3):
        return replace(x, name=d.op("PRelu", x.name, d.weight(*sides, name="slope", mean=0.3)))
    scaled = d.op("Mul", x.name, d.weight(*sides, name="scale", mean=1.0))
    if d.chance(0.5):
        scaled = d.op("Add", scaled, d.weight(*sides, name="shift"))
    return replace(x, name=scaled)


def layer_norm(d: Draft, x: Value) -> Value:
    side = x.sides[-1]
    if d.chance(0.5):
        operands = d.weight(side, name="scale", mean=1.0), d.weight(side, name="shift")
        return replace(x, name=d.op("LayerNormalization", x.name, *operands, axis=-1, epsilon=0.1))
    mean = d.op("ReduceMean", d.op("Mul", x.name, x.name), d.whole(-1))
    root = d.op("Sqrt", d.op("Add", mean, d.number(0.1)))
    normal = d.op("Div", x.name, root)
    return replace(x, name=d.op("Mul", normal, d.weight(side, name="scale", mean=1.0)))


def batch_norm(d: Draft, x: Value) -> Value:
    """In the form of inference."""
    c = x.sides[0]
    operands = (
        d.weight(c, name="scale", mean=1.0), d.weight(c, name="shift"), d.weight(c, name="mean"),
        d.positive(c),
    )  # fmt: skip
    return replace(x, name=d.op("BatchNormalization", x.name, *operands, epsilon=1e-3))


def residual(d: Draft, x: Value) -> Value:
    y = x
    for _ in range(int(d.rng.integers(1, 3))):
        y = activation(d, y)
        y = _same_conv(d, y) if x.kind == "pixels" else product(d, y, x.sides[-1])
    return replace(x, name=d.op("Add", x.name, y.name))


def used_twice(d: Draft, x: Value) -> Value:
    side = x.sides[-1]
    weight, bias = d.weight(side, side), d.weight(side, name="b")
    name = x.name
    for _ in range(2):
        name = d.op("Tanh", d.op("Add", d.op("MatMul", name, weight), bias))
    return replace(x, name=name)


def experts(d: Draft, x: Value) -> Value:
    """A stack of dense layers, each of which reads its part of the features."""
    x = product(d, x, 4)
    stack = d.op("Transpose", d.op("Reshape", x.name, d.whole(-1, 2, 2)), perm=[1, 0, 2])
    outs = d.op("MatMul", stack, d.weight(2, 2, 3))
    if d.chance(0.7):
        outs = d.op("Add", outs, d.weight(2, 1, 3, name="b"))
    outs = d.op("Transpose", d.op("Tanh", outs), perm=[1, 0, 2])
    return replace(x, name=d.op("Reshape", outs, d.whole(-1, 6)), sides=(6,))


def attention(d: Draft, x: Value) -> Value:
    heads = d.choose([1, 2])
    side = 2 * heads
    x = product(d, x, side)
    start = replace(x, name=d.by_example(x.name))
    q, k, v = (product(d, start, side).name for _ in range(3))
    if heads > 1:
        parts = (d.op("Reshape", y, d.whole(0, 0, heads, side // heads)) for y in (q, k, v))
        q, k, v = (d.op("Transpose", y, perm=[0, 2, 1, 3]) for y in parts)
    keys = d.op("Transpose", k, perm=[0, 1, 3, 2] if heads > 1 else [0, 2, 1])
    scores = d.op("Mul", d.op("MatMul", q, keys), d.number(0.7))
    if d.padded:
        d.inputs["seen"] = [N, "time"]
        if d.of_ids:
            absent = d.op("Equal", "seen", d.whole(0))
            hidden = d.op("Where", absent, d.number(-1e4), d.number(0.0))
        else:
            hidden = d.op("Mul", d.op("Sub", d.number(1.0), "seen"), d.number(-1e4))
        axes = d.whole(1, 2) if heads > 1 else d.whole(1)
        scores = d.op("Add", scores, d.op("Unsqueeze", hidden, axes))
    mixed = d.op("MatMul", d.op("Softmax", scores, axis=-1), v)
    if heads > 1:
        mixed = d.op("Reshape", d.op("Transpose", mixed, perm=[0, 2, 1, 3]), d.whole(0, 0, side))
    mixed = product(d, replace(start, name=mixed), side).name
    return replace(x, name=d.op("Add", x.name, d.from_example(mixed)))


def mixing(d: Draft, x: Value) -> Value:
    """A dense layer along the time."""
    t = x.sides[0]
    there, back = ([1, 2, 0], [2, 0, 1]) if d.time_first else ([0, 2, 1], [0, 2, 1])
    turned = replace(x, name=d.op("Transpose", x.name, perm=there), sides=x.sides[::-1])
    return replace(x, name=d.op("Transpose", product(d, turned, t).name, perm=back))


def positions(d: Draft, x: Value) -> Value:
    t, side = x.sides
    return replace(
        x, name=d.op("Add", x.name, d.weight(*((t, 1, side) if d.time_first else (t, side))))
    )


def recurrence(d: Draft, x: Value) -> Value:
    """An LSTM, a GRU or an RNN; its last state, or its outputs."""
    op, gates = d.choose([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    direction = "forward" if d.padded else d.choose(["forward", "reverse", "bidirectional"])
    ways, h = 1 + (direction == "bidirectional"), int(d.rng.integers(2, 4))
    further = {"linear_before_reset": int(d.chance(0.5))} if op == "GRU" else {}
    last = not d.padded and d.chance(0.5)
    operands = [d.weight(ways, gates * h, x.sides[-1]), d.weight(ways, gates * h, h)]
    operands += [d.weight(ways, 2 * gates * h, name="b")] if d.chance(0.8) else []
    state = f"state{len(d.pieces)}"
    outputs = d.op(
        op, d.by_time(x.name), *operands, further=[state], hidden_size=h, direction=direction,
        **further,
    )  # fmt: skip
    d.fixed_length = True
    if last:
        turned = d.op("Transpose", state, perm=[1, 0, 2])
        return Value(d.op("Reshape", turned, d.whole(-1, ways * h)), "rows", (ways * h,))
    if ways == 1:
        outputs = d.op("Squeeze", outputs, d.whole(1))
    else:
        turned = d.op("Transpose", outputs, perm=[0, 2, 1, 3])
        outputs = d.op("Reshape", turned, d.whole(0, 0, 2 * h))
    return Value(d.from_time(outputs), "tokens", (x.sides[0], ways * h))


def pooled(d: Draft, x: Value) -> Value:
    """Rows of tokens."""
    axis, (t, side) = 0 if d.time_first else 1, x.sides
    ops = ["ReduceMean", "ReduceSum", "last", "flat", "ReduceMax"]
    op = d.choose(ops[:-1] if d.of_ids else ops)  # equal tokens have equal largest entries
    if op == "last":
        return Value(
            d.op(
                "Gather",
                x.name,
                d.net.constant(f"at{len(d.pieces)}", np.asarray(-1, np.int64)),
                axis=axis,
            ),
            "rows",
            (side,),
        )
    if op == "flat" and not d.time_first:
        return _flat(d, Value(x.name, "rows", (t, side)))
    op = "ReduceMean" if op == "flat" else op
    return Value(d.op(op, x.name, d.whole(axis), keepdims=0), "rows", (side,))


def _flat(d: Draft, x: Value) -> Value:
    size = int(np.prod(x.sides))
    spelling = d.choose(["Flatten", "minus one", "zero", "size"])
    if spelling == "Flatten":
        name = d.op("Flatten", x.name, axis=1)
    elif spelling == "size":  # of the first axis, computed
        sides = d.op("Concat", d.op("Shape", x.name, start=0, end=1), d.whole(-1), axis=0)
        name = d.op("Reshape", x.name, sides)
    else:
        sides = {"minus one": (-1, size), "zero": (0, -1)}[spelling]
        name = d.op("Reshape", x.name, d.whole(*sides))
    return Value(name, "rows", (size,))


# -- images ----------------------------------------------------------------------------------------


def conv(d: Draft, x: Value) -> Value:
    c, *sides = x.sides
    group = d.choose([g for g in (1, 1, 2, c) if c % g == 0])
    outs = group * int(d.rng.integers(1, 4 if group == 1 else 3))
    kernel = [int(d.rng.integers(1, min(3, side) + 1)) for side in sides]
    strides = [int(d.rng.integers(1, 3)) for _ in sides]
    dilations = [
        2 if d.chance(0.2) and 2 * k - 1 <= s else 1 for k, s in zip(kernel, sides, strict=True)
    ]
    reach = [(k - 1) * r + 1 for k, r in zip(kernel, dilations, strict=True)]
    how = d.choose(["none", "VALID", "SAME_UPPER", "SAME_LOWER", "pads", "pads"])
    if how in ("SAME_UPPER", "SAME_LOWER"):
        dilations, reach = [1] * len(sides), kernel  # as ONNX Runtime demands
        new = [-(-side // s) for side, s in zip(sides, strides, strict=True)]
        padding: dict[str, Any] = {"auto_pad": how}
    else:
        pads = (
            [int(p) for p in d.rng.integers(0, 2, 2 * len(sides))]
            if how == "pads"
            else [0] * 2 * len(sides)
        )
        added = [pads[i] + pads[i + len(sides)] for i in range(len(sides))]
        new = [
            (n + a - r) // s + 1 for n, a, r, s in zip(sides, added, reach, strides, strict=True)
        ]
        padding = {"pads": pads} if how == "pads" else {"auto_pad": how} if how == "VALID" else {}
    operands = [d.weight(outs, c // group, *kernel)] + (
        [d.weight(outs, name="b")] if d.chance(0.7) else []
    )
    shape = {"kernel_shape": kernel} if d.chance(0.7) else {}
    name = d.op(
        "Conv", x.name, *operands, group=group, strides=strides, dilations=dilations, **shape,
        **padding,
    )  # fmt: skip
    return replace(x, name=name, sides=(outs, *new))


def _same_conv(d: Draft, x: Value) -> Value:
    c, *sides = x.sides
    name = d.op(
        "Conv", x.name, d.weight(c, c, *[3] * len(sides), spread=0.3), pads=[1] * 2 * len(sides)
    )
    return replace(x, name=name)


def transposed_conv(d: Draft, x: Value) -> Value:
    c, *sides = x.sides
    if max(sides) > 4:
        return x
    weight, outs = d.weight(c, 2, *[2] * len(sides)), tuple(2 * s for s in sides)
    name = d.op("ConvTranspose", x.name, weight, d.weight(2, name="b"), strides=[2] * len(sides))
    return replace(x, name=name, sides=(2, *outs))


def pool(d: Draft, x: Value) -> Value:
    c, *sides = x.sides
    if min(sides) < 2:
        return x
    op, window = d.choose(["MaxPool", "AveragePool"]), [2] * len(sides)
    name = d.op(op, x.name, kernel_shape=window, strides=window)
    return replace(x, name=name, sides=(c, *(side // 2 for side in sides)))


def instance_norm(d: Draft, x: Value) -> Value:
    c = x.sides[0]
    operands = d.weight(c, name="scale", mean=1.0), d.weight(c, name="shift")
    return replace(x, name=d.op("InstanceNormalization", x.name, *operands, epsilon=0.1))


def gathered(d: Draft, x: Value) -> Value:
    """Rows of pixels."""
    c, *sides = x.sides
    op = d.choose(["GlobalAveragePool", "ReduceMean", "flat", "flat"])
    if op == "GlobalAveragePool":
        return _flat(d, Value(d.op(op, x.name), "rows", (c, *[1] * len(sides))))
    if op == "ReduceMean":
        axes = d.whole(*range(2, 2 + len(sides)))
        return Value(d.op(op, x.name, axes, keepdims=0), "rows", (c,))
    return _flat(d, Value(x.name, "rows", x.sides))


def patches(d: Draft, x: Value) -> Value:
    """Tokens of pixels."""
    c, *sides = x.sides
    lines = d.op("Reshape", x.name, d.whole(0, c, -1)) if len(sides) > 1 else x.name
    t = int(np.prod(sides))
    return Value(d.op("Transpose", lines, perm=[0, 2, 1]), "tokens", (t, c))


# -- sequences of pieces ---------------------------------------------------------------------------

Piece = Callable[[Draft, Value], Value]
PIECES: Mapping[str, tuple[Piece, ...]] = {
    "rows": (dense, dense, activation, scale, layer_norm, batch_norm, residual, used_twice,
             experts),
    "tokens": (dense, activation, scale, layer_norm, residual, used_twice, attention, attention,
               mixing, positions, recurrence),
    "pixels": (conv, conv, activation, scale, batch_norm, residual, pool, instance_norm,
               transposed_conv),
}  # fmt: skip
# Where a token sees the tokens behind it, or the number of tokens matters.
NOT_PADDED = (mixing, positions)
# ONNX Runtime has no kernel in double precision.
SINGLE = (recurrence,)


def grow(d: Draft, x: Value, pieces: int) -> Value:
    """Add random pieces for the kind of the value; rows of tokens and pixels may follow."""
    for _ in range(pieces):
        absent = NOT_PADDED * d.padded + SINGLE * (d.net.dtype == np.float64)
        piece = d.choose([piece for piece in PIECES[x.kind] if piece not in absent])
        d.pieces.append(piece.__name__)
        x = piece(d, x)
    return x


def start(d: Draft, family: str) -> Value:
    """The input of a network, and the pieces that read it alone."""
    rng = d.rng
    if family == "rows":
        side = int(rng.integers(2, 6))
        d.inputs["input"] = [N, side]
        return Value("input", "rows", (side,))
    if family == "pixels":
        axes = d.choose([1, 2, 2])
        sides = (d.choose([1, 2, 4]), *(int(s) for s in rng.integers(3, 6, axes)))
        d.inputs["input"] = [N, *sides]
        return conv(d, Value("input", "pixels", sides))
    t, side = int(rng.integers(3, 5)) + 2 * d.padded, int(rng.integers(2, 5))
    d.length = t
    length: int | str = "time" if d.padded else t
    leading = [length, N] if d.time_first else [N, length]
    if family == "ids":
        d.of_ids = True
        d.inputs["input"] = leading
        table = d.weight(VOCABULARY, side, name="table")
        return Value(d.op("Gather", table, "input"), "tokens", (t, side))
    d.inputs["input"] = [*leading, side]
    return Value("input", "tokens", (t, side))


def finished(d: Draft, outputs: Mapping[str, Sequence[int | str]]) -> onnx.ModelProto:
    """The model."""
    return d.net.model(d.inputs, outputs, "int64" if d.of_ids else None)
