"""Adam's first steps on few numbers without a weight: five times the rate of vectors."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.models import parsed

SCALED = "h = MatMul (x, w) s = Mul (h, t) y = Add (s, c)"
ROWS = {
    # A temperature and an offset of the logits have no layer with a weight.
    "one": (SCALED, 2, {"t": (), "c": (1,)}, {"t": 0.02, "c": 0.02}),
    "thresholds": ("h = MatMul (x, w) d = Sub (h, c) y = Tanh (d)", 1, {"c": (8,)}, {"c": 0.02}),
    # Vectors of features, and the bias of a layer with one output, are not few numbers.
    "features": (SCALED, 9, {"t": (9,), "c": (9,)}, {"t": 0.004, "c": 0.004}),
    "bias": ("h = MatMul (x, w) y = Add (h, c)", 1, {"c": (1,)}, {"c": 0.004}),
}


@pytest.mark.parametrize("row", ROWS)
def test_few_numbers_without_a_weight_move_five_times_as_far(row):
    body, features, shapes, rates = ROWS[row]
    rng = np.random.default_rng(5)
    values = {name: 0.5 + rng.random(shape) for name, shape in shapes.items()}
    values["w"] = rng.standard_normal((3, features))
    outputs = max(features, *(np.prod(shape, dtype=int) for shape in shapes.values()))
    file = parsed(f"net (double[n,3] x) => (double[n,{outputs}] y) {{ {body} }}", values)
    engine = ke.Engine.from_onnx(file, loss="bce", trainable=[*values])
    batch = {"x": rng.standard_normal((8, 3))}, np.arange(8 * outputs).reshape(8, -1) % 2
    gradients = engine.gradients(*batch).gradients
    ke.KfacOptimizer(engine, weight_decay=0).step(*batch)
    for name, rate in rates.items():
        moves = (values[name] - engine.parameters[name]) / np.sign(gradients[name])
        np.testing.assert_allclose(moves, rate, rtol=1e-4)


def test_a_variance_near_zero_remains_positive():
    """The mean of ``d² / v + log v`` is least where v is the variance of the errors d, 0.01."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 1)).astype(np.float32)
    y = (np.sin(2 * x) + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    nodes = """h = MatMul (x, w) a = Add (h, b) t = Tanh (a) m = MatMul (t, u) d = Sub (y, m)
        s = Mul (d, d) q = Div (s, v) l = Log (v) e = Add (q, l)
        one = Constant <value_ints = [1]> () each = Squeeze (e, one)"""
    weights = {"w": rng.normal(size=(1, 32)), "b": rng.normal(size=32), "u": np.zeros((32, 1))}
    values = {n: a.astype(np.float32) for n, a in weights.items()} | {"v": np.float32([0.5])}
    file = parsed(f"net (float[n,1] x, float[n,1] y) => (float[n] each) {{ {nodes} }}", values)
    engine = ke.Engine.from_onnx(file, loss="output", trainable=[*values], threads=1)
    optimizer = ke.KfacOptimizer(engine)
    for _ in range(300):
        rows = rng.integers(0, 2000, 64)
        optimizer.step({"x": x[rows], "y": y[rows]})
    assert 0.005 < engine.parameters["v"].item() < 0.04
