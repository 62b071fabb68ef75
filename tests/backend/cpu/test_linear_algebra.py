"""Many matrices at once have the inverses, factors and eigenvectors of each alone."""

import logging

import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.errors import InputError, NonFiniteError, ShapeError
from tests.backend.single_matrices import OPERATIONS

# Rounding to float32 and to float64, times a condition of ten and a small factor.
TOLERANCE = {"f": 2e-6, "d": 1e-13}
SIDES = [3, 16, 3, 40, 200, 3, 16, 1, 500, 1]
DAMPINGS = [0.1 * (i + 1) for i in range(len(SIDES))]


def made(sides, char):
    draw = np.random.default_rng(7).standard_normal
    rows = [draw((2 * side, side)) for side in sides]
    return [(x.T @ x / len(x)).astype(char) for x in rows]


@pytest.fixture(params=[1, 3], ids=["one_thread", "three_threads"])
def backend(request):
    # Room for two matrices of side 500, but not for three.
    return NumpyBackend(threads=request.param, scratch_bytes=4_500_000)


@pytest.mark.parametrize("char", "fd")
def test_inverses_equal_inverses_of_single_matrices(backend, char):
    matrices = made(SIDES, char)
    found = backend.linalg.begin_damped_inverses(matrices, DAMPINGS)()
    for inverse, matrix, damping in zip(found, matrices, DAMPINGS, strict=True):
        expected = np.linalg.inv(matrix.astype(np.float64) + damping * np.eye(len(matrix)))
        assert inverse.dtype == char
        np.testing.assert_array_equal(inverse, inverse.T)
        np.testing.assert_allclose(inverse, expected, atol=TOLERANCE[char] * abs(expected).max())


@pytest.mark.parametrize("char", "fd")
def test_cholesky_factors_and_their_inverses_are_lower_triangular(backend, char):
    matrices = made(SIDES, char)
    lowers = backend.linalg.damped_choleskys(matrices, DAMPINGS)
    inverses = backend.linalg.triangular_inverses(lowers)
    for L, K, matrix, damping in zip(lowers, inverses, matrices, DAMPINGS, strict=True):
        assert L.dtype == K.dtype == char
        np.testing.assert_array_equal(np.triu(L, 1), 0.0)
        np.testing.assert_array_equal(np.triu(K, 1), 0.0)
        eye, wide = np.eye(len(matrix)), L.astype(np.float64)
        np.testing.assert_allclose(wide @ wide.T, matrix + damping * eye, atol=5 * TOLERANCE[char])
        np.testing.assert_allclose(K @ wide, eye, atol=5 * TOLERANCE[char])


def test_results_have_types_of_their_matrices(backend):
    """Also where one call has matrices of one side and two types."""
    single, double = made([16, 16], "f"), made([16, 16], "d")
    mixed = [single[0], double[0], double[1], single[1]]
    for found in (
        backend.linalg.begin_damped_inverses(mixed, [0.1] * 4)(),
        backend.linalg.damped_choleskys(mixed, [0.1] * 4),
    ):
        assert [array.dtype.char for array in found] == [*"fddf"]
    inverses = backend.linalg.begin_damped_inverses(mixed, [0.1] * 4)()
    for inverse, matrix in zip(inverses[1:3], double, strict=True):
        expected = np.linalg.inv(matrix + 0.1 * np.eye(16))
        np.testing.assert_allclose(inverse, expected, atol=TOLERANCE["d"] * abs(expected).max())


@pytest.mark.rounding
@pytest.mark.parametrize("condition", [1e4, 1e6])
def test_small_float32_matrices_are_inverted_in_float64(backend, condition):
    """Of float32 arithmetic an error of the condition times 6e-8 would be left."""
    Q = np.linalg.qr(np.random.default_rng(3).standard_normal((5, 12, 12)))[0]
    values = np.geomspace(1, 1 / condition, 12)
    matrices = [((q * values) @ q.T).astype("f") for q in Q]
    damping = 1 / condition
    found = backend.linalg.begin_damped_inverses(matrices, [damping] * 5)()
    for inverse, matrix in zip(found, matrices, strict=True):
        lower = np.tril(matrix).astype(np.float64)
        whole = lower + np.tril(lower, -1).T + damping * np.eye(12)
        expected = np.linalg.inv(whole)
        # What remains is the rounding of the result to float32.
        np.testing.assert_allclose(inverse, expected, rtol=0, atol=2e-7 * abs(expected).max())


def test_eighs_diagonalises_matrices_and_stacks(backend):
    matrices = [*made([5, 90], "d"), np.stack(made([4] * 7, "d"))]
    for matrix, (values, Q) in zip(matrices, backend.linalg.eighs(matrices), strict=True):
        np.testing.assert_array_equal(values, np.sort(values, axis=-1))
        np.testing.assert_allclose(
            (Q * values[..., None, :]) @ Q.swapaxes(-1, -2), matrix, atol=1e-12
        )


def test_indefinite_matrix_does_not_affect_other_inverses(backend, caplog):
    matrices = [*made([4, 4], "d"), np.diag([1.0, -1.0, 1.0, 1.0])]
    with caplog.at_level(logging.WARNING):
        found = backend.linalg.begin_damped_inverses(matrices, [1e-4, 1e-4, 1e-4])()
    assert "negative eigenvalues are replaced with zero" in caplog.text
    np.testing.assert_allclose(
        found[2], np.diag(1 / np.array([1.0001, 1e-4, 1.0001, 1.0001])), rtol=1e-12
    )
    for inverse, matrix in zip(found[:2], matrices, strict=False):
        np.testing.assert_allclose(inverse @ (matrix + 1e-4 * np.eye(4)), np.eye(4), atol=1e-10)


@pytest.mark.parametrize("side", [4, 200])
def test_dampings_below_floor_are_raised(backend, side):
    rows = np.random.default_rng(1).standard_normal((2, side))
    singular = (rows.T @ rows).astype("f")
    v = np.random.default_rng(2).standard_normal(side)
    for inverse in backend.linalg.begin_damped_inverses([singular, singular], [0.0, 0.0])():
        assert v @ inverse @ v > 0


@pytest.mark.parametrize("side", [3, 60])
def test_batch_with_invalid_matrix_raises_error(backend, side):
    good = np.eye(side)
    for bad, damping, error in [
        (np.full((side, side), np.nan), 0.1, NonFiniteError),
        (np.zeros((side, side)), 0.0, InputError),
        (good, -1.0, InputError),
        (np.ones((side, side + 1)), 0.1, ShapeError),
    ]:
        with pytest.raises(error):
            backend.linalg.begin_damped_inverses([good, bad], [0.1, damping])()


@pytest.mark.parametrize("side", [3, 60])
def test_batch_with_singular_triangle_raises_error(backend, side):
    singular = np.eye(side)
    singular[1, 1] = 0.0
    with pytest.raises(InputError, match=r"zero at \[1, 1\]"):
        backend.linalg.triangular_inverses([np.eye(side), singular])


@pytest.mark.parametrize("call", ["damped_inverses", "damped_choleskys"])
def test_batched_operations_ignore_upper_triangles(backend, call):
    matrices = made([5, 5, 70], "f")
    halved = [np.where(np.tri(len(m), dtype=bool), m, np.float32(1e9)) for m in matrices]
    for found, expected in zip(
        OPERATIONS[call](backend, halved, [0.1] * 3),
        OPERATIONS[call](backend, matrices, [0.1] * 3),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)
