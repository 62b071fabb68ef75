"""Arrays find their library, and foreign ones become NumPy's."""

import sys
from types import ModuleType

import numpy as np
import pytest

from kfac_engine.backend.namespace import array_module, as_array
from kfac_engine.errors import InputError


def foreign_type(module):
    return type("ndarray", (), {"__module__": module})


@pytest.mark.parametrize(
    "array",
    [np.zeros(2), np.float32(1), np.zeros((2, 2)).T, np.zeros(3).view(np.recarray)],
    ids=["array", "scalar", "view", "subclass"],
)
def test_array_module_of_numpy_array_is_numpy(array):
    assert array_module(array) is np


def test_array_module_of_cupy_array_is_cupy(monkeypatch):
    cupy = ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = foreign_type("cupy._core.core")()
    assert array_module(array) is cupy
    assert as_array(array) is array


@pytest.mark.parametrize(
    "value", [[1.0], foreign_type("torch")(), None], ids=["list", "torch", "none"]
)
def test_array_module_of_other_object_raises_error(value):
    with pytest.raises(InputError, match=r"array of NumPy or CuPy, got (builtins|torch)\."):
        array_module(value)


def test_as_array_returns_numpy_array_unchanged():
    array = np.zeros(3)
    assert as_array(array) is array


def test_as_array_does_not_copy_dlpack_arrays():
    class Foreign:
        array = np.arange(3.0)

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    assert np.shares_memory(as_array(Foreign()), Foreign.array)


@pytest.mark.parametrize("value", [[1.0, 2.0], (1, 2), 3.0, np.float32(3)], ids=repr)
def test_numbers_and_lists_become_numpy_arrays(value):
    found = as_array(value)
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, value)
