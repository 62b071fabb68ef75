"""Eigenvalues and eigenvectors of second moments whose rank is far below their side."""

import numpy as np
import pytest

from kfac_engine.analysis.fisher_matrix import blocks
from kfac_engine.analysis.fisher_matrix.blocks import eigenbasis
from tests.analysis.fisher_matrix.dense import DOUBLE, measured
from tests.comparing import assert_near
from tests.models import mlp

SIDE, ROWS = 60, 6
WHOLE = (slice(None),)
# Sums of 60 numbers in float64, relative to the largest entry.
ROUNDING = 1e-13


def rows(count=ROWS, seed=0):
    """Vectors whose second moment has eigenvalues of several magnitudes."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((count, SIDE)) * np.logspace(0, -3, count)[:, None]


def moment(x, dtype=np.float64):
    return np.asarray((x.T @ x / len(x)).astype(dtype), np.float64)


@pytest.fixture
def without_eigh(monkeypatch):
    """Refuse dense eigendecompositions of the whole matrix."""
    dense = np.linalg.eigh

    def small(matrix):
        assert len(matrix) < SIDE / 2
        return dense(matrix)

    monkeypatch.setattr(blocks.np.linalg, "eigh", small)


@pytest.mark.rounding
@pytest.mark.usefixtures("without_eigh")
def test_moment_of_few_rows_has_the_eigenvalues_of_its_gram_matrix():
    x = rows()
    values, vectors = eigenbasis(moment(x)[None], WHOLE, ROWS)
    expected = np.zeros(SIDE)
    expected[-ROWS:] = np.linalg.svd(x, compute_uv=False)[::-1] ** 2 / ROWS
    assert_near(values[0], expected, ROUNDING)
    assert np.all(np.diff(values[0]) >= 0)
    assert_near(vectors[0].T @ vectors[0], np.eye(SIDE), ROUNDING)
    assert_near((vectors[0] * values[0]) @ vectors[0].T, moment(x), ROUNDING)


@pytest.mark.rounding
@pytest.mark.usefixtures("without_eigh")
def test_rounding_of_a_moment_adds_no_eigenvalue():
    """With eigh, the rounding errors of float32 yield positive and negative eigenvalues."""
    matrix, epsilon = moment(rows(), np.float32), float(np.finfo(np.float32).eps)
    values, vectors = eigenbasis(matrix[None], WHOLE, ROWS, epsilon)
    assert (values[0] > epsilon * values.max()).sum() == ROWS
    # Rounding errors of the entries, which are dropped, and of sums of 60 of them.
    assert_near((vectors[0] * values[0]) @ vectors[0].T, matrix, 8 * epsilon)


@pytest.mark.rounding
@pytest.mark.usefixtures("without_eigh")
@pytest.mark.parametrize("x", [np.zeros((ROWS, SIDE)), np.eye(ROWS, SIDE)[[0, 0, 1, 1, 2, 2]]])
def test_moment_with_zero_rows_has_an_orthonormal_basis(x):
    values, vectors = eigenbasis(moment(x)[None], WHOLE, ROWS)
    np.testing.assert_allclose(vectors[0].T @ vectors[0], np.eye(SIDE), atol=ROUNDING)
    rebuilt = (vectors[0] * values[0]) @ vectors[0].T
    np.testing.assert_allclose(rebuilt, moment(x), atol=ROUNDING)


@pytest.mark.parametrize("bound", [ROWS, SIDE, None])
def test_wrong_or_large_bounds_of_the_rank_change_nothing(bound):
    matrix = moment(rows(SIDE))
    values, vectors = eigenbasis(matrix[None], WHOLE, bound)
    expected = np.linalg.eigh(matrix)
    np.testing.assert_array_equal(values[0], expected.eigenvalues)
    np.testing.assert_array_equal(vectors[0], expected.eigenvectors)


@pytest.mark.usefixtures("without_eigh")
def test_parts_of_several_groups_are_decomposed_alone():
    matrices = np.stack([moment(rows(seed=seed)) for seed in (1, 2)])
    parts = (slice(0, -1), slice(-1, None))
    values, vectors = eigenbasis(matrices, parts, ROWS)
    rebuilt = (vectors * values[:, None]) @ vectors.swapaxes(1, 2)
    expected = matrices.copy()
    expected[:, -1, :-1] = expected[:, :-1, -1] = 0
    assert_near(rebuilt, expected, ROUNDING)
    np.testing.assert_allclose(values[:, -1], matrices[:, -1, -1])


@pytest.mark.rounding
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("biases", ["joint", "separate"])
def test_curvature_of_few_examples_equals_that_with_dense_decompositions(
    structure, biases, monkeypatch
):
    model = mlp((50, 4, 3), dtype="float64")
    x = np.random.default_rng(0).standard_normal((5, 50))
    data = ({"input": x}, np.arange(5) % 3)
    options = {"structure": structure, "biases": biases, "fisher": "empirical"}
    actual = measured(model, data, **options)
    monkeypatch.setattr(blocks, "_LOW_RANK", 0.0)
    expected = measured(model, data, **options)
    moments = [curvature.input_moment("fc0.weight") for curvature in (actual, expected)]
    assert_near(*moments, 1e-10, DOUBLE)
    assert_near(moments[0], 2 / 5 * x.T @ x, 1e-10)
    vectors = {name: np.sin(np.arange(v.size)).reshape(v.shape)
               for name, v in actual.parameters.items()}  # fmt: skip
    products = [c.multiply(vectors, power=-1, damping=0.01) for c in (actual, expected)]
    for name in vectors:
        assert_near(products[0][name], products[1][name], 1e-10)
