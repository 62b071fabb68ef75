"""The oracle agrees with closed forms: it is the truth of the other tests, so it has its own."""

from math import prod

import numpy as np
import pytest
from onnx import numpy_helper
from scipy.stats import norm

from tests import models, oracle
from tests.models import parsed

LINEAR = 1e-12  # Differences of a linear function lose rounding only.
SMOOTH = 1e-9  # Extrapolation of analytic functions, far better in practice.


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def with_bias(x):
    return np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)


FISHERS = {
    "categorical": lambda z: np.diag(softmax(z)) - np.outer(softmax(z), softmax(z)),
    "multi_bernoulli": lambda z: np.diag(0.25 / np.cosh(z / 2) ** 2),
    "normal": lambda z: 2 * np.eye(len(z)),
}


@pytest.mark.parametrize("loss", FISHERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fisher_of_a_dense_layer_is_the_mean_of_kronecker_products(loss, dtype):
    model = models.linear(4, 3, dtype=dtype)
    inputs = models.random_inputs(model, batch=5)
    a = with_bias(inputs["input"].astype(np.float64))
    z = oracle.evaluate(model, inputs, "output")[0]
    # (in + bias, out) row-major is exactly the order of a weight (in, out) followed by its bias.
    expected = np.mean(
        [np.kron(np.outer(x, x), FISHERS[loss](y)) for x, y in zip(a, z, strict=True)], axis=0
    )
    found = oracle.dense_fisher(model, inputs, "output", ["fc.weight", "fc.bias"], loss)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LINEAR)


@pytest.mark.parametrize(
    ("activation", "function", "slope"),
    [
        ("Tanh", np.tanh, lambda s: 1 / np.cosh(s) ** 2),
        ("Relu", lambda s: np.maximum(s, 0), lambda s: (s > 0).astype(float)),
    ],
    ids=["smooth", "piecewise linear"],
)
def test_jacobian_of_a_two_layer_network_follows_the_chain_rule(activation, function, slope):
    model = models.mlp((4, 5, 3), activation)
    inputs = models.random_inputs(model, batch=4)
    weights = {t.name: numpy_helper.to_array(t).astype(float) for t in model.graph.initializer}
    names = [f"fc{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    x = inputs["input"].astype(float)
    s = x @ weights[names[0]].T + weights[names[1]]
    upper = np.einsum("co,no->nco", weights[names[2]], slope(s))  # d output / d s
    expected = np.concatenate(
        [
            np.einsum("nco,ni->ncoi", upper, x).reshape(4, 3, -1),
            upper,
            np.einsum("cd,no->ncdo", np.eye(3), function(s)).reshape(4, 3, -1),
            np.broadcast_to(np.eye(3), (4, 3, 3)),
        ],
        axis=-1,
    )
    found = oracle.jacobian(model, inputs, "output", names)
    np.testing.assert_allclose(found[:, 0], expected, rtol=0, atol=SMOOTH)


def test_derivative_at_a_kink_fails():
    with pytest.raises(AssertionError, match="no derivative"):
        oracle.derivative(lambda x: np.array([max(x[0], 0) ** 0.5]), np.zeros(1), (0,))


@pytest.mark.parametrize("distance", [3e-1, 1e-2, 1e-4], ids=str)
def test_derivative_near_kink_is_one_sided(distance):
    found = oracle.derivative(lambda x: abs(x) + x**2, np.array([distance]), (0,))
    assert found[0] == pytest.approx(1 + 2 * distance, abs=SMOOTH)


@pytest.mark.parametrize("loss", FISHERS)
def test_empirical_fisher_is_the_mean_outer_product_of_scores(loss):
    model = models.linear(4, 3)
    inputs = models.random_inputs(model, batch=5)
    rng = np.random.default_rng(1)
    z = oracle.evaluate(model, inputs, "output")[0]
    ids = rng.integers(0, 3, 5)
    targets, score = {
        "categorical": (ids, softmax(z) - np.eye(3)[ids]),
        "normal": (np.full((5, 3), 0.2), 2 * (z - 0.2)),
        "multi_bernoulli": (np.eye(3)[ids], (1 + np.tanh(z / 2)) / 2 - np.eye(3)[ids]),
    }[loss]
    g = np.einsum("ni,no->nio", with_bias(inputs["input"].astype(float)), score).reshape(5, -1)
    found = oracle.dense_empirical_fisher(
        model, inputs, "output", ["fc.weight", "fc.bias"], loss, targets
    )
    np.testing.assert_allclose(found, g.T @ g / 5, rtol=0, atol=SMOOTH)


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_loss_and_gradient_follow_the_reduction(reduction):
    model = models.token_mlp()
    inputs = models.random_inputs(model, batch=2)
    bias = model.graph.initializer[-1]
    z = oracle.evaluate(model, inputs, "output")[0]
    positions = prod(z.shape[1:-1])
    targets = np.zeros(z.shape)
    value, gradient = oracle.loss_and_gradient(
        model, inputs, "output", [bias.name], "normal", targets, reduction=reduction
    )
    count = {"mean": 2 * positions, "batch_mean": 2, "sum": 1}[reduction]
    assert value == pytest.approx(-norm.logpdf(targets, z, 0.5**0.5).sum() / count, rel=LINEAR)
    expected = 2 * z.reshape(-1, z.shape[-1]).sum(axis=0) / count
    np.testing.assert_allclose(gradient[bias.name], expected, rtol=SMOOTH)


def test_every_constant_of_a_model_is_widened():
    model = parsed(
        """graph (double[] x) => (double[] y) {
          a = Constant <value_float = 0.1> ()  b = Constant <value = float[1] {0.1}> ()
          c = Constant <value_floats = [0.1]> ()  d = ConstantOfShape (shape)
          e = Cast <to = 1> (shape)  y = Sum (a, b, c, d, e, w, x)
        }""",
        {"shape": [1], "w": np.array([0.1], np.float32)},
    )
    y = oracle.evaluate(model, {"x": np.zeros(1, np.float32)}, "y")[0]
    assert y.dtype == np.float64
    assert y[0] == pytest.approx(1 + 4 * float(np.float32(0.1)), abs=1e-15)


@pytest.mark.parametrize(
    ("strides", "dilations", "begins", "ends"),
    [((1, 1), (1, 1), (0, 0), (0, 0)), ((2, 1), (1, 2), (1, 0), (2, 1))],
    ids=["plain", "strided, dilated, padded"],
)
def test_patches_times_filter_are_the_convolution(strides, dilations, begins, ends):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 6, 5)), rng.standard_normal((4, 3, 2, 3))
    options = f"strides = {[*strides]}, dilations = {[*dilations]}, pads = {[*begins, *ends]}"
    graph = f"graph (double[] x) => (double[] y) {{ y = Conv <{options}> (x, w) }}"
    expected = oracle.evaluate(parsed(graph, {"w": w}), {"x": x}, "y")[0]
    patches = oracle.conv_patches(x, (2, 3), strides, dilations, begins, ends)
    found = patches @ w.transpose(2, 3, 1, 0).reshape(-1, 4)
    np.testing.assert_allclose(
        found.swapaxes(1, 2).reshape(expected.shape), expected, rtol=0, atol=LINEAR
    )
