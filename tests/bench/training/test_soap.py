"""SOAP beside its formulas on whole vectors of parameters, in float64."""

import numpy as np

from kfac_engine.bench.training.soap import Soap

STEPS = 23  # two updates of the eigenvectors
RATE = 0.01
DECAY = 0.95


def gradients(shape):
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((shape[0], shape[0]))
    return [
        np.tensordot(mixing, rng.standard_normal(shape), 1) + 0.3 * np.ones(shape)
        for _ in range(STEPS + 1)
    ]


def dense_soap(start, steps):
    """Adam in the basis ``U ⊗ V``, written with matrices over the whole parameter vector."""
    m, n = start.shape
    left = steps[0] @ steps[0].T
    right = steps[0].T @ steps[0]
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
            U = np.linalg.qr(left @ U)[0]
            V = np.linalg.qr(right @ V)[0]
    return theta.reshape(m, n)


def test_soap_equals_adam_in_the_dense_basis_of_the_factors():
    start = np.random.default_rng(0).standard_normal((4, 3))
    steps, soap = gradients((4, 3)), Soap({"w": start})
    for G in steps:
        values = soap.update({"w": G}, RATE)
    # Gradients are of order one, so that rounding is magnified by no small square.
    np.testing.assert_allclose(values["w"], dense_soap(start, steps), rtol=1e-9)


def test_filters_are_matrices_with_a_row_for_each_output():
    start = np.random.default_rng(0).standard_normal((4, 3, 2, 2))
    steps = gradients((4, 3, 2, 2))
    filters, matrix = Soap({"w": start}), Soap({"w": start.reshape(4, 12)})
    for G in steps:
        of_filters = filters.update({"w": G}, RATE)["w"]
        of_matrix = matrix.update({"w": G.reshape(4, 12)}, RATE)["w"]
    np.testing.assert_array_equal(of_filters.reshape(4, 12), of_matrix)
