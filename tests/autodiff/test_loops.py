"""Loops, scans and branches have the derivatives of what they compute."""

from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import checker, parser
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from kfac_engine.errors import BackendError, ModelError, UnsupportedOpError
from kfac_engine.sessions import session

# Float32 products of a few steps.
CLOSE = 1e-5
STEP = 1e-5

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 3)).round(3)
B = RNG.normal(size=3).round(3)


def written(array):
    return "{" + ", ".join(str(float(value)) for value in array.ravel()) + "}"


HEAD = '<ir_version: 10, opset_import: ["": 18]> m'
# Weights of the models below.
WEIGHTS = f"float[3,3] w = {written(W)}, float[3] b = {written(B)}"

# lax.scan as it is exported: the sequence goes along unchanged, and is read by number.
RECURRENCE = f"""{HEAD} (float[s,n,3] x) => (float[n,3] y)
  <{WEIGHTS}, float[1,3] h = {{0, 0, 0}}, int64 m = {{4}}, bool on = {{1}}> {{
    y, same = Loop (m, on, h, x) <body = step (int64 i, bool c, float[n,3] h_in, float[s,n,3] x_in)
      => (bool c_out, float[n,3] h_out, float[s,n,3] x_out) {{
        c_out = Identity (c)
        x_out = Identity (x_in)
        x_i = Gather <axis = 0> (x_in, i)
        r = MatMul (h_in, w)
        a = Add (r, x_i)
        z = Add (a, b)
        h_out = Tanh (z)
      }}>
  }}"""


def recurrence(x, w, b):
    h = np.zeros(3)
    for row in x[:4]:
        h = np.tanh(h @ w + row + b)
    return h


# while v < 3: v += 1, one iteration early; collects what it makes.
COUNTER = f"""{HEAD} (float[n,3] x) => (float[k,n,3] y)
  <{WEIGHTS}, int64 v0 = {{0}}, int64 one = {{1}}, int64 three = {{3}}> {{
    last, v, y = Loop (, , x, v0) <body = step (int64 i, bool c, float[n,3] h, int64 v_in)
      => (bool c_out, float[n,3] h_out, int64 v_out, float[n,3] seen) {{
        v_out = Add (v_in, one)
        c_out = Less (v_out, three)
        r = MatMul (h, w)
        h_out = Sigmoid (r)
        seen = Mul (h_out, b)
      }}>
  }}"""


def counter(x, w, b):
    seen = []
    for _ in range(3):
        x = 1 / (1 + np.exp(-x @ w))
        seen.append(x * b)
    return np.stack(seen)


# As many iterations as x has columns; the weight of the body lies inside it.
SIZED = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <float[3] b = {written(B)}, int64 at = {{1}},
    bool on = {{1}}> {{
    shape = Shape (x)
    columns = Gather (shape, at)
    y = Loop (columns, on, x) <body = step (int64 i, bool c, float[n,3] h)
      => (bool c_out, float[n,3] h_out) <float[3,3] w = {written(W)}> {{
        c_out = Identity (c)
        r = MatMul (h, w)
        t = Tanh (r)
        h_out = Add (t, b)
      }}>
  }}"""


def sized(x, w, b):
    for _ in range(3):
        x = np.tanh(x @ w) + b
    return x


# A scan from behind along axis 1, its outputs from behind as well, with a branch on a size inside.
SCAN = f"""{HEAD} (float[n,5,3] x) => (float[n,3] last, float[n,5,3] y)
  <{WEIGHTS}, int64 axis = {{1}}, int64 three = {{3}}> {{
    first = Gather <axis = 1> (x, axis)
    h = Sub (first, first)
    last, y = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
        scan_output_axes = [-2], scan_output_directions = [1],
        body = step (float[n,3] h_in, float[n,3] row) => (float[n,3] h_out, float[n,3] seen) {{
          shape = Shape (row)
          width = Gather (shape, axis)
          wide = Equal (width, three)
          r = If (wide) <
            then_branch = yes () => (float[n,3] p) {{ p = MatMul (h_in, w) }},
            else_branch = no () => (float[n,3] q) {{ q = Identity (h_in) }}
          >
          a = Add (r, row)
          h_out = Tanh (a)
          seen = Mul (h_out, b)
        }}> (h, x)
  }}"""


def scan(x, w, b):
    h, seen = np.zeros((len(x), 3)), np.zeros(x.shape)
    for t in reversed(range(5)):
        h = np.tanh(h @ w + x[:, t])
        seen[:, t] = h * b
    return seen


# A loop in a loop, which reads a value of the outer one, and a sum over both counters.
NESTED = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, int64 two = {{2}},
    int64 three = {{3}}, bool on = {{1}}> {{
    y = Loop (two, on, x) <body = outer (int64 i, bool c, float[n,3] h)
      => (bool c_out, float[n,3] h_out) {{
        c_out = Identity (c)
        scaled = Mul (h, b)
        h_out = Loop (three, c, h) <body = inner (int64 j, bool d, float[n,3] g)
          => (bool d_out, float[n,3] g_out) {{
            d_out = Identity (d)
            k = Add (i, j)
            f = CastLike (k, g)
            r = MatMul (g, w)
            s = Add (r, scaled)
            t = Add (s, f)
            g_out = Tanh (t)
          }}>
      }}>
  }}"""


def nested(x, w, b):
    for i in range(2):
        scaled = x * b
        for j in range(3):
            x = np.tanh(x @ w + scaled + i + j)
    return x


# A branch on a size, as exporters write squeeze; it reads weights of the graph.
BRANCH = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, int64 at = {{1}},
    int64 one = {{1}}> {{
    shape = Shape (x)
    width = Gather (shape, at)
    narrow = Equal (width, one)
    y = If (narrow) <
      then_branch = yes () => (float[n,3] p) {{ p = Mul (x, b) }},
      else_branch = no () => (float[n,3] q) {{ r = MatMul (x, w)  q = Sin (r) }}
    >
  }}"""


def branch(x, w, b):
    return np.sin(x @ w)


# No iteration at all: what goes in comes out.
IDLE = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, int64 m = {{0}}, bool on = {{1}}> {{
    z = MatMul (x, w)
    y = Loop (m, on, z) <body = step (int64 i, bool c, float[n,3] h)
      => (bool c_out, float[n,3] h_out) {{ c_out = Identity (c)  h_out = Tanh (h) }}>
  }}"""


def idle(x, w, b):
    return x @ w


# A branch on data that no derivative goes through stays, once in each iteration.
STAYING = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, int64 m = {{3}}, bool on = {{1}},
    float half = {{0.5}}> {{
    y = Loop (m, on, x) <body = step (int64 i, bool c, float[n,3] h)
      => (bool c_out, float[n,3] h_out) {{
        c_out = Identity (c)
        top = ReduceMax <keepdims = 0> (x)
        large = Greater (top, half)
        s = If (large) <
          then_branch = yes () => (float p) {{ q = Cast <to = 1> (i)  p = Add (q, half) }},
          else_branch = no () => (float r) {{ r = Identity (half) }}
        >
        k = MatMul (h, w)
        h_out = Mul (k, s)
      }}>
  }}"""


def staying(x, w, b):
    h = x
    for i in range(3):
        h = h @ w * (i + 0.5 if x.max() > 0.5 else 0.5)
    return h


Function = Callable[[NDArray, NDArray, NDArray], NDArray]
# Model, its formula, the shape of x for a batch of n, and the weights by their name in the graph.
CASES: Mapping[str, tuple[str, Function, tuple[object, ...], Mapping[str, str]]] = {
    "scan-as-loop": (RECURRENCE, recurrence, (4, "n", 3), {"w": "w", "b": "b"}),
    "while-a-counter": (COUNTER, counter, ("n", 3), {"w": "w", "b": "b"}),
    "times-a-size": (SIZED, sized, ("n", 3), {"w": "w", "b": "b"}),
    "scan": (SCAN, scan, ("n", 5, 3), {"w": "w", "b": "b"}),
    "loop-in-loop": (NESTED, nested, ("n", 3), {"w": "w", "b": "b"}),
    "no-iteration": (IDLE, idle, ("n", 3), {"w": "w"}),
    "branch-stays": (STAYING, staying, ("n", 3), {"w": "w"}),
    "branch-on-a-size": (BRANCH, branch, ("n", 3), {"w": "w", "b": "b"}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_closed_formula(name):
    text, formula, sides, weights = CASES[name]
    source = parser.parse_model(text)
    sample = {"x": np.ones([2 if side == "n" else side for side in sides], np.float32)}
    model = ke.load_model(source, sample_inputs=sample)
    assert set(model.parameters) == set(weights.values())
    loop_weights = {"w": W.astype("f").astype(float), "b": B.astype("f").astype(float)}
    for n in (2, 5):
        rng = np.random.default_rng(n)
        x = rng.normal(size=[n if side == "n" else side for side in sides]).astype(np.float32)
        values = {"x": x.astype(float), **loop_weights}
        trace = model.run({"x": x})
        truth = formula(**values)
        np.testing.assert_allclose(trace["y"], truth, rtol=CLOSE, atol=CLOSE)
        g = rng.normal(size=truth.shape).astype(np.float32)
        gradients = trace.vjp({"y": g}, ["x", *weights.values()])
        for key, value in {"x": "x", **weights}.items():
            along = rng.normal(size=values[key].shape)
            up, down = (
                (formula(**{**values, key: values[key] + step * along}) * g).sum()
                for step in (STEP, -STEP)
            )
            found = float((gradients[value] * along).sum())
            scale = float(np.abs(gradients[value] * along).sum()) + 1
            assert abs(found - (up - down) / (2 * STEP)) < CLOSE * scale, value


@pytest.mark.parametrize("name", CASES)
def test_gradient_models_are_valid_and_equal_in_reference_runtime(name):
    text, formula, sides, weights = CASES[name]
    weight = weights["w"]
    shape = [2 if side == "n" else side for side in sides]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    source = parser.parse_model(text)
    gradient = ke.differentiate(source, output="y", wrt=[weight], sample_inputs={"x": x})
    checker.check_model(gradient, full_check=True)
    g = np.ones(formula(x, W, B).shape, np.float32)
    feeds = {"x": x, "cotangent": g}
    found = ort.InferenceSession(gradient.SerializeToString()).run([f"gradient/{weight}"], feeds)[0]
    other = ReferenceEvaluator(gradient).run([f"gradient/{weight}"], feeds)[0]
    np.testing.assert_allclose(found, other, rtol=CLOSE, atol=CLOSE)


# As many steps as the batch has.
OPEN = RECURRENCE.replace(", int64 m = {4}", ", int64 zero = {0}").replace(
    "y, same =", "shape = Shape (x)  m = Gather (shape, zero)  y, same ="
)


def test_other_iteration_count_error_names_unrolled_count():
    x = np.ones((4, 2, 3), np.float32)
    model = ke.load_model(parser.parse_model(OPEN), sample_inputs={"x": x})
    assert model.run({"x": x})["y"].shape == (2, 3)
    with pytest.raises(BackendError, match=r"Loop was unrolled for m = 4, as in the sample"):
        _ = model.run({"x": x[:3]})["y"]


# As many steps as the batch has entries that are not zero.
COUNTED = f"""{HEAD} (float[n,3] x) => (float[n,3] y)
  <{WEIGHTS}, int64 second = {{1}}, bool on = {{1}}> {{
    places = NonZero (x)  shape = Shape (places)  count = Gather (shape, second)
    y = Loop (count, on, x) <body = step (int64 i, bool c, float[n,3] h)
      => (bool c_out, float[n,3] h_out) {{
        c_out = Identity (c)
        r = MatMul (h, w)
        h_out = Tanh (r)
      }}>
  }}"""


def test_error_on_a_count_of_the_data_does_not_ask_for_a_dynamic_axis():
    x = np.ones((2, 3), np.float32)
    engine = ke.Engine.from_onnx(
        parser.parse_model(COUNTED), loss="normal", trainable="w", sample_inputs={"x": x}
    )
    assert engine.loss({"x": x}, x) > 0
    with pytest.raises(ke.ShapeError, match=r"count = 6.* the batch decides the number of") as e:
        engine.loss({"x": np.ones((3, 3), np.float32)}, np.ones((3, 3)))
    assert "dynamic" not in str(e.value)


DATA_LOOP = COUNTER.replace(
    "c_out = Less (v_out, three)", "top = ReduceMax <keepdims = 0> (h)  c_out = Less (top, half)"
).replace("int64 three = {3}", "int64 three = {3}, float half = {0.5}")
DATA_BRANCH = BRANCH.replace("narrow = Equal (width, one)", "t = ReduceMax <keepdims = 0> (x) "
                             " narrow = Greater (t, half)").replace(
    "int64 one = {1}", "int64 one = {1}, float half = {0.5}"
)  # fmt: skip
REFUSED = {
    "condition": (DATA_LOOP, "'Loop_0': its number of iterations is not fixed, as 'x"),
    "count": (
        SIZED.replace("columns = Gather (shape, at)", "top = ReduceMax <keepdims = 0> (x) "
                      " columns = Cast <to = 7> (top)"),
        "'Loop_3': .* 'columns' depends on the data, through 'x'",
    ),
    "limit": (RECURRENCE.replace("m = {4}", "m = {5000}"), "runs more than 1024 times"),
    "branch": (DATA_BRANCH, "If at node 'If_4': its branch .* 'narrow' depends on the data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_dependent_control_flow_error_names_value(name):
    text, words = REFUSED[name]
    sample = {"x": np.full((4, 2, 3) if name == "limit" else (2, 3), 0.2, np.float32)}
    if name == "limit":  # a sequence that is long enough to run
        sample = {"x": np.zeros((5000, 1, 3), np.float32)}
    with pytest.raises(UnsupportedOpError, match=words):
        ke.differentiate(parser.parse_model(text), output="y", wrt=["x"], sample_inputs=sample)


def test_loop_off_gradient_path_is_not_unrolled():
    text = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, bool on = {{1}},
        int64 m = {{9000}}, float zero = {{0}}> {{
        k = Loop (m, on, zero) <body = step (int64 i, bool c, float a)
          => (bool c_out, float a_out) {{
            c_out = Identity (c)  a_out = Add (a, a)
        }}>
        r = MatMul (x, w)  y = Add (r, k)
      }}"""
    graph = ke.load_model(parser.parse_model(text), trainable=["w"]).graph
    assert [node.op for node in graph.nodes] == ["Loop", "MatMul", "Add"]


def test_endless_loop_raises_error_after_time_limit(monkeypatch):
    monkeypatch.setattr(session, "MOST_SECONDS", 0.5)
    endless = f"""{HEAD} (float[n,3] x) => (float[n,3] y) <{WEIGHTS}, bool on = {{1}}> {{
      y = Loop (, on, x) <body = step (int64 i, bool c, float[n,3] h)
        => (bool more, float[n,3] k) {{
        a = MatMul (h, w)
        k = Tanh (a)
        top = ReduceMax <keepdims = 0> (k)
        two = Constant <value_float = 2.0> ()
        more = Less (top, two)
      }}>
    }}"""
    with pytest.raises(ModelError, match=r"did not end within 0\.5 s"):
        ke.load_model(parser.parse_model(endless))
