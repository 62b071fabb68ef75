"""Moments of few features with channels first are those of their rows, however images are cut."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.gram import add_batched_gram, as_gram_stack
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers
from tests.backend import truths

# Float64 sums of at most 1e5 products of order one, relative to the largest entry.
ROUNDING = 1e-13

IMAGES = {
    "one_feature": (3, 1, 8, 8),
    "odd_number_of_features": (5, 7, 6, 6),
    "pieces_of_large_images": (2, 6, 40, 52),
    "many_small_images": (400, 20, 6, 6),
    "lines": (4, 5, 90),
    "volumes": (3, 4, 4, 4, 4),
}


def images(shape, dtype=np.float64):
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("scratch_bytes", [16 << 20, 1], ids=["roomy", "image_by_image"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
def test_gram_matrix_is_added_to_scaled_old_matrix(shape, threads, scratch_bytes):
    x = np.moveaxis(images(shape), 1, -1)
    d, old = shape[1], images((shape[1], shape[1]))
    out, means = old.copy(), (scratch_bytes, Workers(threads))
    stack = as_gram_stack(x, out.dtype)
    assert stack is not None
    assert np.shares_memory(stack, x)
    add_batched_gram(stack, out, Accumulation(False, 0.3, 0.7), *means)
    expected = 0.7 * old + 0.3 * truths.moment(x.reshape(-1, d), homogeneous=False)
    np.testing.assert_allclose(out, expected, atol=ROUNDING * np.abs(expected).max())
    out[:] = np.nan
    add_batched_gram(stack, out, Accumulation(False, 1.0, 0.0), *means)
    assert np.isfinite(out).all()


LEFT = {
    "rows": images((50, 7)),
    "channels_last": images((3, 8, 8, 7)),
    "many_features": np.moveaxis(images((3, 49, 8, 8)), 1, -1),
    "few_positions": np.moveaxis(images((3, 7, 5, 5)), 1, -1),
    "every_other_pixel": np.moveaxis(images((3, 7, 16, 16))[..., ::2], 1, -1),
    "positions_that_cannot_be_cut": np.moveaxis(images((2, 2, 1031)), 1, -1),
    "no_rows": np.moveaxis(images((0, 7, 8, 8)), 1, -1),
    "single_precision": np.moveaxis(images((3, 7, 8, 8), np.float32), 1, -1),
}


@pytest.mark.parametrize("x", LEFT.values(), ids=LEFT)
def test_unsuitable_layouts_have_no_gram_stack(x):
    assert as_gram_stack(x, np.dtype(np.float64)) is None
