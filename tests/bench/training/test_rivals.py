"""SOAP beside its formulas on whole vectors of parameters; steps ahead beside a matrix power."""

import numpy as np

import kfac_engine as ke
from kfac_engine.bench.training.models import perceptron
from kfac_engine.bench.training.rivals import Soap, ahead

STEPS = 23  # two updates of the eigenvectors
RATE, DECAY = 0.01, 0.95


def gradients(shape):
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((shape[0], shape[0]))
    return [
        np.tensordot(mixing, rng.standard_normal(shape), 1) + 0.3 * np.ones(shape)
        for _ in range(STEPS + 1)
    ]


def moved(start, steps):
    rule, value = Soap({"w": start}), start
    for G in steps:
        value = value - RATE * rule.directions({"w": G})["w"]
    return value


def dense_soap(start, steps):
    """Adam in the basis ``U ⊗ V``, written with matrices over the whole parameter vector."""
    m, n = start.shape
    left, right = steps[0] @ steps[0].T, steps[0].T @ steps[0]
    U, V = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
    theta, mean, square = start.ravel().copy(), np.zeros(m * n), np.zeros(m * n)
    for t, G in enumerate(steps[1:], start=1):
        basis = np.kron(U, V)
        mean = DECAY * mean + (1 - DECAY) * G.ravel()
        square = DECAY * square + (1 - DECAY) * (basis.T @ G.ravel()) ** 2
        correction = 1 - DECAY**t
        direction = (basis.T @ mean / correction) / (np.sqrt(square / correction) + 1e-8)
        theta = theta - RATE * basis @ direction
        left = DECAY * left + (1 - DECAY) * G @ G.T
        right = DECAY * right + (1 - DECAY) * G.T @ G
        if t % 10 == 0:
            U, V = np.linalg.qr(left @ U)[0], np.linalg.qr(right @ V)[0]
    return theta.reshape(m, n)


def test_soap_equals_adam_in_the_dense_basis_of_the_factors():
    start, steps = np.random.default_rng(0).standard_normal((4, 3)), gradients((4, 3))
    # Gradients are of order one, so that rounding is magnified by no small square.
    np.testing.assert_allclose(moved(start, steps), dense_soap(start, steps), rtol=1e-9)


def test_vectors_are_updated_by_adam():
    start, steps = np.ones(3), gradients((3,))
    value, mean, square = start, 0.0, 0.0
    for t, g in enumerate(steps[1:], start=1):
        mean, square = DECAY * mean + (1 - DECAY) * g, DECAY * square + (1 - DECAY) * g * g
        weight = 1 - DECAY**t
        value = value - RATE * (mean / weight) / (np.sqrt(square / weight) + 1e-8)
    np.testing.assert_allclose(moved(start, steps), value, rtol=1e-12)


def linear():
    """A linear model with two inputs, its data, and the Hessian of its loss."""
    model = perceptron((2, 1), "", 0)
    engine = ke.Engine.from_onnx(model.data, loss="normal", threads=1)
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((20, k)).astype(np.float32) for k in (2, 1))
    rows = np.hstack([x, np.ones((20, 1))]).astype(np.float64)
    return engine, ({"x": x}, y), 2 * rows.T @ rows / 20, 2 * rows.T @ y[:, 0] / 20


def test_steps_ahead_equal_a_power_of_their_matrix():
    """With gradient descent on a quadratic function, (x, m) moves by one matrix."""
    engine, batch, hessian, slope = linear()
    optimizer, distance, decay, scale, rate = ke.SGD(engine, 0.2, 0.0), 0.7, 0.8, 0.5, 0.1
    step = ahead(engine, lambda x, y, s: optimizer.step(x, y, s).loss, distance, decay)

    def vector():
        return np.append(engine.parameters["0.weight"], engine.parameters["0.bias"])

    minimum = np.linalg.solve(hessian, slope)
    first, one = vector() - minimum, np.eye(3)
    lower = one - rate * hessian
    far = distance * scale * lower
    matrix = np.block(
        [[lower, far], [(1 - decay) * (lower - one), decay * one + (1 - decay) * far]]
    )
    for _ in range(12):
        step(*batch, scale)
    expected = np.linalg.matrix_power(matrix, 12) @ np.append(first, np.zeros(3))
    np.testing.assert_allclose(vector() - minimum, expected[:3], rtol=1e-4, atol=1e-6)
    assert not np.allclose(expected[:3], np.linalg.matrix_power(lower, 12) @ first, rtol=1e-2)
