"""Sequences and optional values have the derivatives of the tensors in them."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import checker, parser

import kfac_engine as ke
from kfac_engine.errors import BackendError, UnsupportedOpError
from tests.autodiff.test_loops import HEAD, WEIGHTS, B, W

CLOSE = 1e-5  # float32 products of a few steps
STEP = 1e-5

CONSTRUCTED = f"""{HEAD} (float[n,3] x) => (float[n,3] y)
  <{WEIGHTS}, int64 zero = {{0}}, int64 last = {{-1}}, int64 one = {{1}}> {{
    a = MatMul (x, w)
    c = Tanh (a)
    empty = SequenceEmpty ()
    s0 = SequenceInsert (empty, x)
    s1 = SequenceInsert (s0, a, zero)
    s2 = SequenceInsert (s1, c, last)
    s3 = SequenceErase (s2, zero)
    p = SequenceAt (s3, last)
    q = SequenceAt (s2, one)
    r = Mul (p, q)
    y = Add (r, b)
  }}"""


def constructed(x, w, b):
    # s2 holds a, c, x; s3 holds c, x
    return x * np.tanh(x @ w) + b


JOINED = f"""{HEAD} (float[n,3] x) => (float[2,n,6] y) <{WEIGHTS}> {{
    a = MatMul (x, w)
    c = Mul (a, b)
    s = SequenceConstruct (a, c)
    d = ConcatFromSequence <axis = -1> (s)
    e = Sin (d)
    t = SequenceConstruct (d, e)
    y = ConcatFromSequence <axis = 0, new_axis = 1> (t)
  }}"""


def joined(x, w, b):
    d = np.concatenate([x @ w, x @ w * b], axis=-1)
    return np.stack([d, np.sin(d)])


SPLIT = f"""{HEAD} (float[n,3] x) => (float[n] y)
  <{WEIGHTS}, int64[1] axes = {{1}}, int64 two = {{2}}, int64[2] sizes = {{1, 2}},
    int64 zero = {{0}}, int64 one = {{1}}> {{
    z = MatMul (x, w)
    s = SplitToSequence <axis = 1> (z, two)
    p = SequenceAt (s, one)
    t = SplitToSequence <axis = -1> (z, sizes)
    q = SequenceAt (t, one)
    u = SplitToSequence <axis = 1, keepdims = 0> (z)
    r = SequenceAt (u, zero)
    m = Mul (p, q)
    k = ReduceSum <keepdims = 0> (m, axes)
    y = Mul (k, r)
  }}"""


def split(x, w, b):
    z = x @ w
    return (z[:, 2:] * z[:, 1:]).sum(1) * z[:, 0]


# A list that a loop fills, as scripts of PyTorch do it; as many entries as x has columns.
LISTED = f"""{HEAD} (float[n,3] x) => (float[n,9] y)
  <{WEIGHTS}, int64 at = {{1}}, bool on = {{1}}> {{
    shape = Shape (x)
    columns = Gather (shape, at)
    none = SequenceEmpty ()
    h, full = Loop (columns, on, x, none) <body = step
        (int64 i, bool c, float[n,3] h_in, seq(float) so_far)
      => (bool c_out, float[n,3] h_out, seq(float) longer) {{
        c_out = Identity (c)
        r = MatMul (h_in, w)
        h_out = Tanh (r)
        longer = SequenceInsert (so_far, h_out)
      }}>
    y = ConcatFromSequence <axis = 1> (full)
  }}"""


def listed(x, w, b):
    seen = []
    for _ in range(3):
        x = np.tanh(x @ w)
        seen.append(x)
    return np.concatenate(seen, axis=1)


MAPPED = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, int64 one = {{1}}> {{
    c = Neg (x)
    s = SequenceConstruct (x, c)
    t = SequenceMap <body = each (float[n,3] a, float[3,3] v) => (float[n,3] o)
      {{ m = MatMul (a, v)  o = Exp (m) }}> (s, w)
    p = SequenceAt (t, one)
    y = Mul (p, b)
  }}"""


def mapped(x, w, b):
    return np.exp(-x @ w) * b


OPTIONAL = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, int64 zero = {{0}}> {{
    z = MatMul (x, w)
    o = Optional (z)
    k = OptionalGetElement (o)
    s = SequenceConstruct (k)
    os = Optional (s)
    t = OptionalGetElement (os)
    v = SequenceAt (t, zero)
    y = Add (v, b)
  }}"""


def optional(x, w, b):
    return x @ w + b


Function = Callable[[NDArray, NDArray, NDArray], NDArray]
CASES: Mapping[str, tuple[str, Function]] = {
    "constructed": (CONSTRUCTED, constructed),
    "joined": (JOINED, joined),
    "split": (SPLIT, split),
    "filled-by-a-loop": (LISTED, listed),
    "mapped": (MAPPED, mapped),
    "optional": (OPTIONAL, optional),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_closed_formula(name):
    text, formula = CASES[name]
    model = ke.load_model(parser.parse_model(text), trainable=["w", "b"])
    weights = {"w": W.astype("f").astype(float), "b": B.astype("f").astype(float)}
    assert not {node.op for node in model.graph.nodes if "equence" in node.op}
    for n in (2, 5):
        rng = np.random.default_rng(n)
        x = rng.normal(size=(n, 3)).astype(np.float32)
        values = {"x": x.astype(float), **weights}
        trace = model.run({"x": x})
        truth = formula(**values)
        np.testing.assert_allclose(trace["y"], truth, rtol=CLOSE, atol=CLOSE)
        g = rng.normal(size=truth.shape).astype(np.float32)
        gradients = trace.vjp({"y": g}, ["x", "w", "b"])
        for key, value in values.items():
            along = rng.normal(size=value.shape)
            up, down = (
                (formula(**{**values, key: value + step * along}) * g).sum()
                for step in (STEP, -STEP)
            )
            scale = float(np.abs(gradients[key] * along).sum()) + 1
            found = float((gradients[key] * along).sum())
            assert abs(found - (up - down) / (2 * STEP)) < CLOSE * scale, key


@pytest.mark.parametrize("name", CASES)
def test_gradient_models_are_valid(name):
    checker.check_model(
        ke.differentiate(parser.parse_model(CASES[name][0]), wrt=["w"]), full_check=True
    )


def test_sequence_of_other_length_raises_error():
    text = LISTED.replace("float[n,3] x", "float[n,3] x, float[k] like").replace(
        "Shape (x)", "Shape (like)").replace("int64 at = {1}", "int64 at = {0}")  # fmt: skip
    feeds = {"x": np.ones((2, 3), np.float32), "like": np.ones(3, np.float32)}
    model = ke.load_model(parser.parse_model(text), trainable=["w"], sample_inputs=feeds)
    assert model.run(feeds)["y"].shape == (2, 9)
    with pytest.raises(BackendError, match=r"Loop was unrolled for columns = 3, as in the sample"):
        _ = model.run({**feeds, "like": np.ones(4, np.float32)})["y"]


REFUSED = {
    "position": (
        CONSTRUCTED.replace("p = SequenceAt (s3, last)", "top = ReduceMax <keepdims = 0> (x)"
                            "  k = Cast <to = 7> (top)  p = SequenceAt (s3, k)"),
        "its position 'k' depends on the data",
    ),
    "maker": (
        CONSTRUCTED.replace("p = SequenceAt (s3, last)", "top = ReduceMax <keepdims = 0> (x)"
          "  k = Cast <to = 9> (top)  s4 = If (k) <then_branch = yes () => (seq(float) t)"
          " { t = Identity (s3) }, else_branch = no () => (seq(float) e) { e = Identity (s2) }>"
          "  p = SequenceAt (s4, last)"),
        "its sequence is the result of If node 'If_9', whose tensors are unknown",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_dependent_control_flow_error_names_value(name):
    text, words = REFUSED[name]
    with pytest.raises(UnsupportedOpError, match=words):
        ke.differentiate(parser.parse_model(text), wrt=["w"])
