"""Dense factors: averages over batches, and powers of them against dense algebra."""

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.linear_algebra import NumpyLinearAlgebra
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.statistics import KroneckerMoment
from kfac_engine.layers.views import RowView
from tests.comparing import assert_arrays_equal

DOUBLE = 1e-11  # relative: float64 through a condition number of a hundred
SINGLE = 1e-5  # relative: a float32 matrix, inverted in float64

D, N = 4, 9


class CountingAlgebra(NumpyLinearAlgebra):
    """Counts the matrices of each operation."""

    def __init__(self, workers, scratch_bytes):
        super().__init__(workers, scratch_bytes)
        self.calls = {"eigh": 0, "damped_inverse": 0, "damped_cholesky": 0}

    def eighs(self, matrices):
        self.calls["eigh"] += len(matrices)
        return super().eighs(matrices)

    def begin_damped_inverses(self, matrices, dampings):
        self.calls["damped_inverse"] += len(matrices)
        return super().begin_damped_inverses(matrices, dampings)

    def damped_choleskys(self, matrices, dampings):
        self.calls["damped_cholesky"] += len(matrices)
        return super().damped_choleskys(matrices, dampings)


class Counting(NumpyBackend):
    """Backend that counts the matrices of its linear algebra."""

    def __init__(self):
        super().__init__()
        self.linalg = CountingAlgebra(self.workers, self.scratch_bytes)
        self.calls = self.linalg.calls


def constant(damping):
    return lambda: damping


def make(config=None, backend=None):
    statistic = KroneckerMoment(("x",), RowView())
    return DenseSquareMatrixFactor(statistic, config=config, backend=backend)


def batch(seed=0, dtype=np.float64, scale=1.0):
    x = np.random.default_rng(seed).normal(size=(N, D)) * np.geomspace(1, 3, D)
    return {"x": (scale * x).astype(dtype)}


def observe(factor, *batches, decay=0.9):
    if not factor._averages_created:
        factor.instantiate_cov_variables()
    op = factor.make_covariance_update_op(decay)
    for values in batches:
        op(values)
    return factor


def refresh(factor):
    for op in factor.make_inverse_update_ops():
        op()


def moment(values):
    return values["x"].T.astype(np.float64) @ values["x"] / len(values["x"])


def damped(C, damping):
    return C + damping * np.eye(len(C))


# -- averages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["zeros", "identity"])
def test_a_classical_average_starts_where_it_is_told(start):
    config = ke.CollectionConfig(debias=False, initial_covariance=start)
    batches = [batch(seed) for seed in range(3)]
    factor = observe(make(config), *batches, decay=0.8)
    C = np.eye(D) if start == "identity" else np.zeros((D, D))
    for values in batches:
        C = 0.8 * C + 0.2 * moment(values)
    np.testing.assert_allclose(factor.cov, C, rtol=DOUBLE)


def test_what_was_read_is_the_callers_own():
    factor = make()
    factor.instantiate_cov_variables()
    update = factor.make_covariance_update_op(0.9)
    first = update(batch(0))
    kept = [first, factor.cov, factor.get_cov(), factor.get_cov_var()]
    before = first.copy()
    update(batch(1))
    for array in kept:
        np.testing.assert_array_equal(array, before)
        array[...] = np.nan
    assert np.isfinite(factor.cov).all()


# -- powers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exps", [(-1,), (-1, -0.5), (-0.25, 0.5, 2, 0.3, -2)])
@pytest.mark.parametrize("damping", [0.05, 3.0])
def test_powers_are_those_of_the_damped_average(exps, damping):
    factor, func = observe(make(), batch(0), batch(1)), constant(damping)
    for exp in exps:
        factor.register_matpower(exp, func)
    refresh(factor)
    V = np.random.default_rng(3).normal(size=(D, D))
    for exp in (1, *exps):
        truth = fractional_matrix_power(damped(factor.cov, damping), exp)
        left = factor.left_multiply_matpower(V, exp, func)
        right = factor.right_multiply_matpower(V, exp, func)
        np.testing.assert_allclose(left, truth @ V, rtol=DOUBLE, atol=DOUBLE)
        np.testing.assert_allclose(right, V @ truth, rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.parametrize(
    ("dampings", "exp", "calls"),
    [
        ([0.1, 0.2, 0.3], -1, {"damped_inverse": 3}),
        ([0.1, 0.2, 0.3, 0.4], -1, {"eigh": 1}),
        ([0.1, 0.1, 0.1, 0.1, 0.1], -1, {"damped_inverse": 1}),
        ([0.1, 0.1, 0.2, 0.2], -0.5, {"eigh": 1}),
    ],
    ids=["few", "many", "equal", "roots"],
)
def test_decompositions_are_shared(dampings, exp, calls):
    backend = Counting()
    factor, funcs = observe(make(backend=backend), batch()), [constant(d) for d in dampings]
    for func in funcs:
        factor.register_matpower(exp, func)
    refresh(factor)
    assert {name: count for name, count in backend.calls.items() if count} == calls
    for func, damping in zip(funcs, dampings, strict=True):
        truth = fractional_matrix_power(damped(factor.cov, damping), exp)
        found = factor.left_multiply_matpower(np.eye(D), exp, func)
        np.testing.assert_allclose(found, truth, rtol=DOUBLE, atol=DOUBLE)


def test_the_number_of_inverses_that_share_eigenvectors_is_a_choice():
    backend = Counting()
    config = ke.CollectionConfig(eigendecomposition_threshold=2)
    factor = observe(make(config, backend), batch())
    for damping in (0.1, 0.2):
        factor.register_matpower(-1, constant(damping))
    refresh(factor)
    assert backend.calls == {"eigh": 1, "damped_inverse": 0, "damped_cholesky": 0}


def test_blocks_whose_dampings_are_equal_share_one_array():
    factor = observe(make(), batch())
    lambdas = [0.5, 0.5, 0.7]
    for i in range(3):
        factor.register_matpower(-1, lambda i=i: lambdas[i])
    refresh(factor)
    first, second, third = factor.stored.values()
    assert first is second
    assert first is not third
    lambdas[1] = 0.7
    refresh(factor)
    first, second, third = factor.stored.values()
    assert second is third
    assert first is not second


def test_callables_with_one_identity_are_one_registration():
    factor, funcs = observe(make(), batch()), [constant(0.5), constant(0.5)]
    for func in funcs:
        func.func_id = ("damping", 0.5)
        factor.register_matpower(-1, func)
    refresh(factor)
    assert len(factor.stored) == 1
    V = np.eye(D)
    found = [factor.left_multiply_matpower(V, -1, func) for func in funcs]
    np.testing.assert_array_equal(*found)


def test_eigenvalues_are_clipped_before_damping_where_there_are_eigenvalues():
    config = ke.CollectionConfig(eigenvalue_clipping_threshold=2.0)
    values, vectors = np.linalg.eigh(moment(batch()))
    assert values[0] < 2.0 < values[-1]
    factor, func = observe(make(config), batch()), constant(0.1)
    factor.register_matpower(-1, func)
    refresh(factor)
    plain = factor.left_multiply_matpower(np.eye(D), -1, func)
    np.testing.assert_allclose(plain, np.linalg.inv(damped(factor.cov, 0.1)), rtol=DOUBLE)
    factor.register_matpower(-0.5, func)
    refresh(factor)
    for exp in (-1, -0.5):
        truth = (vectors * (np.maximum(values, 2.0) + 0.1) ** exp) @ vectors.T
        clipped = factor.left_multiply_matpower(np.eye(D), exp, func)
        np.testing.assert_allclose(clipped, truth, rtol=DOUBLE, atol=DOUBLE)


# -- what is fresh and what is stored --------------------------------------------------------------


def test_power_one_is_fresh_and_all_others_are_of_the_last_refresh():
    lam = {"value": 0.3}
    factor, func = observe(make(), batch(0)), lambda: lam["value"]
    factor.register_matpower(-1, func)
    factor.register_cholesky(func)
    refresh(factor)
    old = factor.cov
    observe(factor, batch(1))
    lam["value"] = 0.9
    eye = np.eye(D)
    fresh = factor.left_multiply_matpower(eye, 1, func)
    np.testing.assert_allclose(fresh, damped(factor.cov, 0.9), rtol=DOUBLE)
    stale = factor.left_multiply_matpower(eye, -1, func)
    np.testing.assert_allclose(stale, np.linalg.inv(damped(old, 0.3)), rtol=DOUBLE)
    root = factor.left_multiply_cholesky(eye, func, transpose=False, inverse=False)
    np.testing.assert_allclose(root @ root.T, damped(old, 0.3), rtol=DOUBLE)
    refresh(factor)
    renewed = factor.left_multiply_matpower(eye, -1, func)
    np.testing.assert_allclose(renewed, np.linalg.inv(damped(factor.cov, 0.9)), rtol=DOUBLE)


def test_a_factor_with_nothing_registered_has_nothing_to_refresh():
    factor = observe(make(), batch())
    factor.register_matpower(1, constant(0.1))
    assert not factor.has_inverses
    assert factor.make_inverse_update_ops() == []


# -- element types ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_everything_has_the_type_of_the_statistics(dtype):
    factor, func = observe(make(), batch(dtype=dtype)), constant(0.1)
    factor.register_matpower(-1, func)
    factor.register_matpower(-0.5, func)
    factor.register_cholesky(func)
    refresh(factor)
    kept = np.float64 if dtype is np.float64 else np.float32
    assert {array.dtype for array in factor.arrays().values()} == {np.dtype(kept)}
    inverse = factor.left_multiply_matpower(np.eye(D, dtype=kept), -1, func)
    assert inverse.dtype == kept
    truth = np.linalg.inv(damped(factor.cov.astype(np.float64), 0.1))
    np.testing.assert_allclose(inverse, truth, rtol=SINGLE, atol=SINGLE)


def test_numbers_whose_squares_overflow_single_precision_make_the_average_double():
    small, large = batch(0, np.float32), batch(1, np.float32, scale=1e20)
    factor = observe(make(), small)
    assert factor.cov.dtype == np.float32
    observe(factor, large, decay=1.0)
    assert factor.cov.dtype == np.float64
    expected = (moment(small) + moment(large)) / 2
    np.testing.assert_allclose(factor.cov, expected, rtol=1e-6)


# -- refusals --------------------------------------------------------------------------------------


def poisoned(value, dtype=np.float64):
    values = batch(5, dtype)
    values["x"][3, 1] = value
    return values


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (poisoned(np.nan), ke.NonFiniteError),
        (poisoned(-np.inf, np.float32), ke.NonFiniteError),
        (poisoned(1e200), ke.NonFiniteError),
        ({"x": np.ones((N, D + 1))}, ke.ShapeError),
        ({"x": np.ones((0, D))}, ke.InputError),
        ({"y": np.ones((N, D))}, ke.UnknownNameError),
    ],
    ids=["nan", "inf", "overflow", "features", "empty", "missing"],
)
def test_a_batch_that_does_not_fit_leaves_the_factor_as_it_was(values, error):
    factor, func = observe(make(), batch()), constant(0.1)
    factor.register_matpower(-1, func)
    refresh(factor)
    before = {name: array.copy() for name, array in factor.arrays().items()}
    with pytest.raises(error):
        observe(factor, values)
    after = factor.arrays()
    assert before.keys() == after.keys()
    assert_arrays_equal(after, before)
    assert factor.average.weight == 1.0


def test_a_refresh_that_fails_keeps_the_powers_of_the_last():
    lam = {"value": 0.1}
    factor, func = observe(make(), batch()), lambda: lam["value"]
    factor.register_matpower(-1, func)
    refresh(factor)
    before = factor.left_multiply_matpower(np.eye(D), -1, func)
    lam["value"] = -1.0
    with pytest.raises(ValueError, match="damping"):
        refresh(factor)
    factor.average.value[0, 0] = np.nan
    with pytest.raises(ke.NonFiniteError, match="NaN"):
        refresh(factor)
    np.testing.assert_array_equal(factor.left_multiply_matpower(np.eye(D), -1, func), before)


def test_reading_what_was_not_registered_or_not_computed_says_so():
    factor, func, other = observe(make(), batch()), constant(0.1), constant(0.2)
    factor.register_matpower(-1, func)
    V, options = np.eye(D), {"transpose": False, "inverse": False}
    for read in (
        lambda: factor.left_multiply_matpower(V, -0.5, func),
        lambda: factor.right_multiply_matpower(V, -1, other),
        lambda: factor.left_multiply_cholesky(V, func, **options),
    ):
        with pytest.raises(KeyError, match="not registered"):
            read()
    with pytest.raises(ke.NotReadyError, match="not computed yet"):
        factor.left_multiply_matpower(V, -1, func)
    with pytest.raises(ke.NotReadyError, match="no statistics yet"):
        make().left_multiply_matpower(V, 1, func)


def test_the_steps_of_a_life_come_in_order():
    factor = make()
    with pytest.raises(ke.NotReadyError, match="instantiate_cov_variables"):
        factor.make_covariance_update_op(0.9)
    factor.instantiate_cov_variables()
    with pytest.raises(ValueError, match="exist already"):
        factor.instantiate_cov_variables()
    factor.instantiate_inv_variables()
    with pytest.raises(ValueError, match="exist already"):
        factor.instantiate_inv_variables()
    with pytest.raises(ValueError, match="before instantiate_inv_variables"):
        factor.register_matpower(-1, constant(0.1))


@pytest.mark.parametrize("shape", [(D,), (D + 1, D + 1), (D, D, D)])
def test_operands_of_another_shape_are_refused(shape):
    factor, func = observe(make(), batch()), constant(0.1)
    for multiply in (factor.left_multiply_matpower, factor.right_multiply_matpower):
        with pytest.raises(ke.ShapeError, match="cannot multiply"):
            multiply(np.ones(shape), 1, func)
