"""Sums over patches that are never made, against patches read pixel by pixel."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.patch_sums import add_patch_squares, patch_sums, row_sums
from kfac_engine.backend.window import Window, pointwise
from tests.backend.geometries import CORNERS, STRIDE_ONE, STRIDED, Case, nightly_but_covering
from tests.backend.truths import patches

EXACT = 1e-12  # float64 sums of some hundred numbers, in another order
DOUBLE = np.dtype(np.float64)


def rows(case, x):
    w = case.window
    return patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)


@pytest.mark.parametrize("case", nightly_but_covering([*STRIDED[::2], *STRIDE_ONE[::3], *CORNERS]))
def test_patch_sums_equal_sums_of_patches(case):
    x = case.images()
    z = rows(case, x)
    close = {"rtol": 0, "atol": EXACT * max(1.0, np.abs(z).sum())}
    np.testing.assert_allclose(patch_sums(x, case.window, DOUBLE, np), z.sum(axis=(0, 1)), **close)
    np.testing.assert_allclose(row_sums(x, case.window, DOUBLE, np), z.sum(axis=1), **close)
    squares = np.ones(z.shape[2])
    add_patch_squares(x, case.window, squares, np, alpha=0.5, beta=2.0)
    np.testing.assert_allclose(squares, 0.5 * (z**2).sum(axis=(0, 1)) + 2, **close)


def test_patch_sums_of_many_images_have_float64_accuracy():
    case = Case(CORNERS[1].window, 200, 2, (2, 1))
    x = case.images().astype(ml_dtypes.bfloat16)
    found = np.full(case.window.taps * 2, np.nan, np.float32)
    add_patch_squares(x, case.window, found, np, alpha=1.0, beta=0.0)
    wanted = (rows(case, x.astype(np.float64)) ** 2).sum(axis=(0, 1))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)  # float32 sums of 64 squares


def test_row_sums_of_single_positions_equal_rows():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    found = row_sums(x, pointwise(0), DOUBLE, np)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("squares", [False, True], ids=["sums", "squares"])
def test_patch_sums_of_large_image_use_bounded_memory(squares):
    """Working memory is 24 MiB and the sums of a tap, for images of any size."""
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    x = np.ones((1, 64, 400, 400), np.float32)
    out = np.zeros(9 * 64, np.float32)
    tracemalloc.start()
    if squares:
        add_patch_squares(x, window, out, np, alpha=1.0, beta=0.0)
    else:
        out[:] = patch_sums(x, window, x.dtype, np)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert x.nbytes > 39e6
    assert peak < 34e6
    # A tap sees 400 or, at the border, 399 pixels along each axis.
    seen = np.array([399, 400, 399])
    expected = np.multiply.outer(seen, seen)[..., None].repeat(64, axis=-1)
    np.testing.assert_array_equal(out.reshape(3, 3, 64), expected)
