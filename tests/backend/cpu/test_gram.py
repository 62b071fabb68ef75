"""Second moments of rows equal the definition, for every way rows lie in memory."""

import tracemalloc
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.gram import matrices, mirror
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.errors import ShapeError
from tests.backend import truths
from tests.comparing import assert_near

# Float64 sums of at most 1e4 products of order one, relative to the largest entry.
ROUNDING = 1e-13
# The same in float32.
SINGLE_ROUNDING = 5e-6


def room(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


# Arrays with the axis of their features.
ROWS = {
    "rows": (room(50, 7), -1),
    "one_row": (room(1, 7), -1),
    "one_feature": (room(50, 1), -1),
    "a_vector_is_one_row": (room(7), -1),
    "more_features_than_rows": (room(5, 40), 1),
    "columns": (room(7, 50), 0),
    "transposed": (room(7, 50).T, -1),
    "sequences": (room(3, 5, 7), -1),
    "sequences_time_first": (room(5, 3, 7).swapaxes(0, 1), -1),
    "channels_first_small": (room(4, 6, 3, 3), 1),
    "channels_first_large": (room(2, 6, 30, 30), 1),
    "channels_first_of_one_image": (room(1, 6, 30, 30), 1),
    "channels_last": (room(4, 3, 3, 6), -1),
    "channels_in_the_middle": (room(4, 3, 6, 3), 2),
    "cropped_images": (room(3, 6, 9, 9)[:, :, 2:7, 1:8], 1),
    "strided_images": (room(3, 6, 9, 9)[:, :, ::2, ::2], 1),
    "every_other_channel": (room(3, 12, 30, 30)[:, ::2], 1),
    "every_other_feature": (room(50, 14)[:, ::2], -1),
    "every_other_row": (room(50, 7)[::2], -1),
    "reversed_rows": (room(50, 7)[::-1], -1),
    "reversed_features": (room(50, 7)[:, ::-1], -1),
    "broadcast_rows": (np.broadcast_to(room(7), (50, 7)), -1),
    "broadcast_batch": (np.broadcast_to(room(1, 6, 30, 30), (3, 6, 30, 30)), 1),
    "fortran_order": (np.asfortranarray(room(4, 5, 6, 7)), 1),
    "side_beyond_a_mirror_block": (room(300, 270), -1),
}


def rows_of(x, axis):
    x = np.asarray(x, np.float64)
    return (
        np.array([x[index] for index in np.ndindex(x.shape[:-1])])
        if axis == -1
        else rows_of(np.moveaxis(x, axis, -1), -1)
    )


def second_moment(x, out, *, scratch_bytes=64 << 20, feature_axis=-1, **options):
    backend = NumpyBackend(scratch_bytes=scratch_bytes)
    backend.second_moment(x, out, Accumulation(**options), feature_axis=feature_axis)
    backend.mirror(out)


@pytest.mark.parametrize("scratch_bytes", [64 << 20, 100], ids=["roomy", "one_row_at_a_time"])
@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize(("x", "axis"), ROWS.values(), ids=ROWS)
def test_gram_matrix_is_added_to_scaled_old_matrix(x, axis, homogeneous, scratch_bytes):
    new = truths.moment(rows_of(x, axis), homogeneous)
    old = truths.moment(room(9, len(new)), False)
    out = old.copy()
    second_moment(
        x,
        out,
        scratch_bytes=scratch_bytes,
        feature_axis=axis,
        homogeneous=homogeneous,
        alpha=0.3,
        beta=0.7,
    )
    assert_near(out, 0.7 * old + 0.3 * new, ROUNDING)
    np.testing.assert_array_equal(out, out.T)


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize(("x", "axis"), ROWS.values(), ids=ROWS)
def test_zero_beta_overwrites_nan(x, axis, homogeneous):
    expected = truths.moment(rows_of(x, axis), homogeneous)
    out = np.full_like(expected, np.nan)
    second_moment(x, out, feature_axis=axis, homogeneous=homogeneous)
    assert_near(out, expected, ROUNDING)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int64])
@pytest.mark.parametrize(("x", "axis"), ROWS.values(), ids=ROWS)
def test_rows_are_accumulated_in_dtype_of_result(x, axis, dtype):
    x = (4 * x).astype(dtype)
    expected = truths.moment(rows_of(x, axis), True)
    out = np.zeros(expected.shape, np.float32)
    second_moment(x, out, feature_axis=axis, homogeneous=True)
    assert_near(out, expected, SINGLE_ROUNDING)


def test_float32_rows_give_exact_float64_result():
    x = room(50, 7).astype(np.float32)
    out = np.zeros((7, 7))
    second_moment(x, out)
    assert_near(out, truths.moment(x, False), ROUNDING)


@pytest.mark.rounding
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((300, 700), -1),
        ((3000, 300), -1),
        ((9000, 128), -1),
        ((9, 300, 16, 16), 1),
        ((1, 128, 9999), 1),
    ],
    ids=["bands_of_features", "parts_of_rows", "parts_of_many_rows", "images", "one_line"],
)
def test_large_gram_matrix_of_threads_equals_definition(shape, axis, threads):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rows = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    expected = np.float64(0.5) + rows.T @ rows
    out = np.full(expected.shape, 1.0, np.float32)
    backend = NumpyBackend(threads=threads)
    # Memory that is used again holds what must not be read.
    np.full(expected.shape, np.nan, np.float32)
    backend.second_moment(x, out, Accumulation(True, beta=0.5), feature_axis=axis)
    backend.mirror(out)
    assert_near(out, expected, SINGLE_ROUNDING)


@pytest.mark.rounding
def test_sum_of_many_positive_rows_has_float32_accuracy():
    x = np.random.default_rng(0).random((200_000, 2)).astype(np.float32)
    out = np.zeros((3, 3), np.float32)
    second_moment(x, out, homogeneous=True, alpha=1 / len(x))
    # A running float32 sum would drift by about 1e-5.
    np.testing.assert_allclose(out[2, :2], x.astype(np.float64).mean(axis=0), rtol=5e-7)


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 3, 5)])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_empty_rows_only_scale_old_matrix(shape, beta, homogeneous):
    old = np.full((5 + homogeneous,) * 2, 2.0)
    out = np.full_like(old, np.nan) if beta == 0 else old.copy()
    second_moment(np.zeros(shape), out, homogeneous=homogeneous, beta=beta)
    np.testing.assert_array_equal(out, beta * old)


UNCOPIED = ["rows", "columns", "transposed", "sequences", "channels_first_large", "channels_last"]


@pytest.mark.parametrize("name", UNCOPIED)
def test_common_layouts_are_not_copied(name):
    x, axis = ROWS[name]
    pieces = list(matrices(np.moveaxis(x, axis, -1), x.dtype, 1 << 20))
    assert all(np.shares_memory(piece, x) for piece in pieces)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_copies_are_within_scratch_bytes(dtype):
    x = np.ones((40, 20, 20, 50), dtype)[:, ::2, :, ::2]
    out = np.zeros((26, 26))
    tracemalloc.start()
    second_moment(x, out, scratch_bytes=200_000, homogeneous=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The float32 ones that sum a block of rows, and small objects, come on top.
    assert peak < 300_000
    np.testing.assert_array_equal(out, 40 * 10 * 20)


def test_copies_of_parallel_tasks_are_within_scratch_bytes():
    backend = NumpyBackend(scratch_bytes=400_000, threads=2)
    x = np.ones((40, 20, 20, 50), np.float16)[:, ::2, :, ::2]
    outs = [np.zeros((26, 26)) for _ in range(8)]
    tracemalloc.start()
    how = Accumulation(homogeneous=True)
    backend.workers.run([partial(backend.second_moment, x, out, how) for out in outs])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The ones of each, which sum a block of rows, and small objects come on top.
    assert peak < 550_000
    for out in outs:
        np.testing.assert_array_equal(np.tril(out), np.tril(np.full(out.shape, 40 * 10 * 20)))


@pytest.mark.parametrize("side", [1, 2, 255, 256, 257, 600])
def test_mirror_copies_lower_triangle_to_upper(side):
    matrix = room(side, side)
    expected = np.tril(matrix) + np.tril(matrix, -1).T
    matrix[np.triu_indices(side, 1)] = np.nan
    mirror(matrix)
    np.testing.assert_array_equal(matrix, expected)


WRONG = {
    "side": (np.zeros((6, 6)), "shape"),
    "columns": (np.zeros((5, 6)), "shape"),
    "order": (np.zeros((5, 10))[:, ::2], "C-contiguous"),
    "dtype": (np.zeros((5, 5), np.float16), "float32 or float64"),
    "rank": (np.zeros((5, 5, 1)), "shape"),
}


@pytest.mark.parametrize(("out", "message"), WRONG.values(), ids=WRONG)
def test_result_of_wrong_shape_raises_error(out, message):
    with pytest.raises(ShapeError, match=message):
        NumpyBackend().second_moment(np.ones((3, 5)), out)
