"""What of the NumPy backend is not linear algebra: arrays in and out, finiteness, random draws."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.memory_space import HOST
from kfac_engine.errors import BackendError
from tests.foreign import Foreign

BACKEND = NumpyBackend()


def test_numpy_and_dlpack_arrays_are_not_copied():
    array = np.arange(6.0).reshape(2, 3)
    assert BACKEND.asarray(array) is array
    assert np.shares_memory(BACKEND.asarray(Foreign(array)), array)
    assert BACKEND.to_numpy(array) is array


@pytest.mark.parametrize("value", [[[1, 2], [3, 4]], np.float32(3), 2.5])
def test_numbers_become_arrays_of_requested_dtype(value):
    found = BACKEND.asarray(value, np.float32)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, value)


def test_device_array_error_suggests_copy():
    device_array = type("ndarray", (), {"__module__": "cupy"})()
    with pytest.raises(BackendError, match=r"copy it to the host first \(cupy.asnumpy\)"):
        BACKEND.asarray(device_array)


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "cropped": lambda x: x[1:, :, 2:],
    "strided": lambda x: x[:, ::2, ::3],
    "reversed": lambda x: x[::-1, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "one": lambda x: x[2:3, 4, 6],
}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(("bad", "finite"), [(3.0, True), (np.nan, False), (-np.inf, False)])
def test_are_finite_detects_single_nonfinite_entry_of_view(view, bad, finite, dtype):
    x = np.ones((4, 6, 9), dtype)
    x[2, 4, 6] = bad
    assert np.isfinite(BACKEND.squared_norms([view(x)])).tolist() == [finite]


def test_are_finite_ignores_entries_outside_view():
    x = np.ones((4, 6))
    x[:, 1::2] = np.nan
    assert BACKEND.squared_norms([x[:, ::2]]) == [12.0]


SQUARES = {
    "single_overflows": (np.array([1.0, 1e20], np.float32), False),
    "double_holds_it": (np.array([1.0, 1e20]), True),
    "half_is_squared_in_single": (np.array([6e4] * 9, np.float16), True),
    "bfloat_overflows_like_single": (np.array([1.0, 1e20], ml_dtypes.bfloat16), False),
    "integers": (np.array([2**40, -1]), True),
    "booleans": (np.array([True, False]), True),
    "nothing": (np.zeros((0, 3)), True),
}


@pytest.mark.parametrize(("x", "finite"), SQUARES.values(), ids=SQUARES)
def test_squared_norm_of_overflowing_entries_is_infinite(x, finite):
    assert np.isfinite(BACKEND.squared_norms([x])).tolist() == [finite]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("bad", [1.0, np.nan, np.inf, -np.inf])
def test_largest_floats_are_finite(view, bad, dtype):
    x = np.full((4, 6, 9), ml_dtypes.finfo(dtype).max, dtype)
    x[1, 3, 5] *= -1
    x[2, 4, 6] = bad
    assert BACKEND.are_finite([view(x)]).tolist() == [bool(np.isfinite(bad))]


def test_are_finite_allocates_no_copy():
    x = np.full(1_000_000, 3e38, np.float32)
    tracemalloc.start()
    assert BACKEND.are_finite([x, x[::2]]).all()
    assert HOST.finite([x]).each == [True]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 10
