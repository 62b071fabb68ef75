"""What is rounded between a parameter and the loss: no gradient is zero, or half, in silence."""

import itertools
import re

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke
from kfac_engine.autodiff.activity import behind_jumps, behind_quantizers
from kfac_engine.autodiff.rules import QUANTIZERS, ZERO_DERIVATIVE
from kfac_engine.errors import ModelError, UnsupportedOpError
from kfac_engine.graph.structure import Fact, Graph, Node
from tests import models, oracle

# Relative to the largest gradient, of float32 passes.
SINGLE = 2e-5

HEAD = """<ir_version: 10, opset_import: ["": 21]> m (float[n,3] input) => (float[n,3] output)
    <float[3] b = {0.1, 0.2, 0.3}, float[3] c = {0.4, 0.5, 0.6}, float s = {0.02}, uint8 z = {128},
     uint8[3,3] w = {129, 1, 0, 2, 130, 3, 1, 0, 128}> """

# Ways to round and come back, from h to r.
ROUNDINGS = {
    "static": "{r}q = QuantizeLinear ({h}, s, z)  {r} = DequantizeLinear ({r}q, s, z)",
    "dynamic": "{r}q, {r}s, {r}z = DynamicQuantizeLinear ({h})"
    "  {r} = DequantizeLinear ({r}q, {r}s, {r}z)",
    "integer_product": "{r}q = QuantizeLinear ({h}, s, z)  {r}p = MatMulInteger ({r}q, w, z, z)"
    "  {r}f = Cast <to = 1> ({r}p)  {r} = Mul ({r}f, s)",
    "whole_product": "{r}q = QuantizeLinear ({h}, s, z)"
    "  {r}p = QLinearMatMul ({r}q, s, z, w, s, z, s, z)  {r} = DequantizeLinear ({r}p, s, z)",
    "float8": "{r}q = Cast <to = 17> ({h})  {r} = Cast <to = 1> ({r}q)",
    "moved": "{r}q = QuantizeLinear ({h}, s, z)  {r}t = Identity ({r}q)"
    "  {r} = DequantizeLinear ({r}t, s, z)",
}
END = {
    "bias": "output = Add (last, c)",
    "product": "output = Mul (last, c)",
    "mixed": "m = Add (last, h)  output = Mul (m, c)",
}


def rounded(kinds, end):
    """Roundings in a row between the parameters b and c."""
    values = ["h", *(f"r{k}" for k in range(1, len(kinds))), "last"]
    links = (
        ROUNDINGS[kind].format(h=before, r=after)
        for kind, (before, after) in zip(kinds, itertools.pairwise(values), strict=True)
    )
    return parser.parse_model(f"{HEAD} {{ h = Add (input, b)  {'  '.join(links)}  {END[end]} }}")


ALONE = [(kind,) for kind in ROUNDINGS]
IN_A_ROW = [*itertools.product(ROUNDINGS, repeat=2), ("static",) * 5]


@pytest.mark.parametrize("kinds", [*ALONE, *IN_A_ROW], ids="-".join)
def test_requested_parameter_before_quantizer_raises_error(kinds):
    for end in END:
        model = rounded(kinds, end)
        with pytest.raises(UnsupportedOpError, match=r"at node .* rounds .*'b' .*--freeze"):
            ke.Engine.from_onnx(model, loss="categorical", trainable=["b", "c"])
        with pytest.raises(UnsupportedOpError, match=r"at node .* rounds .*'b' .*--freeze"):
            ke.differentiate(model, loss="categorical", wrt=["b"])


@pytest.mark.parametrize("end", END)
def test_parameter_before_quantizer_is_excluded_by_default(end):
    model = rounded(("static", "static"), end)
    inputs, targets = models.random_inputs(model), np.arange(3) % 3
    result = ke.precondition(model, inputs, targets, loss="categorical")
    assert list(result.gradients) == ["c"]
    (note,) = result.notes
    assert note.startswith("'b' is not trained: before a quantizer")
    _, truth = oracle.loss_and_gradient(model, inputs, "output", ["c"], "categorical", targets)
    scale = np.abs(truth["c"]).max()
    np.testing.assert_allclose(result.gradients["c"], truth["c"], atol=SINGLE * scale)


@pytest.mark.parametrize("call", [ke.Engine.from_onnx, ke.differentiate])
def test_no_other_parameter_error_names_quantizer(call):
    with pytest.raises(
        ModelError, match=r"'b' is not trained: before a quantizer.*QuantizeLinear_3"
    ):
        call(rounded(("static", "static"), "product"), loss="categorical", freeze="c")


def test_gradient_model_reports_excluded_parameters():
    gradient = ke.differentiate(rounded(("static", "dynamic"), "bias"), loss="categorical")
    assert [entry.name for entry in gradient.graph.output] == ["loss", "gradient/c"]
    assert "'b' is not trained: before a quantizer" in gradient.doc_string


def test_quantizer_off_loss_path_excludes_nothing():
    text = f"{HEAD} {{ h = Add (input, b)  q = QuantizeLinear (h, s, z)  output = Mul (h, c) }}"
    engine = ke.Engine.from_onnx(parser.parse_model(text), loss="categorical")
    assert list(engine.parameters) == ["b", "c"]


BODY = """<ir_version: 10, opset_import: ["": 21]>
    m (float[n,3] input, bool[n] which) => (float[n,3] output)
    <float[3] b = {0.1, 0.2, 0.3}, float[3] c = {0.4, 0.5, 0.6}, float s = {0.02},
     int64 zero = {0}> {
      h = Add (input, b)  one = Gather (which, zero)
      q = If (one) <
        then_branch = t () => (uint8[n,3] u) { u = QuantizeLinear (h, s) },
        else_branch = e () => (uint8[n,3] v) { w = Neg (h)  v = QuantizeLinear (w, s) }
      >
      d = DequantizeLinear (q, s)  output = Mul (d, c)
    }"""


def test_quantizer_in_branch_raises_error():
    model = parser.parse_model(BODY)
    assert list(ke.Engine.from_onnx(model, loss="categorical").parameters) == ["c"]
    with pytest.raises(UnsupportedOpError, match=r"If at node .* rounds .*'b'"):
        ke.Engine.from_onnx(model, loss="categorical", trainable=["b"])


# -- jumps, whose derivative is zero by definition -------------------------------------------------

JUMPS = {
    "Round": "r = Round (h)",
    "Floor": "r = Floor (h)",
    "Sign": "r = Sign (h)",
    "Cast": "k = Cast <to = 7> (h)  r = Cast <to = 1> (k)",
    "ArgMax": "k = ArgMax <axis = 1> (h)  r = Cast <to = 1> (k)",
    "Greater": "k = Greater (h, s)  r = Cast <to = 1> (k)",
}


@pytest.mark.parametrize("op", JUMPS)
def test_parameter_before_zero_derivative_is_excluded_with_note(op):
    text = f"{HEAD} {{ h = Add (input, b)  {JUMPS[op]}  output = Mul (r, c) }}"
    model = parser.parse_model(text)
    inputs = models.random_inputs(model)
    result = ke.precondition(model, inputs, np.zeros(3, int), loss="categorical")
    (note,) = result.notes
    reason = f"without a nonzero gradient, behind an operator with derivative zero ({op} "
    assert note.startswith(f"'b' is not trained: {reason}")
    assert list(result.gradients) == ["c"]


@pytest.mark.parametrize("op", JUMPS)
def test_requested_zero_gradient_has_note(op):
    text = f"{HEAD} {{ h = Add (input, b)  {JUMPS[op]}  output = Mul (r, c) }}"
    model = parser.parse_model(text)
    engine = ke.Engine.from_onnx(model, loss="categorical", trainable="[bc]")
    reasons = {layer.parameters[0]: layer.reason for layer in engine.layers}
    assert f"behind an operator with derivative zero ({op} node" in reasons["b"]
    result = engine.gradients(models.random_inputs(model), np.zeros(3, int))
    assert not result.gradients["b"].any()
    file = ke.differentiate(model, loss="categorical", wrt=["b", "c"])
    for notes_text in ("; ".join(result.notes), file.doc_string):
        assert (
            f"'b' is without a nonzero gradient, behind an operator with derivative zero ({op} node"
            in notes_text
        )


def test_parameter_with_smooth_path_remains_trainable():
    text = f"{HEAD} {{ h = Add (input, b)  k = Floor (h)  r = Sub (h, k)  output = Mul (r, c) }}"
    engine = ke.Engine.from_onnx(parser.parse_model(text), loss="categorical")
    assert list(engine.parameters) == ["b", "c"]


ESTIMATORS = {
    "difference": "d = Sub (r, h)  e = Add (h, d)",
    "other order": "d = Sub (r, h)  e = Add (d, h)",
    "difference subtracted": "d = Sub (h, r)  e = Sub (h, d)",
    "sum": "d = Add (r, h)  e = Sub (d, h)",
    "copied": "d = Sub (r, h)  f = Identity (d)  e = Add (h, f)",
    "scaled": "d = Sub (r, h)  f = Add (h, d)  e = Mul (f, c)",
}


@pytest.mark.parametrize("op", ["Round", "Sign", "Cast"])
@pytest.mark.parametrize("form", ESTIMATORS)
def test_straight_through_estimator_has_note(form, op):
    body = f"h = Add (input, b)  {JUMPS[op]}  {ESTIMATORS[form]}"
    for end in ("output = Mul (e, c)", "o = Mul (e, c)  output = Add (o, b)"):
        model = parser.parse_model(f"{HEAD} {{ {body}  {end} }}")
        engine = ke.Engine.from_onnx(model, loss="categorical")
        result = engine.gradients(models.random_inputs(model), np.zeros(3, int))
        (note,) = result.notes
        assert re.search(rf"straight-through estimator around {op} node '\w+'.*'h' has", note)
        assert note in ke.differentiate(model, loss="categorical").doc_string
    assert "b" in result.gradients


@pytest.mark.parametrize(
    "body",
    [
        "r = Floor (h)  e = Sub (h, r)",
        "r = Tanh (h)  d = Sub (r, h)  e = Add (h, d)",
        "r = Round (c)  d = Sub (r, h)  e = Add (h, d)",
        "r = Round (h)  d = Mul (r, c)  e = Add (h, d)",
    ],
)
def test_sums_with_a_gradient_have_no_note(body):
    text = f"{HEAD} {{ h = Add (input, b)  {body}  output = Mul (e, c) }}"
    gradient = ke.differentiate(parser.parse_model(text), loss="categorical")
    assert "straight-through" not in gradient.doc_string


def test_parameter_not_read_by_loss_has_reason():
    engine = ke.Engine.from_onnx(models.two_outputs(), loss="normal", output="mean")
    reasons = {layer.parameters[0]: layer.reason for layer in engine.layers}
    assert reasons["logits.weight"] == "the loss does not depend on it"


# -- predictions that are nearly certain -----------------------------------------------------------


@pytest.mark.parametrize("gap", [15, 18, 40])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_confident_predictions_keep_natural_gradients(dtype, gap):
    """The gradient sums to zero over the classes, but an error of rounding does not."""
    x = np.random.default_rng(0).integers(-8, 9, (16, 4)) / 4  # exact in all types
    found = {}
    for kind in (dtype, "float64"):
        net = models.Net(kind)
        zero, bias = np.zeros((4, 3), kind), np.array([gap, 0, 0], kind)
        net.op("Gemm", "input", net.constant("W", zero), net.constant("b", bias), to="output")
        engine = ke.Engine.from_onnx(
            net.model({"input": ["batch", 4]}, {"output": ["batch", 3]}),
            loss="categorical",
            estimation_mode="exact",
            damping=ke.RelativeDamping(0.1),
            gradient_dtype="float32",
        )
        found[kind] = engine.step({"input": x.astype(kind)}, np.zeros(16, int))
    narrow, wide = found[dtype], found["float64"]
    assert narrow.loss == pytest.approx(wide.loss, rel=SINGLE)
    for pair in ("gradients", "natural_gradients"):
        ours, truth = getattr(narrow, pair)["W"], getattr(wide, pair)["W"]
        np.testing.assert_allclose(ours, truth, atol=SINGLE * np.abs(truth).max())


# -- graphs drawn at random, beside all their paths ------------------------------------------------

FLOAT = np.dtype("float32")
MADE = {"QuantizeLinear": np.dtype("uint8"), "MatMulInteger": np.dtype("int32")}
# By how many of two operands are whole numbers.
CHOICES = [
    ["Add", "Mul", "QuantizeLinear", "Sign"],
    ["DequantizeLinear"],
    ["MatMulInteger", "Cast"],
]


def random_graph(rng):
    """Eight nodes that read any earlier values: smooth ones, quantizers, jumps, ways back."""
    known, nodes = ["a", "b"], []
    facts = {name: Fact(FLOAT, (2,)) for name in known}
    for k in range(8):
        reads = tuple(rng.choice(known, size=2, replace=False))
        whole = sum(facts[name].dtype != FLOAT for name in reads)
        op = str(rng.choice(CHOICES[whole]))
        facts[f"v{k}"] = Fact(MADE.get(op, FLOAT), (2,))
        nodes.append(Node(op, reads, (f"v{k}",), name=f"n{k}"))
        known.append(f"v{k}")
    return Graph(tuple(nodes), (), (known[-1],), {}, 21), facts


def paths(graph, start, end):
    """All ways from a value to another."""
    if start == end:
        return [[]]
    return [
        [node, *rest]
        for node in graph.nodes
        if start in node.inputs
        for rest in paths(graph, node.outputs[0], end)
    ]


def test_behind_quantizers_equals_path_enumeration():
    rng = np.random.default_rng(0)
    seen = {"behind": 0, "free": 0, "zero": 0}
    for _ in range(300):
        graph, facts = random_graph(rng)
        (end,) = graph.outputs
        for name in "ab":
            smooth = [
                way
                for way in paths(graph, name, end)
                if not any(node.op in ZERO_DERIVATIVE for node in way)
            ]
            rounded_ways = [way for way in smooth if any(n.op in QUANTIZERS for n in way)]
            blocked = behind_quantizers(graph, facts, [end], [name])
            assert bool(blocked) == bool(rounded_ways)
            jumps = behind_jumps(graph, facts, [end], [name])
            if not smooth and paths(graph, name, end):
                assert jumps[name].op == "Sign"
            seen["behind" if rounded_ways else "free" if smooth else "zero"] += 1
    assert min(seen.values()) > 30
