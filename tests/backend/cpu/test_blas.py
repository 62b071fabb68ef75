"""Products in place on views equal NumPy's in float64, and nothing else is touched."""

import gc

import numpy as np
import pytest

from kfac_engine.backend.cpu import blas

# Sums of at most 40 products of numbers of order one: rounding of each, in units of the precision.
TOLERANCE = {"f": 40 * np.finfo("f").eps, "d": 40 * np.finfo("d").eps}


def room(shape, char, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(char)


# Views (m, k) = (5, 7) that BLAS can read where they lie.
VIEWS = {
    "rows": lambda char, seed: room((5, 7), char, seed),
    "columns": lambda char, seed: room((7, 5), char, seed).T,
    "rows_of_a_wider_matrix": lambda char, seed: room((5, 30), char, seed)[:, 11:18],
    "columns_of_a_wider_matrix": lambda char, seed: room((7, 30), char, seed).T[11:16],
    "every_third_row": lambda char, seed: room((15, 7), char, seed)[::3],
}
UNREADABLE = {
    "reversed_rows": room((5, 7), "f", 0)[::-1],
    "reversed_columns": room((5, 7), "f", 0)[:, ::-1],
    "broadcast_row": np.broadcast_to(room(7, "f", 0), (5, 7)),
    "overlapping_rows": np.lib.stride_tricks.sliding_window_view(room(11, "f", 0), 7),
    "every_other_column": room((5, 14), "f", 0)[:, ::2],
    "rows_between_elements": np.zeros(5, [("x", "f", 7), ("gap", "i1")])["x"],
    "misaligned": np.zeros(5 * 7 * 4 + 1, "i1")[1:].view("f").reshape(5, 7),
}


@pytest.mark.parametrize("char", "fd")
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("x", VIEWS.values(), ids=VIEWS)
def test_syrk_writes_only_lower_triangle(x, beta, char):
    x, whole = x(char, 1), room((9, 9), char, 2)
    out, before = whole[2:7, 3:8], whole.copy()
    expected = beta * out.astype(float) + 0.3 * x.astype(float) @ x.T.astype(float)

    blas.syrk(x, out, alpha=0.3, beta=beta)

    lower = np.tril_indices(5)
    np.testing.assert_allclose(out[lower], expected[lower], atol=TOLERANCE[char])
    before[2:7, 3:8][lower] = out[lower]
    np.testing.assert_array_equal(whole, before)


@pytest.mark.rounding
@pytest.mark.parametrize("char", "fd")
@pytest.mark.parametrize("y", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("x", VIEWS.values(), ids=VIEWS)
def test_gemm_equals_numpy_for_all_layouts(x, y, char):
    x, y, whole = x(char, 1)[:4], y(char, 3), room((9, 9), char, 2)
    out, before = whole[2:6, 3:8], whole.copy()
    expected = 0.5 * out.astype(float) - 2.0 * x.astype(float) @ y.T.astype(float)

    blas.gemm(x, y, out, alpha=-2.0, beta=0.5)

    np.testing.assert_allclose(out, expected, atol=TOLERANCE[char])
    before[2:6, 3:8] = out
    np.testing.assert_array_equal(whole, before)


@pytest.mark.parametrize("side", [1, 3, 40, 300])
@pytest.mark.parametrize("depth", [1, 50])
@pytest.mark.parametrize("char", "fd")
def test_zero_beta_overwrites_nan(side, depth, char):
    x, out = room((side, depth), char, 1), np.full((side, side), np.nan, char)
    blas.syrk(x, out, alpha=1.0, beta=0.0)
    assert np.isfinite(out[np.tril_indices(side)]).all()
    full = np.full((side, side), np.nan, char)
    blas.gemm(x, x, full, alpha=1.0, beta=0.0)
    assert np.isfinite(full).all()


def test_gemm_call_reads_current_entries():
    x, y, out = np.ones((1, 2)), np.ones((1, 2)), np.zeros((1, 1))
    call = blas.gemm_call(x, y, out, alpha=1.0, beta=1.0)
    call()
    y[:] = 10.0
    call()
    assert out[0, 0] == 22.0


@pytest.mark.parametrize("x", UNREADABLE.values(), ids=UNREADABLE)
def test_gemm_rejects_unreadable_views(x):
    assert blas.layout(x) is None
    with pytest.raises(AssertionError, match="need a copy"):
        blas.syrk(x, np.zeros((5, 5), "f"), alpha=1.0, beta=0.0)


WRONG_RESULTS = {
    "side": (np.zeros((4, 4), "f"), "cannot hold"),
    "dtype": (np.zeros((5, 5), "d"), "differ"),
    "columns": (np.zeros((5, 5), "f").T[:, :], "must be adjacent"),
    "read_only": (np.broadcast_to(np.zeros((5, 5), "f"), (1, 5, 5))[0], "writeable"),
}


@pytest.mark.parametrize(("out", "message"), WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_gemm_rejects_unwritable_results(out, message):
    with pytest.raises(AssertionError, match=message):
        blas.syrk(room((5, 7), "f", 1), out, alpha=1.0, beta=0.0)
    with pytest.raises(AssertionError, match=message):
        blas.gemm(room((5, 7), "f", 1), room((5, 7), "f", 2), out, alpha=1.0, beta=0.0)


def test_gemm_rejects_operands_of_different_depth():
    with pytest.raises(AssertionError, match="common depth"):
        blas.gemm(np.ones((2, 3)), np.ones((2, 4)), np.zeros((2, 2)), alpha=1.0, beta=0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_gemm_sum_adds_products_of_stacks(shape, dtype):
    rng = np.random.default_rng(5)
    # Matrices and rows of the stacks lie apart, as runs of longer lines do.
    x = rng.integers(-9, 9, (*shape, 6, 5)).astype(dtype)[..., 1:5, :4]
    y = rng.integers(-9, 9, (*shape, 4, 7)).astype(dtype)[..., 1:]
    old = rng.integers(-9, 9, (4, 6)).astype(dtype)
    out = old.copy()
    blas.gemm_sum(x, y, out)
    stacks = x.reshape(-1, 4, 4), y.reshape(-1, 4, 6)
    np.testing.assert_array_equal(out, old + np.einsum("nki,nkj->ij", *stacks))


def test_gemm_call_keeps_references_to_arrays():
    out = np.zeros((2, 2))
    call = blas.gemm_call(np.eye(2), np.full((2, 2), 3.0), out, alpha=1.0, beta=1.0)
    gc.collect()
    np.full((2, 2), 7.0)  # would take the memory of an array that is gone
    call()
    np.testing.assert_array_equal(out, np.full((2, 2), 3.0))
