"""Which parameters have a layer, of which kind, and why others have none."""

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke
from tests import models


def layers(sides, constants, nodes, **options):
    """Parameters to the kind of their layer, or to the reason why they have none."""
    model = models.written(sides, constants, nodes)
    found = ke.Engine.from_onnx(model, loss="normal", **options).layers
    return {" ".join(layer.parameters): layer.reason or layer.kind for layer in found}


ROWS = "rows = Reshape(input, r)  y = {}(rows, b)  output = Reshape(y, k)"
FOLDED = "batch,4,3", "b(3) r=-1,3 k=-1,4,3"
NONE = "no axis of 'y' contains the examples alone"
EACH = "different for each example, on axis 0 of 'output'"
# z ∘ (r ∘ scale) + b, as Flax has it; r is one number a row.
FLAX = "r = ReduceMax(input, axis)  scaled = Mul(r, scale)  product = Mul({}, scaled)"
NORM = "scale(1,3) b(1,3) axis=1"
CUT = "s = Conv(input, w)  c = Slice(s, start, end, axis, step)  l = Squeeze(c, two)  "
CUT += "output = Add(l, b)"
TURNED = "s = Conv(input, w)  t = Transpose<perm=[0, 2, 1]>(s)  y = Add(t, b)  "
LAST, CONV = 2**62, "w(2,1,1,1) b(1,2,1) two=2 start={} end={} step={} axis={}"
TWICE = "used 2 times, by {}"
TRAIN_B, BOTH = {"trainable": ["b"]}, {"trainable": ["w", "b"]}
UNKNOWN = {"table": "table of Gather whose indices do not depend on the data"}
TABLE, TOKENS = "table(10,3) numbers=0,1,2,3,4,5,6,7,8,9 zero=0", "batch,time,3"
COUNT = "t = Shape<start=1, end=2>(input)  ids = Slice(numbers, zero, t, zero)  "
COUNT += "rows = Gather(table, ids)  "
RANGE = "t = Shape<start=1, end=2>(input)  n = Squeeze(t)  ids = Range(first, n, one)  "
APART = {"scale": "scale_and_shift", "b": "shift"}
SPLIT = """joined = Concat<axis=1>(u, w)  left, right = Split<axis=1>(joined, sizes)
    s = MatMul(input, left)  t = MatMul(input, right)  """
JOINED = {"u": "operand 0 of Concat", "w": "operand 1 of Concat"}

CASES = {
    # Shifts and slopes of the positions of all examples.
    "Add of folded rows": (*FOLDED, ROWS.format("Add"), {"b": f"operand 1 of Add, {NONE}"}),
    "PRelu of folded rows": (*FOLDED, ROWS.format("PRelu"), {"b": f"slope of PRelu, {NONE}"}),
    "Mul of folded rows": (*FOLDED, ROWS.format("Mul"), {"b": NONE}),
    "Add for each example": (
        "2,3", "b(2,3)", "output = Add(input, b)", {"b": f"operand 1 of Add, {EACH}"}),
    "Mul for each example": ("2,3", "b(2,3)", "output = Mul(input, b)", {"b": EACH}),
    "PRelu for each example": (
        "2,3", "b(2,3)", "output = PRelu(input, b)", {"b": f"slope of PRelu, {EACH}"}),
    "repeated for each example": (
        "batch,4,3", "b(1,2,3) two=2,1",
        "n = Shape<end=1>(input)  times = Concat<axis=0>(n, two)  rows = Tile(b, times)  "
        "output = Mul(input, rows)",
        {"b": "operand 0 of Tile, shape (1, 2, 3) with data of shape (2, 4, 3)"},
    ),
    "on a mean over examples": (
        "batch,3", "b(3) axis=0", "mean = ReduceMean(input, axis)  y = Add(mean, b)  "
        "output = Mul(input, y)",
        {"b": f"operand 1 of Add, {NONE}"},
    ),
    "on a parameter": (
        "batch,3", "b0(3) b1(3)", "y = Add(b0, b1)  output = Mul(input, y)",
        {f"b{i}": f"operand {i} of Add, {NONE}" for i in range(2)}),
    "with both signs": (
        "batch,3", "b(3)", "y = Add(input, b)  x = Sin(y)  output = Sub(x, b)", {"b": "shift"}),
    "multiplied": (
        "batch,3", "w(3,3) b(3)", "output = Gemm<beta=2.0>(input, w, b)",
        {"b": "operand 2 of Gemm, which is multiplied by beta"}, TRAIN_B),
    "a slope as well": (
        "batch,3", "b(3)", "y = Add(input, b)  output = PRelu(y, b)",
        {"b": TWICE.format("Add, PRelu")}),
    "along two axes": (
        "batch,3,3", "b(3,1) sides=1,3",
        "y = Add(input, b)  x = Sin(y)  turned = Reshape(b, sides)  output = Add(x, turned)",
        {"b": TWICE.format("Add, in several layouts")}),
    "of a trained layer": (
        "batch,3", "w(3,3) b(3)", "x = MatMul(input, w)  output = Add(x, b)",
        {"w b": "fully_connected"}),
    "of a layer that is not trained": (
        "batch,3", "w(3,3) b(3)", "x = MatMul(input, w)  output = Add(x, b)", {"b": "shift"},
        TRAIN_B),
    # Scales, with and without the shift behind them.
    "shift with more axes than the scale": (
        "batch,1,3", "scale(3) b(4,3) axis=1",
        "scaled = Mul(input, scale)  y = Add(scaled, b)  output = ReduceSum(y, axis)", APART),
    "shift on another axis than the scale": (
        "batch,3,3", "scale(3) b(3) axis=1",
        "wide = Unsqueeze(scale, axis)  scaled = Mul(input, wide)  output = Add(scaled, b)", APART),
    "scale of deviations": (
        "batch,3", NORM, FLAX.format("input") + "  y = Add(product, b)  output = Tanh(y)",
        {"scale b": "scale_and_shift"}),
    "scale of deviations, read twice": (
        "batch,3", NORM, FLAX.format("input") + "  y = Add(product, b)  output = Mul(y, scaled)",
        APART),
    "two scales of deviations": (
        "batch,3", f"{NORM} other(1,3)",
        "r = ReduceMax(input, axis)  scaled = Mul(r, scale)  too = Mul(r, other)  "
        "product = Mul(too, scaled)  y = Add(product, b)  output = Tanh(y)",
        {"scale b": "scale_and_shift", "other": "scale_and_shift"},
    ),
    "scale of a number a row": (
        "batch,3", NORM,
        "z = ReduceMin(input, axis)  " + FLAX.format("z") + "  output = Add(product, b)", APART),
    "shift for each example behind a scale": (
        "2,3", "scale(3) b(2,3)", "scaled = Mul(input, scale)  output = Add(scaled, b)",
        {"scale": "scale_and_shift", "b": f"operand 1 of Add, {EACH}"}),
    "scale of a weight": (
        "batch,3", "w(3,3) scale(3)", "v = Mul(w, scale)  output = MatMul(input, v)",
        {
            "w": "operand 0 of Mul, which does not depend on the data",
            "scale": "operand 1 of Mul, which does not depend on the data",
        },
    ),
    "scale along two axes": (
        "batch,3,3", "scale(3) sides=1,3,1",
        "a = Mul(input, scale)  turned = Transpose<perm=[0, 2, 1]>(a)  "
        "wide = Reshape(scale, sides)  "
        "output = Mul(turned, wide)",
        {"scale": TWICE.format("Mul")},
    ),
    "scale that adds axes": (
        "batch,3", "scale(4,1,3) axis=0",
        "scaled = Mul(scale, input)  output = ReduceSum<keepdims=0>(scaled, axis)",
        {"scale": "shape (4, 1, 3) with data of shape (2, 3)"}),
    # Biases behind views of what a convolution computes.
    **{
        f"bias behind a slice {bounds}": (
            f"batch,1,1,5 -> batch,2,{places}", CONV.format(*bounds), CUT, {"w b": "conv2d"}
        )
        for bounds, places in (((0, LAST, 1, 3), 5), ((1, 5, 2, 3), 2), ((0, 2, 1, 1), 5))
    },
    "bias behind channels from the end": (
        "batch,1,1,5 -> batch,2,5", CONV.format(1, -LAST, -1, 1), CUT, {"w": "conv2d", "b": "shift"}
    ),
    "bias behind some channels": (
        "batch,1,1,5 -> batch,1,5", CONV.format(0, 1, 1, 1).replace("b(1,2", "b(1,1"), CUT,
        {"w": "conv2d", "b": "shift"}, BOTH),
    "bias behind a slice of unknown length": (
        "batch,1,time -> batch,2,time", "w(2,1,1) b(1,2,1) start=0 axis=2",
        "s = Conv(input, w)  end = Shape<start=2>(input)  c = Slice(s, start, end, axis)  "
        "output = Add(c, b)",
        {"w": "conv1d", "b": "shift"},
    ),
    "bias behind a Transpose": (
        "batch,1,4 -> batch,4,2", "w(2,1,1) b(2)", TURNED + "output = Tanh(y)", {"w b": "conv1d"},
        BOTH),
    "frozen bias behind a Transpose": (
        "batch,1,4 -> batch,4,2", "w(2,1,1) b(2)", TURNED + "output = Tanh(y)", {"w": "conv1d"},
        {"trainable": ["w"]}),
    "bias behind a Transpose, read twice": (
        "batch,1,4 -> batch,4,2", "w(2,1,1) b(2)", TURNED + "x = Sin(y)  output = Mul(x, b)",
        {"w": "conv1d", "b": TWICE.format("Add, Mul")}),
    "scale and shift in one array, used twice": (
        "batch,3", "scale(3) b(3) zero=0 three=3 six=6",
        "joined = Concat<axis=0>(scale, b)  s = Slice(joined, zero, three)  "
        "t = Slice(joined, three, six)  x0 = Mul(input, s)  y0 = Add(x0, t)  x1 = Sin(y0)  "
        "x2 = Mul(x1, s)  output = Add(x2, t)",
        {"scale b": "scale_and_shift"},
    ),
    # Rows and columns of tables.
    "positions that multiply": (TOKENS, TABLE, COUNT + "output = Mul(input, rows)", UNKNOWN),
    "numbers of a range that multiply": (
        "batch,4,3", "table(6,3) first:0 one:1",
        RANGE + "rows = Gather(table, ids)  output = Mul(input, rows)", UNKNOWN),
    "positions, read twice": (
        TOKENS, TABLE, COUNT + "x = Add(input, rows)  output = Mul(x, rows)", UNKNOWN),
    "positions on another axis": (
        TOKENS, f"{TABLE} axis=1",
        COUNT + "wide = Unsqueeze(rows, axis)  x = Transpose<perm=[1, 0, 2]>(input)  "
        "y = Add(x, wide)  output = Transpose<perm=[1, 0, 2]>(y)",
        UNKNOWN,
    ),
    "positions of folded examples": (
        "batch,4,4,3", f"{TABLE} k=-1,4,3 back=-1,4,4,3",
        COUNT + "flat = Reshape(input, k)  x = Add(flat, rows)  output = Reshape(x, back)", UNKNOWN,
    ),
    "a single position": ("batch,1,3", TABLE, COUNT + "output = Add(input, rows)", UNKNOWN),
    "positions narrower than the data": (
        TOKENS, TABLE.replace("10,3", "10,1"), COUNT + "output = Add(input, rows)", UNKNOWN),
    "columns of a table": (
        "batch,4,3", "table(4,3) at=2,0,0", "x = Gather<axis=1>(table, at)  output = Mul(input, x)",
        {"table": "table of Gather, shape (4, 3)"}),
    # Weights.
    "bias that adds axes": (
        "batch,4 -> batch,3", "w(4,3) b(1,1,3) axis=0",
        "p = MatMul(input, w)  y = Add(p, b)  output = Squeeze(y, axis)",
        {"w": "fully_connected", "b": "shift"}),
    "bias of one number": (
        "batch,4 -> batch,3", "w(4,3) b(1)", "p = MatMul(input, w)  output = Add(p, b)",
        {"w": "fully_connected", "b": "shift"}, BOTH),
    "product of weights": (
        "batch,3", "a(3,2) b(2,3)", "p = MatMul(a, b)  output = MatMul(input, p)",
        {
            "a": "operand 0 of MatMul, which does not depend on the data",
            "b": "operand 1 of MatMul, which does not depend on the data",
        },
    ),
    "weight in two roles": (
        "batch,3", "w(3,3)",
        "s = MatMul(input, w)  turned = Transpose<perm=[1, 0]>(w)  output = MatMul(s, turned)",
        {"w": TWICE.format("MatMul, with different properties")}),
    "weight in two layouts": (
        "batch,3", "w(3,3)", "s = MatMul(input, w)  output = Gemm<transB=1>(s, w)",
        {"w": TWICE.format("Gemm, MatMul, with different properties")}),
    "weight of a Gemm with alpha 0": (
        "batch,4 -> batch,3", "w(4,3) b(3)", "output = Gemm<alpha=0.0>(input, w, b)",
        {"w": "Gemm with alpha 0", "b": "shift"}),
    "operands of Max and Div": (
        "batch,4 -> batch,3", "least(4) divisor(4) w(4,3)",
        "x = Max(input, least)  moved = Div(x, divisor)  output = MatMul(moved, w)",
        {"least": "operand 1 of Max", "divisor": "operand 1 of Div", "w": "fully_connected"}),
    # Joined weights.
    "entries that repeat": (
        "batch,4 -> batch,2", "w(4,1)", "both = Concat<axis=1>(w, w)  output = MatMul(input, both)",
        {"w": TWICE.format("Concat")}),
    "columns that are constant": (
        "batch,4 -> batch,2", "w(4,1) counts=0,1,2,3 axis=1",
        "column = Unsqueeze(counts, axis)  other = CastLike(column, input)  "
        "both = Concat<axis=1>(w, other)  output = MatMul(input, both)",
        {"w": "operand 0 of Concat"},
    ),
    "two parameters of one weight": (
        "batch,4 -> batch,3", "u(4,1) w(4,2)",
        "joined = Concat<axis=1>(u, w)  output = MatMul(input, joined)", JOINED),
    "two parameters, split at their border": (
        "batch,4 -> batch,2", "u(4,2) w(4,1) sizes=2,1", SPLIT + "output = Mul(s, t)",
        {"u": "fully_connected", "w": "fully_connected"}),
    # One piece holds entries of both.
    "two parameters, split elsewhere": (
        "batch,4 -> batch,2", "u(4,2) w(4,1) sizes=1,2", SPLIT + "output = Mul(s, t)",
        {"u": "read in parts that overlap", "w": "operand 1 of Concat"}),
    "two parameters, also read whole": (
        "batch,4 -> batch,2", "u(4,2) w(4,1) sizes=2,1 last(3,1)",
        SPLIT + "p = Mul(s, t)  x = MatMul(input, joined)  y = Gemm(x, last)  output = Mul(p, y)",
        {
            "u": TWICE.format("Concat, MatMul"), "w": TWICE.format("Concat, MatMul"),
            "last": "fully_connected",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parameter_has_the_layer_of_its_uses_or_a_reason(case):
    sides, constants, nodes, expected, *options = case
    assert layers(sides, constants, nodes, **(options[0] if options else {})) == expected


def test_position_table_is_shift_of_read_rows():
    net = models.Net()
    at = net.constant("at", np.arange(4))
    table = net.op("Gather", net.weight("table", 6, 3), at, to="positions")
    net.op("Add", "input", table, to="output")
    sides = ["batch", 4, 3]
    proto = net.model({"input": sides}, {"output": sides})
    (layer,) = ke.Engine.from_onnx(proto, loss="normal").layers
    assert (layer.kind, layer.parameters, layer.parts) == ("shift", ("table",), ("[0:4, :]",))
    assert (layer.inputs, layer.outputs) == ("", "output")


def test_output_product_has_separate_scale_and_shift():
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        m (float[batch,3] input) => (float[batch,3] y, float[batch,3] product)
        <int64[1] axis = {{1}}, float[1,3] scale = {{1, 2, 3}}, float[1,3] b = {{4, 5, 6}}>
        {{ {FLAX.format("input")}  y = Add(product, b) }}"""
    )
    engine = ke.Engine.from_onnx(model, loss="normal", output="y")
    assert {" ".join(layer.parameters): layer.kind for layer in engine.layers} == APART
