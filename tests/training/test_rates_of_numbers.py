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
