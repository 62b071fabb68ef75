"""Powers equal those of matrices whose powers are known otherwise."""

import numpy as np
import pytest

from kfac_engine.curvature.linalg.spectral import eigh_power
from kfac_engine.errors import InputError

# A chain of two products of 40 × 40 float64 matrices of condition below 1e3.
ROUNDING = 1e-10


def second_moment(side=40, seed=0):
    rows = np.random.default_rng(seed).standard_normal((2 * side, side))
    return rows.T @ rows / len(rows)


def power(matrix, damping, exp, **options):
    values, vectors = np.linalg.eigh(matrix)
    return eigh_power(values, vectors, damping, exp, **options)


IDENTITIES = {
    "inverse": (-1, lambda root, damped: root @ damped, np.eye(40)),
    "inverse_root": (-0.5, lambda root, damped: root @ root @ damped, np.eye(40)),
    "root": (0.5, lambda root, damped: root @ root - damped, np.zeros((40, 40))),
    "fourth_root": (-0.25, lambda r, damped: r @ r @ r @ r @ damped, np.eye(40)),
    "square": (2, lambda square, damped: square - damped @ damped, np.zeros((40, 40))),
    "itself": (1, lambda same, damped: same - damped, np.zeros((40, 40))),
    "nothing": (0, lambda one, damped: one, np.eye(40)),
}


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize(("exp", "undo", "expected"), IDENTITIES.values(), ids=IDENTITIES)
def test_powers_multiply_back(exp, undo, expected, damping):
    C = second_moment()
    found = power(C, damping, exp)
    np.testing.assert_allclose(undo(found, C + damping * np.eye(40)), expected, atol=ROUNDING)
    np.testing.assert_array_equal(found, found.T)


def test_powers_of_a_stack_are_symmetric_to_the_last_bit():
    C = np.stack([second_moment(seed=seed) for seed in range(3)])
    found = power(C, 0.1, -0.5)
    np.testing.assert_array_equal(found, found.swapaxes(-1, -2))
    for root, matrix in zip(found, C, strict=True):
        undone = root @ root @ (matrix + 0.1 * np.eye(40))
        np.testing.assert_allclose(undone, np.eye(40), atol=ROUNDING)


def test_eigenvalues_are_clipped_at_zero_or_more_before_the_damping_is_added():
    found = power(np.diag([-1.0, 0.25, 4.0]), 1.0, -1, clip=0.5)
    np.testing.assert_allclose(found, np.diag([1 / 1.5, 1 / 1.5, 1 / 5.0]), rtol=1e-14)
    found = power(np.diag([-1.0, 3.0]), 0.5, -1)
    np.testing.assert_allclose(found, np.diag([2.0, 1 / 3.5]), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_result_has_the_dtype_asked_for(dtype):
    found = power(second_moment(), 0.1, -1, dtype=dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, found.T)


def test_a_singular_matrix_has_a_root():
    np.testing.assert_allclose(power(np.diag([0.0, 4.0]), 0.0, 0.5), np.diag([0.0, 2.0]))


def test_powers_that_do_not_exist_are_refused():
    with pytest.raises(InputError, match=r"damped eigenvalue -0\.5 has no power 0\.5"):
        power(np.diag([0.5, 4.0]), -1.0, 0.5)
    with pytest.raises(InputError, match="use a positive damping"):
        power(np.diag([0.0, 1.0]), 0.0, -1)
