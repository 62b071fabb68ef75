"""Matrices on the way to a factorisation and back, and leaves of inverses, on the CPU."""

import numpy as np
import pytest

from kfac_engine.backend.cuda import recursive_inverse
from kfac_engine.kernels.symmetric import Floor, narrow, widen
from tests.comparing import assert_near
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

each_order = pytest.mark.parametrize("order", ORDERS)
each_type = pytest.mark.parametrize("dtype", [np.float32, np.float64])
NO_FLOOR = Floor(0.0, 0.0)


def lower(side, dtype, count=3, scale=1.0):
    """Stacks whose upper triangles hold what must not be read."""
    found = np.random.default_rng(side).normal(size=(count, side, side)) * scale
    return np.where(np.tri(side, dtype=bool), found, np.nan).astype(dtype)


def symmetric(stack):
    triangles = np.tril(np.nan_to_num(stack.astype(np.float64), nan=0, posinf=0, neginf=0))
    return triangles + np.tril(triangles, -1).swapaxes(1, 2)


def damping_floor(matrix, dtype):
    """What rounding may have moved eigenvalues by: the type's epsilon times the Frobenius norm."""
    limits, largest = np.finfo(dtype), np.abs(matrix).max()
    return max(limits.eps * largest * np.linalg.norm(matrix / largest), limits.tiny)


@each_order
@each_type
@pytest.mark.parametrize("side", [1, 31, 33, 100])
def test_widen_damps_matrices_and_returns_facts(side, dtype, order):
    stack, asked = lower(side, dtype), np.array([0.5, 0.0, 1e-300])
    limits = np.finfo(dtype)
    floor = Floor(float(limits.eps), float(limits.tiny))
    wide, facts = widen(ShimDevice(order), stack, asked, floor)
    whole = symmetric(stack)
    damping = [max(a, damping_floor(m, dtype)) for a, m in zip(asked, whole, strict=True)]
    traces = np.trace(whole, axis1=1, axis2=2)
    ones, zeros = np.ones(3), np.zeros(3)
    # Float64 sums in another order.
    np.testing.assert_allclose(
        facts, np.stack([ones, zeros, damping, traces], 1), rtol=1e-12, atol=1e-12
    )
    np.testing.assert_array_equal(wide, whole + facts[:, 2, None, None] * np.eye(side))


# Of float64, squares overflow and vanish; of float32, entries end at 3e38 and 1e-38.
SCALES = [(np.float64, 1e200), (np.float64, 1e-200), (np.float32, 1e37), (np.float32, 1e-36)]


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
def test_damping_floor_is_relative_for_any_scale(dtype, scale):
    stack = lower(70, dtype, 1, scale)
    limits = np.finfo(dtype)
    floor = Floor(float(limits.eps), float(limits.tiny))
    _, facts = widen(ShimDevice(), stack, np.zeros(1), floor)
    wanted = damping_floor(symmetric(stack)[0], dtype)
    np.testing.assert_allclose(facts[0, 2], wanted, rtol=1e-12)


@each_order
@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_widen_flags_and_replaces_nonfinite_entries(bad, dtype, order):
    stack = lower(40, dtype)
    stack[1, 35, 2] = bad
    wide, facts = widen(ShimDevice(order), stack, np.ones(3), NO_FLOOR)
    assert facts[:, 0].tolist() == [1, 0, 1]
    np.testing.assert_array_equal(wide, symmetric(stack) + np.eye(40))


def test_widen_flags_zero_matrices():
    stack = np.zeros((2, 33, 33), np.float32)
    stack[1, 32, 0] = -1e-30
    _, facts = widen(ShimDevice(), stack, np.zeros(2), Floor(1e-7, 1e-38))
    assert facts[:, 1].tolist() == [1, 0]
    assert facts[0, 2] == 1e-38


@each_order
@each_type
@pytest.mark.parametrize("side", [1, 32, 45])
def test_narrow_returns_symmetric_matrices(side, dtype, order):
    stack = lower(side, np.float64)
    found = narrow(ShimDevice(order), np.ascontiguousarray(stack.swapaxes(1, 2)), dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, symmetric(stack).astype(dtype))


# -- inverses by halves ----------------------------------------------------------------------------


@each_order
def test_leaves_are_inverted_in_place(order):
    """A leaf of full size, and a smaller one in a larger matrix."""
    rng = np.random.default_rng(0)
    matrices = np.stack([np.eye(128) + root @ root.T for root in rng.normal(size=(2, 128, 3))])
    work = np.zeros((2, 140, 140))
    work[:, :128, :128] = matrices
    invert = recursive_inverse._Inverse(ShimDevice(order), np.zeros(2, np.int32))
    invert(work[:, :128, :128], np.zeros(0), 0)
    invert(work[:, 50:77, 50:77], np.zeros(0), 0)
    wanted = np.linalg.inv(matrices)
    wanted[:, 50:77, 50:77] = np.linalg.inv(wanted[:, 50:77, 50:77])
    assert_near(work[:, :128, :128], wanted, 2e-6)


@each_order
def test_a_code_is_that_of_the_first_leaf_without_an_inverse(order):
    codes = np.zeros(2, np.int32)
    invert = recursive_inverse._Inverse(ShimDevice(order), codes)
    work = np.stack([np.diag([1.0, 1, -1, 1, -1]), np.eye(5)])
    for first in (0, 70):
        invert(work, np.zeros(0), first)
    assert codes.tolist() == [3, 0]


@each_order
def test_triangles_are_averaged_and_blocks_transposed(order):
    work = np.random.default_rng(0).normal(size=(2, 80, 80))
    wanted = work.copy()
    mean = 0.5 * (work[:, 30:, 30:] + work[:, 30:, 30:].swapaxes(1, 2))
    wanted[:, 30:, 30:], wanted[:, :30, 30:] = mean, work[:, 30:, :30].swapaxes(1, 2)
    inverse = recursive_inverse._Inverse(ShimDevice(order), np.zeros(2, np.int32))
    inverse._symmetrize(work[:, 30:, 30:])
    inverse._transpose(work[:, 30:, :30], work[:, :30, 30:])
    assert_near(work, wanted, 2e-6)
