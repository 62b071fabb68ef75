"""Many matrices at once on a GPU: as each alone, with the device read once for all of them."""

import logging

import numpy as np
import pytest
from scipy.linalg import lapack

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda import device, inverse_roots, linear_algebra, recursive_inverse
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.errors import BackendError, InputError, MemoryLimitError, NonFiniteError
from tests.backend import cupy_standin, standin_solvers
from tests.backend.single_matrices import OPERATIONS, damped_inverse, triangular_inverse

NUMPY = NumpyBackend()
# Computed in float64 both times; one rounding to the type of the matrix.
TOLERANCE = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-11}
# Beyond the side up to which stacks are factored in one call.
LARGE = device.STACKED_SIZE + 3


@pytest.fixture
def backend(monkeypatch):
    """On the stand-in, which must compile its probe: a device is asked in ``make test-gpu``."""
    cupy_standin.begin("stand-in", monkeypatch)
    return CupyBackend(scratch_bytes=64 << 20)


@pytest.fixture(params=cupy_standin.KINDS)
def either(request, monkeypatch):
    cupy_standin.begin(request.param, monkeypatch)
    return CupyBackend(scratch_bytes=64 << 20)


def spd(side, seed, dtype=np.float32):
    root = np.random.default_rng(seed).normal(size=(side, side))
    return (root @ root.T / side + 0.5 * np.eye(side)).astype(dtype)


def mixed():
    """Equal and different sides and types, in no order."""
    sides = [7, 3, 7, 1, LARGE, 7, 3, LARGE]
    types = [np.float32, np.float32, np.float64, np.float32, np.float32, np.float32, *[float] * 2]
    return [spd(s, i, t) for i, (s, t) in enumerate(zip(sides, types, strict=True))]


def close(backend, found, wanted):
    host = backend.to_numpy(found)
    assert host.dtype == wanted.dtype
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(host, wanted, rtol=0, atol=TOLERANCE[wanted.dtype] * scale)


@pytest.mark.parametrize("name", ["damped_inverse", "damped_cholesky"])
def test_batched_results_equal_single_results(either, name):
    hosts, dampings = mixed(), list(np.geomspace(1e-3, 1, 8))
    found = OPERATIONS[f"{name}s"](either, [either.asarray(m) for m in hosts], dampings)
    for result, host, damping in zip(found, hosts, dampings, strict=True):
        close(either, result, OPERATIONS[name](NUMPY, host, damping))
        assert result.flags.c_contiguous


def test_batched_triangular_inverses_equal_single_inverses(either):
    hosts = [np.tril(matrix) for matrix in mixed()]
    found = either.linalg.triangular_inverses([either.asarray(host) for host in hosts])
    for result, host in zip(found, hosts, strict=True):
        close(either, result, triangular_inverse(NUMPY, host))


def test_eighs_diagonalises_matrices_and_stacks(either):
    stack = np.stack([spd(5, seed) for seed in range(4)])
    hosts = [spd(9, 7), stack, spd(5, 8)]
    for (values, vectors), host in zip(
        either.linalg.eighs([either.asarray(host) for host in hosts]), hosts, strict=True
    ):
        w, Q = either.to_numpy(values), either.to_numpy(vectors)
        assert w.shape == host.shape[:-1]
        assert (np.diff(w) >= 0).all()
        rebuilt = (Q * w[..., None, :]) @ Q.swapaxes(-1, -2)
        np.testing.assert_allclose(rebuilt, host, atol=1e-12)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("name", ["damped_inverses", "damped_choleskys"])
def test_positive_definite_matrices_need_one_device_read(backend, name, count):
    matrices = [backend.asarray(spd(3 + i % 4, i)) for i in range(count)]
    cupy_standin.COUNTS.clear()
    OPERATIONS[name](backend, matrices, [0.1] * count)
    assert cupy_standin.COUNTS["downloads"] == 1
    assert cupy_standin.COUNTS["reads"] == 0


def test_only_failed_matrices_are_retried(backend, caplog):
    hosts = [spd(4, 0), np.diag([1.0, -1e-5, 1, 1]).astype(np.float32), spd(4, 1)]
    hosts += [np.diag([1.0, -3.0, 2.0, 1.0]).astype(np.float32)]
    matrices = [backend.asarray(host) for host in hosts]
    cupy_standin.COUNTS.clear()
    standin_solvers.CALLS.clear()
    with caplog.at_level(logging.WARNING):
        found = backend.linalg.begin_damped_inverses(matrices, [1e-6] * 4)()
    # Four rungs, then eigenvalues. Three launches before a leaf, and one after it: at first one
    # stack of all, then a stack of both that failed.
    assert cupy_standin.COUNTS["downloads"] == 5
    assert sum("not positive definite" in r.message for r in caplog.records) == 1 + 4
    for result, host in zip(found, hosts, strict=True):
        close_to = damped_inverse(NUMPY, host, 1e-6)
        scale = np.abs(close_to).max()
        np.testing.assert_allclose(backend.to_numpy(result), close_to, rtol=0, atol=1e-5 * scale)


def conditioned(side, condition, seed):
    """A positive definite float32 matrix of about this condition, without structure."""
    Q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(side, side)))
    found = ((Q * np.geomspace(1, 1 / condition, side)) @ Q.T).astype(np.float32)
    return np.tril(found) + np.tril(found, -1).T


def lapack_inverse(matrix):
    lower, code = lapack.dpotrf(matrix.astype(np.float64), lower=1)
    assert code == 0
    found, code = lapack.dpotri(lower, lower=1)
    assert code == 0
    return np.tril(found) + np.tril(found, -1).T


# Largest errors relative to the largest entry, by the condition; LAPACK's own errors grow with it.
# Without symmetric Schur complements, the error at a condition of 1e6 is 3e-7.
RECURSIVE_ERRORS = {1e0: 1e-13, 1e3: 1e-12, 1e6: 5e-9, 1e7: 1e-7, 1e8: 3e-6}


@pytest.mark.parametrize(
    ("side", "conditions"),
    [
        (1, [1e0]),
        (31, [1e3]),
        (127, [1e3]),
        (128, [1e0, 1e6]),
        (129, [1e3, 1e7]),
        (300, [1e0, 1e3, 1e6, 1e8]),
        (577, [1e6]),
    ],
)
def test_recursive_inverse_equals_lapack(either, side, conditions):
    hosts = [conditioned(side, condition, seed) for seed, condition in enumerate(conditions)]
    work = either.asarray(np.stack(hosts).astype(np.float64))
    codes = recursive_inverse.invert(either.device, work)
    assert not either.to_numpy(codes).any()
    for found, host, condition in zip(either.to_numpy(work), hosts, conditions, strict=True):
        wanted = lapack_inverse(host)
        bound = RECURSIVE_ERRORS[condition] * np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)


def test_indefinite_matrix_has_code_and_spares_its_batch(either):
    hosts = np.stack([conditioned(300, 10, seed) for seed in range(4)]).astype(np.float64)
    wanted = [lapack_inverse(host) for host in hosts]
    # The first minor that is not positive: in the first leaf, in the second, at a NaN in the last.
    for number, row, entry in ((0, 5, -1.0), (1, 200, -1.0), (2, 299, np.nan)):
        hosts[number, row, row] = entry
    work = either.asarray(hosts)
    codes = either.to_numpy(recursive_inverse.invert(either.device, work))
    assert codes.tolist() == [6, 201, 300, 0]
    np.testing.assert_allclose(either.to_numpy(work)[3], wanted[3], rtol=0, atol=1e-11)


def test_equal_sizes_share_launches_within_announced_memory(backend):
    hosts = [spd(LARGE, seed) for seed in range(8)]
    matrices = [backend.asarray(host) for host in hosts]
    backend.linalg._batches._scratch_bytes = 0  # the largest matrix determines the memory
    cupy_standin.COUNTS.clear()
    standin_solvers.CALLS.clear()
    # Ten float64 matrices, of which a float32 matrix needs three: three stacks.
    found = backend.linalg.begin_damped_inverses(matrices, [0.1] * 8)()
    for result, host in zip(found, hosts, strict=True):
        close(backend, result, damped_inverse(NUMPY, host, 0.1))
    # Three leaves, so two nodes of four products; their sums and copies, and three conversions.
    assert standin_solvers.CALLS == {"dgemmStridedBatched": 3 * 2 * 4}
    assert cupy_standin.COUNTS["launches"] == 3 * (3 + 2 * 2 + 3)


def test_recursive_inverse_allocates_a_third_of_its_matrices(backend):
    side = 1100
    work = backend.asarray(np.eye(side)[None])
    cupy_standin.memory.limit = 8 * side**2 * 36 // 100
    assert not backend.to_numpy(recursive_inverse.invert(backend.device, work)).any()
    np.testing.assert_array_equal(backend.to_numpy(work)[0], np.eye(side))


def test_double_precision_is_inverted_by_cholesky(backend):
    """Their damping is far below the rounding of float32, so their conditions have no bound."""
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.normal(size=(LARGE, LARGE)))
    host = (Q * np.geomspace(1, 1e-11, LARGE)) @ Q.T
    host = np.tril(host) + np.tril(host, -1).T
    standin_solvers.CALLS.clear()
    result = damped_inverse(backend, backend.asarray(host), 0.0)
    wanted = damped_inverse(NUMPY, host, 0.0)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(backend.to_numpy(result), wanted, rtol=0, atol=1e-4 * scale)
    assert standin_solvers.CALLS == {"dpotrf": 1}


def test_nonfinite_matrix_error_names_matrix(backend):
    good, bad = spd(4, 0), spd(4, 1)
    bad[2, 1] = np.nan
    matrices = [backend.asarray(m) for m in (good, bad, good)]
    for name in ("damped_inverses", "damped_choleskys"):
        with pytest.raises(NonFiniteError, match=r"at \[2, 1\]"):
            OPERATIONS[name](backend, matrices, [0.1] * 3)
    with pytest.raises(NonFiniteError, match=r"at \[2, 1\]"):
        backend.linalg.eighs(matrices)
    with pytest.raises(InputError, match="damping"):
        backend.linalg.begin_damped_inverses(matrices[:1], [np.nan])()


def test_inaccurate_eigenvectors_raise_error(backend, monkeypatch):
    monkeypatch.setattr(linear_algebra, "_EIGEN_ROUNDING", 0.0)
    with pytest.raises(BackendError, match="eigenvectors"):
        backend.linalg.eighs([backend.asarray(spd(5, 0))])


# -- memory ----------------------------------------------------------------------------------------


def test_batch_above_memory_is_split(backend):
    hosts = [spd(40, seed) for seed in range(64)]
    matrices = [backend.asarray(host) for host in hosts]
    # Half of the stack: 64 matrices in float64 take 800 kB.
    cupy_standin.memory.limit = 400_000
    found = backend.linalg.begin_damped_inverses(matrices, [0.1] * 64)()
    assert 0 < cupy_standin.memory.refused < 10
    for result, host in zip(found, hosts, strict=True):
        close(backend, result, damped_inverse(NUMPY, host, 0.1))


def test_memory_error_for_one_matrix_lists_sizes(backend):
    matrix = backend.asarray(spd(64, 0))
    cupy_standin.memory.limit = 1000
    with pytest.raises(MemoryLimitError, match=r"GPU has 1\.07 of 8\.59 GB free"):
        damped_inverse(backend, matrix, 0.1)


# -- roots without eigenvectors --------------------------------------------------------------------


@pytest.fixture
def small_roots(monkeypatch):
    """Matrices of any side take the way of large ones."""
    monkeypatch.setattr(inverse_roots, "LEAST_SIZES", {80: 2, 90: 2, 100: 2})


def root(matrix, damping, degree):
    values, Q = np.linalg.eigh(matrix.astype(np.float64))
    return ((Q * (values + damping) ** (-1 / degree)) @ Q.T).astype(np.float32)


def test_inverse_roots_equal_eigenvector_roots(either, small_roots):
    hosts = [spd(side, side) for side in (5, 9, 5, 30)]
    dampings, degrees = [1e-1, 1e-3, 1.0, 1e-2], [2, 4, 4, 2]
    found = either.linalg.inverse_roots([either.asarray(host) for host in hosts], dampings, degrees)
    for result, host, damping, degree in zip(found, hosts, dampings, degrees, strict=True):
        if result is not None:  # a device with slow float64 takes eigenvectors
            close(either, result, root(host, damping, degree))


def test_inverse_roots_read_device_once_for_any_number(backend, small_roots):
    for count in (1, 12):
        matrices = [backend.asarray(spd(3 + i % 4, i)) for i in range(count)]
        cupy_standin.COUNTS.clear()
        found = backend.linalg.inverse_roots(matrices, [0.1] * count, [2] * count)
        assert all(one is not None for one in found)
        assert cupy_standin.COUNTS["downloads"] == 2  # bounds, then residuals
        assert cupy_standin.COUNTS["reads"] == 0


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_inverse_root_is_none_without_convergence(backend, small_roots):
    indefinite = np.diag([1.0, -0.5, 1.0]).astype(np.float32)
    singular = np.diag([1.0, 0.0, 1.0]).astype(np.float32)
    cases = [(indefinite, 0.1), (singular, 1e-30), (singular, 0.0), (spd(3, 0, np.float64), 0.1)]
    matrices = [backend.asarray(matrix) for matrix, _ in cases]
    found = backend.linalg.inverse_roots(matrices, [damping for _, damping in cases], [2] * 4)
    assert found == [None] * 4


def test_small_matrices_and_slow_devices_use_eigenvectors(backend):
    matrix = backend.asarray(spd(LARGE, 0))
    assert backend.linalg.inverse_roots([backend.asarray(spd(8, 0))], [0.1], [2]) == [None]
    assert backend.linalg.inverse_roots([matrix], [0.1], [2])[0] is not None
    backend.device.capability = 89  # float64 at a sixty-fourth of the rate
    assert backend.linalg.inverse_roots([matrix], [0.1], [2]) == [None]
