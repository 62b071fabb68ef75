"""The CuPy backend equals the NumPy backend in every primitive, on a stand-in and on a device."""

import inspect

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.linear_algebra import NumpyLinearAlgebra
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.cuda.linear_algebra import CupyLinearAlgebra
from kfac_engine.backend.protocol import Accumulation, Backend, LinearAlgebra
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, NonFiniteError, ShapeError
from tests.backend import cupy_standin
from tests.backend.geometries import CORNERS, STRIDED, Case
from tests.backend.single_matrices import OPERATIONS, damped_inverse, triangular_inverse

NUMPY = NumpyBackend()
# Float32 results of other orders of summation, relative to the largest entry.
FLOAT32 = 3e-6
FLOAT64 = 1e-12
TOLERANCE = {np.float32: FLOAT32, np.float64: FLOAT64}


@pytest.fixture(params=cupy_standin.KINDS)
def backend(request, monkeypatch):
    cupy_standin.begin(request.param, monkeypatch)
    return CupyBackend(scratch_bytes=8 << 20)


def whole(lower):
    """Both triangles: NumPy's moments are sure to have the lower one only, those of a GPU both."""
    return np.tril(lower) + np.tril(lower, -1).T


def equal(backend, found, wanted, tolerance):
    host = backend.to_numpy(found)
    assert host.dtype == wanted.dtype
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(host, wanted, rtol=0, atol=tolerance * max(scale, 1e-30))


def spd(side, dtype, seed=0):
    root = np.random.default_rng(seed).normal(size=(side, side))
    return (root @ root.T / side + np.eye(side)).astype(dtype)


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [
        (Backend, NumpyBackend),
        (Backend, CupyBackend),
        (LinearAlgebra, NumpyLinearAlgebra),
        (LinearAlgebra, CupyLinearAlgebra),
    ],
)
def test_operations_have_signatures_of_protocol(protocol, implementation):
    for name in (name for name in vars(protocol) if not name.startswith("_")):
        expected = inspect.getattr_static(protocol, name)
        if inspect.isfunction(expected):
            method = getattr(implementation, name)
            assert inspect.signature(expected) == inspect.signature(method), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((40, 7), -1), ((5, 6, 7), -1), ((5, 6, 7), 1), ((3, 6, 2, 2, 2, 2), 1)]
)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_second_moment_equals_numpy_backend(backend, shape, axis, homogeneous, beta, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    wanted = spd(shape[axis] + homogeneous, dtype)
    found = backend.asarray(wanted if beta else np.full_like(wanted, np.nan)).copy()
    how = Accumulation(homogeneous, 0.3, beta)
    NUMPY.second_moment(x, wanted, how, feature_axis=axis)
    backend.second_moment(backend.asarray(x), found, how, feature_axis=axis)
    equal(backend, found, whole(wanted), TOLERANCE[dtype])


# By the kernels of pairs: odd and even numbers of tiles of a tap, and several stages.
PAIRS = [
    Case(Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), 3, 64, (9, 9)),
    Case(Window((3, 2), (2, 1), (1, 2), (1, 0), (0, 2)), 2, 128, (11, 12)),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", [*STRIDED[::25], *CORNERS[:4], *PAIRS], ids=str)
def test_patch_moments_equal_numpy_backend(backend, case, dtype):
    x = case.images().astype(dtype)
    equal(
        backend, backend.patches(backend.asarray(x), case.window), NUMPY.patches(x, case.window), 0
    )
    kept = np.float64 if dtype == np.float64 else np.float32
    wanted = spd(case.window.taps * case.channels + 1, kept)
    found = backend.asarray(wanted).copy()
    how = Accumulation(True, 0.3, 0.5)
    NUMPY.patch_second_moment(x, case.window, wanted, how)
    backend.patch_second_moment(backend.asarray(x), case.window, found, how)
    equal(backend, found, whole(wanted), TOLERANCE[kept])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [1, 5, 40])
def test_inverses_and_roots_equal_numpy_backend(backend, side, dtype):
    matrix = spd(side, dtype)
    on_device = backend.asarray(matrix)
    tolerance = {np.float32: 1e-6, np.float64: 1e-12}[dtype]  # computed in float64, then rounded
    for name in ("damped_inverse", "damped_cholesky"):
        found = OPERATIONS[name](backend, on_device, 0.1)
        equal(backend, found, OPERATIONS[name](NUMPY, matrix, 0.1), tolerance)
    lower = np.tril(matrix)
    found = triangular_inverse(backend, backend.asarray(lower))
    equal(backend, found, triangular_inverse(NUMPY, lower), tolerance)


@pytest.mark.parametrize("name", ["damped_inverse", "damped_cholesky"])
@pytest.mark.parametrize(
    ("diagonal", "damping", "tolerance"),
    [([1.0, -1e-5], 1e-6, 1e-5), ([1.0, -3.0, 2.0], 1e-3, 1e-6)],
    ids=["indefinite by rounding", "indefinite"],
)
def test_indefinite_matrices_are_damped_alike(backend, name, diagonal, damping, tolerance):
    matrix = np.diag(diagonal).astype(np.float32)
    found = OPERATIONS[name](backend, backend.asarray(matrix), damping)
    equal(backend, found, OPERATIONS[name](NUMPY, matrix, damping), tolerance)


def test_eighs_returns_eigenvectors(backend):
    matrix = spd(20, np.float32)
    values, vectors = (
        backend.to_numpy(a) for a in backend.linalg.eighs([backend.asarray(matrix)])[0]
    )
    assert values.dtype == vectors.dtype == np.float64
    np.testing.assert_allclose((vectors * values) @ vectors.T, matrix, atol=1e-12)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(20), atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_operands_raise_error(backend, bad):
    matrix = spd(4, np.float32)
    norm = float((matrix.astype(np.float64) ** 2).sum())
    assert backend.squared_norms([backend.asarray(matrix)]) == [pytest.approx(norm, 1e-6)]
    matrix[2, 1] = bad
    on_device = backend.asarray(matrix)
    assert not np.isfinite(backend.squared_norms([on_device])).any()
    with pytest.raises(NonFiniteError, match=r"at \[2, 1\]"):
        damped_inverse(backend, on_device, 0.1)


def test_invalid_operands_raise_errors_of_numpy_backend(backend):
    with pytest.raises(ShapeError, match="square"):
        damped_inverse(backend, backend.asarray(np.ones((2, 3), np.float32)), 0.1)
    with pytest.raises(InputError, match="damping"):
        damped_inverse(backend, backend.asarray(spd(2, np.float32)), -1.0)
    with pytest.raises(InputError, match="positive damping"):
        damped_inverse(backend, backend.asarray(np.zeros((2, 2), np.float32)), 0.0)
    with pytest.raises(InputError, match=r"\[1, 1\]"):
        triangular_inverse(backend, backend.asarray(np.diag([1.0, 0.0])))
    out = backend.asarray(np.zeros((3, 3), np.float32))
    with pytest.raises(ShapeError):
        backend.second_moment(backend.asarray(np.ones((5, 4), np.float32)), out)


def test_second_moment_copies_nothing_to_host(monkeypatch):
    cupy_standin.install(monkeypatch)
    backend = CupyBackend(scratch_bytes=8 << 20)
    x = backend.asarray(np.ones((2, 3, 5, 5), np.float32))
    out = backend.asarray(np.zeros((28, 28), np.float32))
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    cupy_standin.COUNTS.clear()
    for _ in range(3):
        backend.patch_second_moment(x, window, out, Accumulation(True, beta=0.5))
    assert cupy_standin.COUNTS["downloads"] == cupy_standin.COUNTS["reads"] == 0
    # Four arrays of the plan, once; for each call, tables of addresses for products and bias rows.
    assert cupy_standin.COUNTS["uploads"] == 4 + 3 * 2
