"""The small kernels, thread by thread on the CPU, against what they are to do."""

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.window import Window
from kfac_engine.kernels.averages import count_ids, update_average
from kfac_engine.kernels.finite import find_infinite, sum_squares
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches
from tests.backend import truths
from tests.backend.geometries import CORNERS, STRIDED, Case
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

each_order = pytest.mark.parametrize("order", ORDERS)


each_type = pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])


@each_order
@each_type
@pytest.mark.parametrize("beta", [0.9, 0.0])
@pytest.mark.parametrize("numbers", [1, 255, 20_011])
def test_update_average_equals_definition(
    order: str, beta: float, numbers: int, dtype: type
) -> None:
    rng = np.random.default_rng(0)
    average, measured = rng.normal(size=(2, numbers)).astype(np.float32)
    measured = measured.astype(dtype)
    wanted = np.float32(0.3) * measured.astype(np.float32) + np.float32(beta) * average
    if beta == 0:
        average[...] = np.nan
    update_average(ShimDevice(order), average, measured, 0.3, beta)
    np.testing.assert_allclose(average, wanted, rtol=0, atol=1e-6)  # three float32 roundings


@each_order
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_find_infinite_flags_nonfinite_arrays(dtype: type, bad: float, order: str) -> None:
    largest = np.finfo(dtype).max
    arrays = [np.full(size, largest, dtype) for size in (1, 600, 0, 2000)]
    arrays[3][1999] = bad
    flags = np.ones(4, np.int32)
    find_infinite(ShimDevice(order), arrays, flags)
    assert flags.tolist() == [1, 1, 1, 0]


@each_order
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_squares_equals_definition(dtype: type, order: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype(dtype) for size in (1, 600, 0, 200_003)]
    arrays.append(np.array([np.inf, 1], dtype))
    found = sum_squares(ShimDevice(order), arrays).sum(axis=1)
    wanted = [np.sum(array.astype(np.float64) ** 2) for array in arrays]
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


@each_order
def test_count_ids_ignores_ids_outside_table(order: str) -> None:
    ids = np.random.default_rng(0).integers(-3, 50, (40, 30))
    counts = np.zeros(45, np.int32)
    count_ids(ShimDevice(order), ids, counts)
    inside = ids[(ids >= 0) & (ids < 45)]
    np.testing.assert_array_equal(counts, np.bincount(inside, minlength=45))


@each_order
@pytest.mark.parametrize("side", [1, 31, 32, 33, 100])
def test_mirror_copies_lower_triangle(order: str, side: int) -> None:
    lower = np.tril(np.random.default_rng(0).normal(size=(side, side))).astype(np.float32)
    out = np.where(np.tri(side, dtype=bool), lower, np.float32(np.nan))
    mirror(ShimDevice(order), out)
    np.testing.assert_array_equal(out, lower + np.tril(lower, -1).T)


# Images enough for several pieces; a channel for each thread of more than one block.
MANY = Case(Window((2, 3), (1, 2), (1, 1), (1, 1), (0, 1)), 40, 3, (4, 5))
WIDE = Case(Window((1,), (1,), (1,), (0,), (0,)), 33, 300, (1,))


def squares(case: Case, x: np.ndarray) -> np.ndarray:
    """Sums of squared patches, in float64."""
    w = case.window
    z = truths.patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    return (z**2).sum(axis=(0, 1))


def check_squares(
    case: Case,
    *,
    order: str = "forward",
    dtype: type = np.float32,
    channels_last: bool = False,
    beta: float = 0.9,
    processors: int = 2,
) -> None:
    x = case.images().astype(dtype)
    if channels_last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    old = np.random.default_rng(2).normal(size=case.window.taps * case.channels).astype(np.float32)
    wanted = 0.1 * squares(case, x) + beta * old
    out = old if beta else np.full_like(old, np.nan)
    moments = PatchMoments(ShimDevice(order, processors), 0, 0)
    moments.add_squares(x, case.window, out, alpha=0.1, beta=beta)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-6 * scale)  # float32 sums


@each_order
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", [MANY, WIDE], ids=str)
def test_patch_squares_are_independent_of_thread_order(
    case: Case, channels_last: bool, order: str
) -> None:
    check_squares(case, order=order, channels_last=channels_last)


@pytest.mark.parametrize("case", [*STRIDED[::6], *CORNERS], ids=str)
def test_patch_squares_equal_definition_for_any_geometry(case: Case) -> None:
    check_squares(case)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_squares_are_summed_in_float32(dtype: type) -> None:
    check_squares(MANY, dtype=dtype)


@pytest.mark.parametrize("processors", [1, 1000])
def test_image_sums_are_split_by_processors(processors: int) -> None:
    check_squares(MANY, beta=0, processors=processors)


def test_sums_of_many_images_have_float32_accuracy() -> None:
    """A plain float32 sum of 8192 equal numbers is off by 1e-5."""
    x = np.full((8192, 1, 1), 0.1, np.float32)
    out = np.full(1, np.nan, np.float32)
    window = Window((1,), (1,), (1,), (0,), (0,))
    PatchMoments(ShimDevice(processors=1), 0, 0).add_squares(x, window, out, alpha=1, beta=0)
    wanted = 8192 * np.float64(np.float32(0.1) * np.float32(0.1))
    # Eight pieces are added once more: a rounding each.
    np.testing.assert_allclose(out, wanted, rtol=5e-7)


def test_taps_outside_image_contribute_zero() -> None:
    case = Case(Window((1,), (1,), (1,), (3,), (-3,)), 2, 1, (4,))
    out = np.full(1, np.nan, np.float32)
    x = np.ones((2, 1, 4), np.float32)
    PatchMoments(ShimDevice(), 0, 0).add_squares(x, case.window, out, alpha=1, beta=0)
    assert out.tolist() == [2.0]  # of four outputs an image, the last sees its first pixel


@each_type
@pytest.mark.parametrize("case", [*STRIDED[::15], *CORNERS], ids=str)
def test_write_patches_equals_definition(case: Case, dtype: type) -> None:
    x, w = case.images().astype(dtype), case.window
    wanted = truths.patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    found = np.full(wanted.shape, 7, dtype)
    device = ShimDevice()
    geometry = PatchMoments(device, 0, 0).geometry(x, w)
    write_patches(device, x, found, geometry)
    np.testing.assert_array_equal(found.astype(np.float64), wanted)
