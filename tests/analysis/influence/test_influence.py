"""Influence scores against dense matrices, and against regressions without an example."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import (
    DOUBLE,
    MODELS,
    STRUCTURES,
    dense,
    example,
    measured,
    uneven,
)
from tests.analysis.laplace.linear_regression import linear, regression
from tests.comparing import assert_near

N, Q = 7, 3


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Model, tolerance, and inputs, labels and gradients of training data and queries."""
    model, tolerance, inputs, output, labels = example(MODELS[request.param], N + Q)
    names = list(measured(model, (inputs, None)).model.parameters)
    jacobian = oracle.jacobian(model, inputs, "output", names)
    p = np.exp(output - output.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    score = (p - np.eye(p.shape[-1])[labels]).reshape(*jacobian.shape[:3])
    gradients = np.einsum("ntc,ntcp->np", score, jacobian)
    train = {name: array[:N] for name, array in inputs.items()}
    queries = {name: array[N:] for name, array in inputs.items()}
    return model, tolerance, (train, labels[:N]), (queries, labels[N:]), gradients


@pytest.mark.parametrize(
    ("structure", "scratch_bytes"), [*((name, 256) for name in STRUCTURES), ("kron", 2**20)]
)
def test_scores_equal_those_of_the_dense_matrix(case, structure, scratch_bytes):
    model, tolerance, train, queries, gradients = case
    batches = uneven(*train, sizes=(1, 4))
    options = {"structure": structure, "scratch_bytes": scratch_bytes}
    curvature = measured(model, batches, **options)
    influence = ke.Influence(curvature, damping=0.3)
    P = dense(curvature, power=-1.0, damping=0.3)
    expected = gradients[N:] @ P @ gradients[:N].T
    assert_near(influence.scores(queries, batches), expected, tolerance)
    assert_near(influence.scores(uneven(*queries, sizes=(1,)), train), expected, tolerance)
    selves = np.einsum("np,pq,nq->n", gradients[:N], P, gradients[:N])
    assert_near(influence.self_scores(batches), selves, tolerance)


@pytest.mark.parametrize("biases", ["joint", "separate"])
def test_default_damping_is_a_tenth_of_the_mean_eigenvalue_of_each_block(biases):
    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    labels = np.arange(N) % 3
    curvature = measured(model, (inputs, labels), biases=biases)
    means = {key: values.mean() / 10 for key, values in curvature.eigenvalues().items()}
    damping = {
        name: mean
        for key, mean in means.items()
        for name in ((key,) if isinstance(key, str) else key)
    }
    default = ke.Influence(curvature).scores((inputs, labels), (inputs, labels))
    given = ke.Influence(curvature, damping).scores((inputs, labels), (inputs, labels))
    assert_near(default, given, DOUBLE)


def weighted_loss(x, y, weights, query, target, ridge):
    """The loss of a query for the weights of the examples in the mean loss, in closed form.

    The loss of an example is the squared error, as for ``normal`` up to a constant.
    """
    H = 2 * x.T @ (weights[:, None] * x) + ridge * np.eye(x.shape[1])
    W = np.linalg.solve(H, 2 * x.T @ (weights[:, None] * y))
    return ((target - query @ W) ** 2).sum()


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_score_is_the_derivative_of_a_loss_by_the_weight_of_an_example(ridge):
    x, y = regression(n=12)
    rng = np.random.default_rng(3)
    queries, targets = rng.standard_normal((4, 3)), rng.standard_normal((4, 2))
    equal = np.full(12, 1 / 12)
    H = 2 * x.T @ x / 12 + ridge * np.eye(3)
    model = linear(bias=False)
    (weight,) = model.graph.initializer
    W = np.linalg.solve(H, 2 * x.T @ y / 12)
    weight.CopyFrom(models.onnx.numpy_helper.from_array(W, "w"))
    curvature = measured(model, uneven({"input": x}, y, sizes=(5,)), "normal")
    influence = ke.Influence(curvature, damping=ridge)
    scores = influence.scores(({"input": queries}, targets), ({"input": x}, y))
    step, expected = 1e-6, np.empty((4, 12))
    for q in range(4):
        for i in range(12):
            up, down = equal.copy(), equal.copy()
            up[i] += step
            down[i] -= step
            losses = [weighted_loss(x, y, w, queries[q], targets[q], ridge) for w in (up, down)]
            expected[q, i] = -(losses[0] - losses[1]) / (2 * step)
    # Central differences of float64 with the step 1e-6: rounding 1e-10 and curvature 1e-12.
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-7)


# -- bad input -------------------------------------------------------------------------------------


def test_training_data_that_change_are_refused():
    class Shrinking:
        count = 3

        def __iter__(self):
            self.count -= 1
            return iter([(inputs, labels)] * self.count)

    model = models.mlp((4, 3, 3), dtype="float64")
    inputs = models.random_inputs(model, batch=N)
    labels = np.arange(N) % 3
    influence = ke.Influence(measured(model, (inputs, None), scratch_bytes=64))
    with pytest.raises(ke.InputError, match="training data had 14 examples and then 7"):
        influence.scores((inputs, labels), Shrinking())


def test_singular_block_needs_damping():
    model, (x, y) = linear(bias=False), regression()
    x[:, 0] = 0.0
    curvature = measured(model, ({"input": x}, y), "normal", structure="diagonal")
    with pytest.raises(ke.InputError, match="raise the damping"):
        ke.Influence(curvature, 0.0)
    assert np.isfinite(ke.Influence(curvature).self_scores(({"input": x}, y))).all()
    without = measured(model, ({"input": 0 * x}, y), "normal")
    with pytest.raises(ke.InputError, match="curvature of w is zero on these data; give a damping"):
        ke.Influence(without)
