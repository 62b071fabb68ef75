"""What a caller gives comes to the host, from whatever library."""

import numpy as np

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.namespace import on_host
from tests.foreign import Foreign


def test_on_host_returns_host_values_unchanged():
    array = np.ones(3)
    found = on_host({"a": array, "b": [1, 2]}, NumpyBackend())
    assert found["a"] is array
    assert found["b"] == [1, 2]


def test_on_host_shares_arrays_of_other_libraries():
    array = np.ones(3)
    found = on_host({"a": Foreign(array)}, NumpyBackend())["a"]
    assert np.shares_memory(found, array)
