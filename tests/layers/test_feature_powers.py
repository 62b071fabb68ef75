"""Powers of the features of layers, against sums over rows that are written out."""

import numpy as np
import pytest

from kfac_engine.backend.select import select
from kfac_engine.layers.feature_powers import FeaturePowers, LayerInput
from kfac_engine.layers.grouped import StackedDenseView
from kfac_engine.layers.views import RowView, patch_view

BACKEND = select("numpy")
PATCHES = {
    first: patch_view((3, 3), (1, 1), (1, 1), "SAME", channels_first=first)
    for first in (True, False)
}


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def of_images(x):
    """Images ``(n, channels, pixels)``: a row for each, with the mean squares of its channels."""
    return np.sqrt((x**2).mean(axis=-1))


# The view of a layer, its tensors over uses, and its features as rows.
FORMS = {
    "dense": (RowView(), [numbers(7, 3)], lambda x: x),
    "tokens": (RowView(), [numbers(4, 5, 3)], lambda x: x.reshape(-1, 3)),
    "half precision": (RowView(), [numbers(7, 3).astype(np.float16)], lambda x: x),
    "channels of pixels": (RowView(1), [numbers(4, 3, 5)], of_images),
    "patches": (PATCHES[True], [numbers(4, 3, 5, 6)], lambda x: of_images(x.reshape(4, 3, -1))),
    "patches, channels last": (
        PATCHES[False], [numbers(4, 5, 6, 3)],
        lambda x: of_images(x.reshape(4, -1, 3).swapaxes(1, 2))),
    "stack": (StackedDenseView(), [numbers(4, 2, 3)], lambda x: x.reshape(-1, 6)),
    "two uses": (RowView(), [numbers(7, 3), 2 * numbers(5, 3)], lambda x: x),
    "no rows": (RowView(), [numbers(0, 3)], lambda x: x),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_powers_are_means_over_rows_times_examples(form):
    view, tensors, as_rows = FORMS[form]
    names = tuple(f"x{i}" for i in range(len(tensors)))
    powers = FeaturePowers([LayerInput(names, view)], BACKEND)
    powers.add(dict(zip(names, tensors, strict=True)), 4)
    rows = np.concatenate([as_rows(x.astype(np.float64)) for x in tensors])
    expected = [4 * (rows**k).sum(axis=0) / max(len(rows), 1) for k in (2, 4)]
    np.testing.assert_allclose(powers.sums[1:], expected, rtol=1e-5)
    np.testing.assert_array_equal(powers.sums[0], 4)


@pytest.mark.parametrize("lengths", [(6, 6), (6, 9)], ids=["side by side", "apart"])
def test_inputs_follow_one_another_and_parts_add_up(lengths):
    x, y = numbers(lengths[0], 3), numbers(lengths[1], 2)
    inputs = [LayerInput((name,), RowView()) for name in "xy"]
    whole, parts = FeaturePowers(inputs, BACKEND), FeaturePowers(inputs, BACKEND)
    whole.add({"x": x, "y": y}, 6)
    for i in range(3):
        rows = [slice(len(z) // 3 * i, len(z) // 3 * (i + 1)) for z in (x, y)]
        parts.add({"x": x[rows[0]], "y": y[rows[1]]}, 2)
    assert whole.sums.shape == (3, 5)
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-5)
    np.testing.assert_allclose(whole.sums[1, 3:], 6 * (y**2).mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("weights", [[2.0, 0.5, 1.0], [1.0, 0.0, 1.0], [True, False, True]])
def test_parts_in_which_a_target_does_not_count_add_nothing(weights):
    weights, x = np.array(weights), numbers(3, 2)
    powers = FeaturePowers([LayerInput(("x",), RowView())], BACKEND)
    x[weights == 0] = np.inf
    powers.add({"x": x}, 3, [None, weights])
    counts = [3, 3] if (weights > 0).all() else [0, 0]
    np.testing.assert_array_equal(powers.sums[0], counts)
    assert np.isfinite(powers.sums).all()


def test_powers_of_huge_numbers_are_finite():
    powers = FeaturePowers([LayerInput(("x",), RowView())], BACKEND)
    powers.add({"x": np.full((4, 2), 1e30, np.float32)}, 4)
    assert np.isfinite(powers.sums).all()
