"""Diagonal factors: every product against the dense diagonal matrix."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.statistics import GradientSquare, KroneckerDiagonal, LayerSquare
from kfac_engine.layers.views import RowView
from tests.curvature.factors.test_dense_factor import observe

ROUNDING = 1e-13  # relative: a few float64 operations
D, N = 4, 6


def kronecker_side():
    return DiagonalFactor(KroneckerDiagonal(("x",), RowView()))


def parameter(config=None):
    return DiagonalFactor(GradientSquare(("g",), (N,)), config=config)


def draw(*shape, seed=0, dtype=np.float64):
    return (np.random.default_rng(seed).normal(size=shape) + 0.5).astype(dtype)


def constant(damping):
    return lambda: damping


@pytest.mark.parametrize("exp", [1, -1, -0.5, 0.5, 2])
def test_powers_of_a_line_are_those_of_its_diagonal_matrix(exp):
    factor, func = observe(kronecker_side(), {"x": draw(N, D)}), constant(0.3)
    dense = np.diag((draw(N, D) ** 2).mean(axis=0))
    np.testing.assert_allclose(factor.get_cov(), dense, rtol=ROUNDING)
    power = np.diag((np.diag(dense) + 0.3) ** exp)
    V = draw(D, 3, seed=1)
    left = factor.left_multiply_matpower(V, exp, func)
    right = factor.right_multiply_matpower(V.T, exp, func)
    np.testing.assert_allclose(left, power @ V, rtol=ROUNDING)
    np.testing.assert_allclose(right, V.T @ power, rtol=ROUNDING)
    assert factor.trace() == pytest.approx(np.trace(dense), rel=ROUNDING)
    assert factor.side == D


@pytest.mark.parametrize("exp", [1, -1, -0.5])
@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (6,)])
def test_a_diagonal_of_any_shape_multiplies_the_same_entries_in_any_shape(exp, shape):
    g, v = draw(2, 3), draw(2, 3, seed=1)
    factor = observe(parameter(), {"g": g})
    found = factor.left_multiply_matpower(v.reshape(shape), exp, constant(0.3))
    np.testing.assert_allclose(found, ((g**2 / N + 0.3) ** exp * v).reshape(shape), rtol=ROUNDING)
    np.testing.assert_allclose(factor.get_cov(), np.diag((g**2 / N).ravel()), rtol=ROUNDING)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("inverse", "exp"), [(False, 0.5), (True, -0.5)])
def test_the_root_of_a_diagonal_is_its_square_root(transpose, inverse, exp):
    factor, func = observe(kronecker_side(), {"x": draw(N, D)}), constant(0.3)
    power = np.diag((np.diag(factor.get_cov()) + 0.3) ** exp)
    V, options = draw(D, D, seed=1), {"transpose": transpose, "inverse": inverse}
    left = factor.left_multiply_cholesky(V, func, **options)
    right = factor.right_multiply_cholesky(V, func, **options)
    np.testing.assert_allclose(left, power @ V, rtol=ROUNDING)
    np.testing.assert_allclose(right, V @ power, rtol=ROUNDING)


def test_a_classical_average_may_start_at_one():
    config = ke.CollectionConfig(debias=False, initial_covariance="identity")
    factor = observe(parameter(config), {"g": draw(2, 3)}, decay=0.8)
    np.testing.assert_allclose(factor.cov, 0.8 + 0.2 * draw(2, 3) ** 2 / N, rtol=ROUNDING)


@pytest.mark.parametrize("exp", [-1, -0.5])
def test_the_inverse_of_a_zero_without_damping_is_refused(exp):
    factor = observe(parameter(), {"g": np.zeros((2, 3))})
    with pytest.raises(ke.InputError, match="positive damping"):
        factor.left_multiply_matpower(np.ones((2, 3)), exp, constant(0.0))
    line = observe(kronecker_side(), {"x": np.zeros((N, D))})
    with pytest.raises(ke.InputError, match="positive damping"):
        line.right_multiply_matpower(np.ones((2, D)), exp, constant(0.0))


def test_operands_of_another_size_are_refused():
    factor, func = observe(kronecker_side(), {"x": draw(N, D)}), constant(0.1)
    with pytest.raises(ke.ShapeError, match="from the left"):
        factor.left_multiply_matpower(np.ones((D + 1, 2)), 1, func)
    with pytest.raises(ke.ShapeError, match="from the right"):
        factor.right_multiply_matpower(np.ones((D, D + 1)), 1, func)


def layer():
    return DiagonalFactor(LayerSquare(("x",), ("ds",), RowView(), RowView(), False))


def test_products_whose_squares_overflow_single_precision_make_the_average_double():
    values = {"x": np.full((N, 2), 1e12, np.float32), "ds": np.full((N, 3), 1e12, np.float32)}
    factor = observe(layer(), {name: array * 1e-12 for name, array in values.items()})
    assert factor.cov.dtype == np.float32
    observe(factor, values, decay=1.0)
    assert factor.cov.dtype == np.float64
    np.testing.assert_allclose(factor.cov, np.full((2, 3), 0.5e48), rtol=1e-6)  # float32 data


def test_products_whose_squares_overflow_double_precision_are_refused():
    values = {"x": np.full((N, 2), 1e100), "ds": np.full((N, 3), 1e100)}
    factor = observe(layer(), {name: array * 1e-100 for name, array in values.items()})
    before = factor.cov
    with pytest.raises(ke.NonFiniteError, match="products of 'x' and 'ds'"):
        observe(factor, values)
    np.testing.assert_array_equal(factor.cov, before)
