"""Comparisons of arrays by name."""

import numpy as np


def assert_arrays_equal(found, expected):
    """Each array of ``expected`` equals the array of its name in ``found``."""
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=str(name))


def assert_arrays_close(found, expected, **tolerances):
    """Each array of ``expected`` is close to the array of its name in ``found``."""
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, err_msg=str(name), **tolerances)


def assert_arrays_near(found, expected, tolerance):
    """The names are equal, and errors are small parts of the largest entry of each array."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = abs(array).max() or 1.0
        np.testing.assert_allclose(
            found[name] / scale, array / scale, rtol=0, atol=tolerance, err_msg=str(name)
        )


def assert_near(found, expected, tolerance, message=""):
    """Errors are small parts of the largest entry."""
    atol = tolerance * abs(np.asarray(expected)).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=message)


def same(left, right):
    """Return whether two dictionaries have equal names and arrays."""
    return left.keys() == right.keys() and all(np.array_equal(left[n], right[n]) for n in left)
