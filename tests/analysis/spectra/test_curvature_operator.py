"""Operators of whole curvature matrices against dense matrices of the oracle."""

import numpy as np
import pytest
from scipy.sparse.linalg import aslinearoperator, cg, eigsh

import kfac_engine as ke
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import DOUBLE, MODELS, example, uneven
from tests.comparing import assert_arrays_equal, assert_near

N = 6


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    model, tolerance, inputs, _, labels = example(MODELS[request.param], N)
    return model, tolerance, inputs, labels


def operator(model, batches, matrix="ggn", **options):
    options = {"loss": "categorical", "threads": 1, "backend": "numpy"} | options
    return ke.curvature_operator(model, batches, matrix, **options)


@pytest.mark.parametrize("matrix", ["ggn", "fisher"])
def test_products_equal_those_of_the_dense_matrix(case, matrix):
    model, tolerance, inputs, labels = case
    A = operator(model, uneven(inputs, labels, sizes=(1, 3)), matrix)
    F = oracle.dense_fisher(model, inputs, "output", list(A.vector.shapes), "categorical")
    assert A.shape == F.shape
    v = np.random.default_rng(0).standard_normal((len(F), 3))
    assert_near(A @ v, F @ v, tolerance)
    assert_near(A @ v[:, 0], F @ v[:, 0], tolerance)
    assert_near(A.T @ v, F @ v, tolerance)
    assert A.examples == N


def test_scipy_finds_eigenvalues_and_solves_equations(case):
    model, tolerance, inputs, labels = case
    A = operator(model, (inputs, labels))
    F = oracle.dense_fisher(model, inputs, "output", list(A.vector.shapes), "categorical")
    values = eigsh(A, k=3, return_eigenvectors=False)
    np.testing.assert_allclose(
        np.sort(values), np.linalg.eigvalsh(F)[-3:], rtol=100 * tolerance
    )  # a product in float32 has 100 sums
    if tolerance == DOUBLE:
        b = np.ones(len(F))
        damped = A + aslinearoperator(0.1 * np.eye(len(F)))
        x, failed = cg(damped, b, rtol=1e-12)
        assert not failed
        np.testing.assert_allclose(x, np.linalg.solve(F + 0.1 * np.eye(len(F)), b), rtol=1e-8)


def test_vector_converts_parameters():
    model = models.mlp((4, 3, 3), dtype="float64")
    A = operator(model, (models.random_inputs(model), None))
    arrays = dict(A.model.parameters)
    row, _ = A.vector.join(arrays)
    names = tuple(A.vector.shapes)
    types = dict.fromkeys(names, np.dtype(float))
    assert_arrays_equal(arrays, A.vector.split(row, names, types, several=False))


# -- bad input -------------------------------------------------------------------------------------

MODEL = models.mlp((4, 3, 3), dtype="float64")
INPUTS = models.random_inputs(MODEL, batch=N)


def test_changing_data_are_refused():
    class Shrinking:
        count = 3

        def __iter__(self):
            self.count -= 1
            return iter([(INPUTS, None)] * self.count)

    A = operator(MODEL, Shrinking())
    with pytest.raises(ke.InputError, match="12 examples and then 6"):
        A @ (A @ np.ones(A.shape[0]))
