"""Sums of squares are those of float64, whatever the strides; what is not finite is found."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.reductions import (
    all_finite,
    between_infinities,
    example_sums,
    squared_norm,
)

# A float32 sum of a thousand squares, in any order.
ROUNDING = 1e-5

LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: np.asfortranarray(x),
    "axes_turned": lambda x: x.transpose(2, 0, 1),
    "with_gaps": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[::-1, :, ::-1],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "a_number": lambda x: x[0, 0, 0],
    "nothing": lambda x: x[:0],
}


def numbers(dtype=np.float32):
    return (np.random.default_rng(3).standard_normal((6, 9, 20)) * 5).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64, bool])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_squared_norm_is_correct_for_any_strides(layout, dtype):
    x = np.asarray(layout(numbers(dtype)))
    expected = (x.astype(np.float64) ** 2).sum()
    np.testing.assert_allclose(squared_norm(x), expected, rtol=ROUNDING)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", ["rows", "columns", "with_gaps"])
def test_all_finite_detects_single_nonfinite_entry(layout, bad, dtype):
    x = numbers(dtype)
    x[3, 4, 6] = bad
    x = LAYOUTS[layout](x)
    assert not np.isfinite(squared_norm(x))
    assert not all_finite(x)
    assert not between_infinities(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_finite_accepts_largest_floats(dtype):
    x = np.array([np.finfo(dtype).max, -np.finfo(dtype).max])
    assert squared_norm(x) == np.inf
    assert all_finite(x)


@pytest.mark.parametrize("summed", [(), (1,), (2, 3), (1, 3), (1, 2, 3)])
@pytest.mark.parametrize("x_shape", [(4, 5, 6, 7), (4, 1, 6, 7), (1, 5, 1, 7)])
@pytest.mark.parametrize("turned", [False, True])
def test_example_sums_equal_sums_of_single_examples(turned, x_shape, summed):
    rng = np.random.default_rng(5)
    x, ds = rng.standard_normal(x_shape), rng.standard_normal((4, 5, 6, 7))
    if turned:
        x, ds = np.asfortranarray(x), np.asfortranarray(ds)
    found = example_sums(x, ds, summed)
    every = np.zeros(ds.shape) + x
    axes = tuple(axis - 1 for axis in summed)
    for n, row in enumerate(found):
        products, sums = (part.sum(axis=axes).ravel() for part in (every[n] * ds[n], ds[n]))
        np.testing.assert_allclose(row, np.concatenate([products, sums]), atol=1e-12)
