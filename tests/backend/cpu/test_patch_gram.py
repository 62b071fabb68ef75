"""Moments of patches equal those of patches gathered pixel by pixel, in every form."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cpu import shifted_gram
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.patch_gram import _ALGORITHMS, Images, select_algorithm
from kfac_engine.backend.cpu.shifted_gram import Resources, add_shifted_gram, scratch_numbers
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError
from tests.backend import truths
from tests.backend.geometries import CORNERS, EVERY, STRIDE_ONE, Case, nightly_but_covering
from tests.comparing import assert_near

# Sums of a few hundred products of order one, in float64; the difference of two such sums when the
# frame is subtracted. Relative to the largest entry.
ROUNDING = 1e-13
# The same in float32, with up to 2e4 products whose errors add up like a random walk.
SINGLE_ROUNDING = 5e-6

ALL = [*CORNERS, *EVERY]
UNIT_STRIDES = [case for case in [*CORNERS, *STRIDE_ONE] if set(case.window.strides) == {1}]

HOW, OVERWRITING = Accumulation(False, 0.3, 0.7), Accumulation(False, 1.0, 0.0)
RESOURCES = Resources(Workers(), 4 << 20, 1 << 22)
SAME = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))

MEMORY_ORDERS = {
    "channels_first": lambda x: x,
    "channels_last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1),
    "reversed_images": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every_other_pixel": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed_pixels": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
}
ORDERS = list(MEMORY_ORDERS.values())


def patches(x, window):
    return truths.patches(
        x, window.kernel, window.strides, window.dilations, window.begins, window.ends
    )


def moment(x, window, homogeneous=False):
    rows = patches(x, window)
    return truths.moment(rows.reshape(-1, rows.shape[-1]), homogeneous)


def symmetric(side, seed=9):
    half = np.random.default_rng(seed).standard_normal((side, side))
    return half + half.T


def second_moment(x, window, out, *, scratch_bytes=64 << 20, **options):
    backend = NumpyBackend(scratch_bytes=scratch_bytes)
    backend.patch_second_moment(x, window, out, Accumulation(**options))
    backend.mirror(out)


def seen(case):
    return Images(case.n, case.channels, case.sides)


@pytest.mark.parametrize("case", nightly_but_covering(ALL))
def test_patches_equal_pixelwise_definition(case):
    x = case.images()
    for order in ORDERS:
        found = NumpyBackend().patches(order(x), case.window)
        np.testing.assert_array_equal(found, patches(x, case.window))


@pytest.mark.parametrize("scratch_bytes", [64 << 20, 500], ids=["roomy", "one_patch_at_a_time"])
@pytest.mark.parametrize("case", nightly_but_covering(ALL))
def test_gram_matrix_is_added_to_scaled_old_matrix(case, scratch_bytes):
    i = ALL.index(case)
    x, homogeneous = case.images(), bool(i % 2)
    new = moment(x, case.window, homogeneous)
    old = symmetric(len(new))
    out = old.copy()
    second_moment(
        ORDERS[i % len(ORDERS)](x),
        case.window,
        out,
        scratch_bytes=scratch_bytes,
        homogeneous=homogeneous,
        alpha=0.3,
        beta=0.7,
    )
    assert_near(out, 0.7 * old + 0.3 * new, ROUNDING)
    np.testing.assert_array_equal(out, out.T)


@pytest.mark.parametrize("case", nightly_but_covering(UNIT_STRIDES))
@pytest.mark.parametrize(("few", "threads"), [(0, 1), (96, 2)], ids=["line_by_line", "in_batches"])
def test_shifted_gram_equals_definition_for_all_geometries(few, threads, case, monkeypatch):
    monkeypatch.setattr(shifted_gram, "FEW_CHANNELS", few)
    x = case.images()
    new = moment(x, case.window)
    whole = symmetric(len(new) + 1)
    out = whole[:-1, :-1]
    expected = 0.7 * out + 0.3 * new
    border = whole[-1].copy()

    add_shifted_gram(x, case.window, out, HOW, Resources(Workers(threads), 0, 1 << 22))

    assert_near(np.tril(out), np.tril(expected), ROUNDING)
    np.testing.assert_array_equal(whole[-1], border)


@pytest.mark.parametrize("case", UNIT_STRIDES[::10], ids=str)
def test_shifted_gram_with_zero_beta_overwrites_nan(case):
    new = moment(case.images(), case.window)
    out = np.full_like(new, np.nan)
    add_shifted_gram(case.images(), case.window, out, OVERWRITING, RESOURCES)
    assert_near(np.tril(out), np.tril(new), ROUNDING)


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize("case", [*CORNERS, *EVERY[::20]], ids=str)
def test_zero_beta_overwrites_nan(case, homogeneous):
    expected = moment(case.images(), case.window, homogeneous)
    out = np.full_like(expected, np.nan)
    second_moment(case.images(), case.window, out, homogeneous=homogeneous)
    assert_near(out, expected, ROUNDING)


# Large enough that the rule takes the form named, as the test checks: with few channels and many,
# images at once and in rounds, boxes that differ from tap to tap at one end, at both, or at none.
LARGER = {
    "lines_same": ("shifted", Case(SAME, 20, 40, (7, 8))),
    "lines_of_many_images": ("shifted", Case(SAME, 100, 24, (8, 8))),
    "lines_of_large_images": ("shifted", Case(SAME, 4, 20, (34, 33))),
    "lines_valid": (
        "shifted", Case(Window((3, 2), (1, 1), (1, 1), (0, 0), (0, 0)), 8, 40, (24, 21))),
    "lines_dilated": (
        "shifted", Case(Window((3, 3), (1, 1), (1, 2), (1, 2), (1, 2)), 40, 40, (7, 9))),
    "lines_apart": (
        "shifted", Case(Window((3, 3), (1, 1), (2, 3), (2, 3), (2, 3)), 7, 24, (30, 30))),
    "lines_of_many_channels": ("shifted", Case(SAME, 66, 97, (6, 6))),
    "lines_of_many_channels_at_once": ("shifted", Case(SAME, 12, 100, (9, 8))),
    "lines_along_one_axis": ("shifted", Case(Window((5,), (1,), (1,), (2,), (1,)), 3, 24, (2000,))),
    "lines_volume": (
        "shifted",
        Case(Window((2,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (0,) * 3), 50, 40, (4,) * 3)),
    "plain_few_channels": (
        "im2col", Case(Window((5, 5), (1, 1), (1, 1), (2, 2), (2, 2)), 4, 1, (20, 20))),
    "plain_strided": (
        "im2col", Case(Window((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), 4, 20, (24, 23))),
    "plain_cropped": (
        "im2col", Case(Window((3, 3), (1, 1), (1, 1), (-8, -8), (-8, -8)), 4, 20, (24, 23))),
    "pixels": ("im2col", Case(Window((1, 1), (1, 1), (1, 1), (0, 0), (0, 0)), 4, 20, (24, 23))),
    "pixels_cropped": (
        "im2col", Case(Window((1, 1), (2, 1), (1, 1), (1, -2), (-1, 0)), 4, 20, (24, 23))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["channels_first", "channels_last"])
@pytest.mark.parametrize(("form", "case"), LARGER.values(), ids=LARGER)
def test_gram_matrix_of_larger_images_equals_definition(form, case, order, dtype):
    assert select_algorithm(case.window, seen(case), 1 << 22, 2) == form
    x = case.images().astype(dtype)
    new = moment(x, case.window, homogeneous=True)
    old = symmetric(len(new)).astype(dtype)
    out = old.copy()
    second_moment(MEMORY_ORDERS[order](x), case.window, out, homogeneous=True, alpha=0.1, beta=0.9)
    tolerance = ROUNDING if dtype == np.float64 else SINGLE_ROUNDING
    assert_near(out, 0.9 * old.astype(np.float64) + 0.1 * new, tolerance)
    np.testing.assert_array_equal(out, out.T)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("form", "case"), LARGER.values(), ids=LARGER)
def test_half_precision_images_are_accumulated_in_float32(form, case, dtype):
    del form
    x = case.images().astype(dtype)
    expected = moment(x, case.window, homogeneous=True)
    out = np.zeros(expected.shape, np.float32)
    second_moment(x, case.window, out, homogeneous=True)
    assert_near(out, expected, SINGLE_ROUNDING)


@pytest.mark.parametrize("homogeneous", [False, True])
def test_no_images_only_scale_old_matrix(homogeneous):
    old = symmetric(27 + homogeneous)
    out = old.copy()
    second_moment(
        np.zeros((0, 3, 5, 5)),
        Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
        out,
        homogeneous=homogeneous,
        beta=0.5,
    )
    np.testing.assert_array_equal(out, 0.5 * old)


@pytest.mark.parametrize("name", LARGER)
def test_scratch_memory_is_within_scratch_bytes(name):
    case, scratch_bytes = LARGER[name][1], 300_000
    x, side = case.images(), case.window.taps * case.channels + 1
    out = np.zeros((side, side))
    backend = NumpyBackend(scratch_bytes=scratch_bytes)
    select_algorithm(
        case.window, seen(case), 1 << 30, 2
    )  # geometry, which is kept, is no working memory
    tracemalloc.start()
    backend.patch_second_moment(x, case.window, out, Accumulation(homogeneous=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    backend.mirror(out)
    # Sums of patches and small objects come on top: those of two images in each of two threads,
    # which rarely meet.
    assert peak <= scratch_bytes + 4 * x[0].nbytes + 100_000
    assert_near(out, moment(x, case.window, homogeneous=True), ROUNDING)


FITTING = {name: item for name, item in LARGER.items() if item[0] == "shifted"}


@pytest.mark.parametrize(("form", "case"), FITTING.values(), ids=FITTING)
def test_algorithm_is_selected_only_if_scratch_fits(form, case):
    numbers = scratch_numbers(case.window, *seen(case), 2)
    assert select_algorithm(case.window, seen(case), numbers, 2) == form
    assert select_algorithm(case.window, seen(case), numbers - 1, 2) != form


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("form", "case"), FITTING.values(), ids=FITTING)
def test_shifted_gram_allocates_scratch_numbers(form, case, threads):
    x, side, chunk_bytes = case.images(), case.window.taps * case.channels, 50_000
    out = np.zeros((side, side))
    numbers = scratch_numbers(case.window, *seen(case), threads)
    resources = Resources(Workers(threads), chunk_bytes, numbers)
    tracemalloc.start()
    _ALGORITHMS[form](x, case.window, out, OVERWRITING, resources)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Small objects come on top: arguments of a product for each distance, rows being summed.
    assert peak <= numbers * x.itemsize + chunk_bytes + 200_000


# Enough for moments of two parts of the images; of one, and images for two threads; of one.
ROOMS = {"images": 2.0, "distances": 1.9, "nothing": 1.0}


@pytest.mark.parametrize("shared", ROOMS)
@pytest.mark.parametrize("channels", [48, 100])
def test_threads_are_limited_by_scratch_memory(shared, channels):
    case = Case(SAME, 200 if channels == 48 else 80, channels, (6, 6))
    x, numbers = case.images(), scratch_numbers(SAME, *seen(case), 1)
    out = np.zeros((9 * channels, 9 * channels))
    resources = Resources(Workers(2), 0, int(ROOMS[shared] * numbers))
    tracemalloc.start()
    add_shifted_gram(x, SAME, out, OVERWRITING, resources)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Small objects come on top: arguments of a product for each distance, rows being summed.
    assert peak <= resources.numbers * x.itemsize + 200_000
    assert_near(np.tril(out), np.tril(moment(x, SAME)), ROUNDING)


WRONG = {
    "side_of_result": ((2, 3, 5, 5), np.zeros((27, 28)), "result of shape"),
    "no_room_for_the_one": ((2, 3, 5, 5), np.zeros((27, 27)), "result of shape"),
    "order_of_result": ((2, 3, 5, 5), np.zeros((28, 28)).T[::-1].T, "C-contiguous"),
    "dtype_of_result": ((2, 3, 5, 5), np.zeros((28, 28), np.float16), "float32 or float64"),
    "small_image": ((2, 3, 5, 0), np.zeros((28, 28)), "smaller than the window"),
    "missing_axis": ((2, 3, 5), np.zeros((28, 28)), "has another number of axes"),
}


@pytest.mark.parametrize(("shape", "out", "message"), WRONG.values(), ids=WRONG)
def test_wrong_shapes_raise_error(shape, out, message):
    window = Window((3, 3), (1, 1), (1, 1), (0, 1), (0, 1))
    with pytest.raises(ShapeError, match=message):
        NumpyBackend().patch_second_moment(np.zeros(shape), window, out, Accumulation(True))
