"""Inverses and factors, checked by multiplying back and by spectra that are known exactly."""

import logging
from functools import partial

import numpy as np
import pytest

from kfac_engine.backend.cpu import inverse
from kfac_engine.backend.cpu.inverse import damping_floor, eigh_stack
from kfac_engine.backend.threads import Workers
from kfac_engine.errors import InputError, NonFiniteError, ShapeError

WORKERS = Workers()
damped_inverse, damped_cholesky, triangular_inverse, eigh = (
    partial(operation, workers=WORKERS)
    for operation in (
        inverse.damped_inverse,
        inverse.damped_cholesky,
        inverse.triangular_inverse,
        inverse.eigh,
    )
)

# Error of one rounding to the dtype of the result, times a small factor for sums of entries.
ROUNDING = {np.float32: 1e-6, np.float64: 1e-13}
SIDES = [1, 2, 7, 64, 257]


def with_spectrum(eigenvalues, seed=0):
    """A symmetric float64 matrix with these eigenvalues, and its eigenvectors."""
    side = len(eigenvalues)
    Q = np.linalg.qr(np.random.default_rng(seed).standard_normal((side, side)))[0]
    matrix = (Q * eigenvalues) @ Q.T
    return (matrix + matrix.T) / 2, Q


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
def test_inverse_equals_known_spectrum(side, dtype):
    eigenvalues = np.linspace(1, 3, side)
    matrix, Q = with_spectrum(eigenvalues)
    found = damped_inverse(matrix.astype(dtype), 0.5)
    assert found.dtype == dtype
    assert found.flags.c_contiguous
    assert relative_error(found, (Q / (eigenvalues + 0.5)) @ Q.T) < ROUNDING[dtype]
    np.testing.assert_array_equal(found, found.T)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
def test_inverse_times_damped_matrix_is_identity(side, dtype):
    matrix = with_spectrum(np.geomspace(1e-2, 1, side))[0].astype(dtype)
    v = np.random.default_rng(1).standard_normal(side)
    found = damped_inverse(matrix, 0.01).astype(np.float64)
    image = matrix.astype(np.float64) @ v + 0.01 * v
    # The condition is at most 100.
    np.testing.assert_allclose(found @ image, v, atol=100 * ROUNDING[dtype])


@pytest.mark.rounding
@pytest.mark.parametrize("decades", [2, 4, 6])
def test_float32_inverse_has_float64_accuracy(decades):
    matrix = with_spectrum(np.geomspace(1.0, 10.0**-decades, 60))[0].astype(np.float32)
    damping = 10.0**-decades
    expected = np.linalg.inv(matrix.astype(np.float64) + damping * np.eye(60))
    # Float32 arithmetic would lose 7e-9 times the condition: 7e-3 at 1e6.
    assert relative_error(damped_inverse(matrix, damping), expected) < ROUNDING[np.float32]


@pytest.mark.rounding
@pytest.mark.parametrize("damping", [0.0, 1e-12, 1e-8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [1, 10, 30])
def test_rank_deficient_matrix_has_positive_definite_inverse(rank, dtype, damping):
    rows = np.random.default_rng(rank).standard_normal((rank, 40)).astype(dtype)
    found = damped_inverse(rows.T @ rows, damping)
    assert np.isfinite(found).all()
    v = np.random.default_rng(1).standard_normal(40)
    assert v @ found.astype(np.float64) @ v > 0


INDEFINITE = {
    "one_negative": np.diag([3.0, -1.0, 2.0]),
    "negative_definite": -np.eye(4),
    "zero_diagonal": np.array([[0.0, 1.0], [1.0, 0.0]]),
    "mixed": with_spectrum(np.linspace(-1, 1, 30))[0],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("matrix", INDEFINITE.values(), ids=INDEFINITE)
def test_negative_eigenvalues_are_replaced_with_zero(matrix, dtype, caplog):
    damping = 1e-4
    eigenvalues, Q = np.linalg.eigh(matrix)
    damped = np.maximum(eigenvalues, 0) + damping
    with caplog.at_level(logging.WARNING):
        found = damped_inverse(matrix.astype(dtype), damping)
        lower = damped_cholesky(matrix.astype(dtype), damping)
    assert "negative eigenvalues are replaced" in caplog.text
    # Float32 rounding of the entries moves the eigenvalues near zero by 1e-7, a part of 1e-3 of
    # the damping.
    tolerance = 2e-3 if dtype == np.float32 else 1e-9
    assert relative_error(found, (Q / damped) @ Q.T) < tolerance
    np.testing.assert_array_equal(found, found.T)
    assert relative_error(lower @ lower.T, (Q * damped) @ Q.T) < tolerance
    assert_lower(lower)


@pytest.mark.rounding
def test_matrix_indefinite_by_rounding_receives_more_damping(caplog):
    matrix, Q = with_spectrum(np.array([-5e-4, 1.0, 2.0]))
    with caplog.at_level(logging.WARNING):
        found = damped_inverse(matrix, 1e-4)
    assert "trying 0.001" in caplog.text
    expected = (Q / (np.array([-5e-4, 1.0, 2.0]) + 1e-3)) @ Q.T
    assert relative_error(found, expected) < 1e-10


def test_positive_definite_matrix_logs_no_warning(caplog):
    with caplog.at_level(logging.DEBUG):
        damped_inverse(np.eye(3, dtype=np.float32), 0.0)
        damped_cholesky(np.eye(3, dtype=np.float32), 0.0)
    assert not caplog.records


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [1, 5, 300])
def test_zero_damping_is_allowed_for_well_conditioned_matrix(side, dtype):
    found = damped_inverse(2 * np.eye(side, dtype=dtype), 0.0)
    # The floor is the rounding error of the norm: at most √300 units of precision.
    np.testing.assert_allclose(found, np.eye(side) / 2, atol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("exponent", [-500, 500])
def test_inverse_scales_inversely_with_matrix(exponent):
    matrix, scale = with_spectrum(np.linspace(1, 2, 9))[0], 2.0**exponent
    np.testing.assert_array_equal(
        damped_inverse(matrix * scale, 0.1 * scale), damped_inverse(matrix, 0.1) / scale
    )


def test_tiny_matrix_with_tiny_damping_has_finite_inverse():
    found = damped_inverse(np.zeros((3, 3), np.float32), 1e-42)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
def test_cholesky_factor_times_transpose_is_damped_matrix(side, dtype):
    matrix = with_spectrum(np.linspace(0, 2, side))[0].astype(dtype)
    lower = damped_cholesky(matrix, 0.1)
    assert lower.dtype == dtype
    assert lower.flags.c_contiguous
    assert_lower(lower)
    wide = lower.astype(np.float64)
    assert relative_error(wide @ wide.T, matrix + 0.1 * np.eye(side)) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
def test_triangular_inverse_times_factor_is_identity(side, dtype):
    lower = np.tril(np.random.default_rng(0).standard_normal((side, side))) / side
    np.fill_diagonal(lower, np.linspace(1, 2, side))
    found = triangular_inverse(lower.astype(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.triu(found, 1), 0)
    np.testing.assert_allclose(found @ lower, np.eye(side), atol=10 * ROUNDING[dtype])


def test_triangular_inverse_ignores_upper_triangle():
    lower = np.array([[2.0, 7.0], [1.0, 4.0]])
    found = triangular_inverse(lower)
    np.testing.assert_allclose(found, [[0.5, 0.0], [-0.125, 0.25]], rtol=1e-15)


def test_singular_triangle_raises_error():
    with pytest.raises(InputError, match=r"zero at \[1, 1\]"):
        triangular_inverse(np.array([[1.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
def test_eigh_returns_ascending_eigenvalues_and_eigenvectors(side, dtype):
    expected = np.linspace(-1, 5, side) if side > 1 else np.array([2.0])
    matrix = with_spectrum(expected)[0].astype(dtype)
    values, vectors = eigh(matrix)
    assert values.dtype == vectors.dtype == np.float64
    np.testing.assert_allclose(values, expected, atol=20 * ROUNDING[dtype])
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(side), atol=1e-12)
    np.testing.assert_allclose((vectors * values) @ vectors.T, matrix, atol=1e-12)


OPERATIONS = {
    "damped_inverse": lambda m: damped_inverse(m, 0.1),
    "damped_cholesky": lambda m: damped_cholesky(m, 0.1),
    "triangular_inverse": triangular_inverse,
    "eigh": eigh,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_matrix_raises_error_before_lapack(operation, bad):
    matrix = np.eye(4, dtype=np.float32)
    matrix[2, 1] = bad
    with pytest.raises(NonFiniteError, match=r"at \[2, 1\]"):
        operation(matrix)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 3), (0, 3, 3), (2, 0, 0)])
def test_eigh_stack_rejects_other_shapes(shape):
    with pytest.raises(ShapeError, match="stack of factors must have shape"):
        eigh_stack(np.ones(shape))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 4), (3,), (0, 0), (2, 3, 3)])
def test_nonsquare_matrix_raises_error(operation, shape):
    with pytest.raises(ShapeError, match="factor must be a square matrix"):
        operation(np.ones(shape))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inverse_does_not_change_matrix(operation, dtype):
    matrix = with_spectrum(np.linspace(1, 2, 5))[0].astype(dtype)
    before = matrix.copy()
    operation(matrix)
    np.testing.assert_array_equal(matrix, before)


@pytest.mark.parametrize("operation", [damped_inverse, damped_cholesky])
@pytest.mark.parametrize("damping", [-1e-3, np.nan, np.inf])
def test_invalid_damping_raises_error(operation, damping):
    with pytest.raises(InputError, match="zero or positive and finite"):
        operation(np.eye(3), damping)


@pytest.mark.parametrize("operation", [damped_inverse, damped_cholesky])
def test_zero_matrix_without_damping_raises_error(operation):
    with pytest.raises(InputError, match="needs a positive damping"):
        operation(np.zeros((3, 3)), 0.0)


def assert_lower(matrix):
    np.testing.assert_array_equal(np.triu(matrix, 1), 0)
    assert (np.diagonal(matrix) > 0).all()


@pytest.mark.parametrize("scale", [1e-200, 1e-100, 1e200])
def test_damping_floor_is_proportional_to_matrix(scale):
    """Also where squares of entries vanish or overflow: ``ε·‖M‖`` is linear in ``M``."""
    matrix = np.array([[3.0, 1.0], [1.0, 2.0]])
    expected = np.finfo(np.float64).eps * np.sqrt(15.0) * scale
    found = damping_floor(scale * matrix, np.dtype(np.float64))
    # The norm of four numbers, rounded a few times.
    assert found == pytest.approx(expected, rel=1e-14, abs=0)


HARD = {
    "ordinary": np.diag([3.0, 2.0, 1.0]) + 0.1,
    "indefinite": np.diag([3.0, 2.0, -1.0]) + 0.1,
    "squares_vanish": (np.diag([3.0, 2.0, 1.0]) + 0.1) * 1e-170,
    "squares_overflow": (np.diag([3.0, 2.0, 1.0]) + 0.1) * 1e170,
}


@pytest.mark.parametrize("primitive", [damped_inverse, damped_cholesky])
@pytest.mark.parametrize("matrix", HARD.values(), ids=HARD)
def test_inverse_ignores_upper_triangle(matrix, primitive):
    lower = np.where(np.tri(3, dtype=bool), matrix, np.nan)
    damping = 1e-3 * abs(matrix).max()
    found = primitive(lower, damping)
    np.testing.assert_array_equal(found, primitive(matrix, damping))
