"""Dense layers side by side: how their tensors are read and their parameters packed."""

import numpy as np
import pytest

from kfac_engine._types import Rows
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.errors import InputError, ShapeError, UnsupportedError
from kfac_engine.layers.grouped import StackedDensePacking, StackedDenseView, stacked_dense_form

SLOTS, D, K = 3, 4, 2
rng = np.random.default_rng(0)
WEIGHT, BIAS = rng.standard_normal((SLOTS, D, K)), rng.standard_normal((SLOTS, 1, K))


def test_stacked_rows_concatenate_features():
    x = rng.standard_normal((5, 2, SLOTS, D))
    view = StackedDenseView()
    rows = view.rows(x, NumpyBackend())
    assert rows.shape == (5, view.count(x.shape) // 5, view.width(x.shape))
    np.testing.assert_array_equal(rows[3, 1, D : 2 * D], x[3, 1, 1])


def test_stacked_weights_are_packed_as_separate_matrices():
    packed = StackedDensePacking("IO", has_bias=True).pack((WEIGHT, BIAS), "w", np)
    for slot in range(SLOTS):
        np.testing.assert_array_equal(packed[slot], np.vstack([WEIGHT[slot], BIAS[slot]]))


@pytest.mark.parametrize("vector", [WEIGHT, (WEIGHT,), (WEIGHT, BIAS)], ids=["bare", "one", "two"])
def test_unpacking_is_the_inverse_of_packing(vector):
    packing = StackedDensePacking("IO", has_bias=isinstance(vector, tuple) and len(vector) == 2)
    back = packing.unpack(packing.pack(vector, "w", np), vector)
    assert isinstance(back, tuple) == isinstance(vector, tuple)
    pairs = zip(back, vector, strict=True) if isinstance(vector, tuple) else [(back, vector)]
    for found, original in pairs:
        np.testing.assert_array_equal(found, original)


@pytest.mark.parametrize(
    ("vector", "error", "text"),
    [
        ((WEIGHT,), InputError, "needs 2 array"),
        ((WEIGHT[0], BIAS), ShapeError, r"got shape \(4, 2\)"),
        ((WEIGHT, BIAS[:2]), ShapeError, r"not \(3, 2\)"),
        (Rows(np.array([0]), np.ones((1, 2)), 3), UnsupportedError, "whole arrays, not rows"),
    ],
    ids=["no bias", "no stack", "bias of fewer slots", "rows"],
)
def test_wrong_shapes_raise_error(vector, error, text):
    with pytest.raises(error, match=text):
        StackedDensePacking("IO", has_bias=True).pack(vector, "w", np)


def test_unstacked_tensors_and_weights_raise_error():
    with pytest.raises(ShapeError, match=r"shape \(5, 4\)"):
        StackedDenseView().width((5, 4))
    with pytest.raises(ShapeError, match=r"\(stack, d_in, d_out\) is needed"):
        stacked_dense_form((4, 2), has_bias=False)
