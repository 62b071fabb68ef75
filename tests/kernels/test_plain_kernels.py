"""The small kernels, thread by thread on the CPU, against what they are to do."""

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.window import Window
from kfac_engine.kernels.averages import count_ids, update_average
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches
from kfac_engine.kernels.small_products import Product, small_products
from kfac_engine.kernels.spans import Combination, combine, find_infinite, multiply_pairs
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
@pytest.mark.parametrize(("numbers", "begin"), [(1, 0), (255, 0), (256, 1), (20_011, 0)])
def test_update_average_equals_definition(order, beta, numbers, begin, dtype):
    """Also of arrays that do not begin at a multiple of 16 bytes."""
    rng = np.random.default_rng(0)
    average, measured = (rng.normal(size=numbers).astype(np.float32)[begin:] for _ in range(2))
    measured = measured.astype(dtype)
    wanted = np.float32(0.3) * measured.astype(np.float32) + np.float32(beta) * average
    if beta == 0:
        average[...] = np.nan
    update_average(ShimDevice(order), average, measured, 0.3, beta)
    np.testing.assert_allclose(average, wanted, rtol=0, atol=1e-6)  # three float32 roundings


@each_order
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_find_infinite_flags_nonfinite_arrays(dtype, bad, order):
    largest = np.finfo(dtype).max
    arrays = [np.full(size, largest, dtype) for size in (1, 600, 0, 2000)]
    arrays[3][1999] = bad
    arrays.append(arrays[3][1:])  # does not begin at a multiple of 16 bytes
    arrays.append(arrays[3][:1999])
    flags = np.ones(6, np.int32)
    find_infinite(ShimDevice(order), arrays, flags)
    assert flags.tolist() == [1, 1, 1, 0, 0, 1]


@each_order
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inner_products_equal_definition(dtype, order):
    rng = np.random.default_rng(0)
    sizes = (1, 600, 0, 200_003)
    pairs = [tuple(rng.normal(size=size).astype(dtype) for _ in range(2)) for size in sizes]
    pairs.append((pairs[1][0][:-1], pairs[1][1][1:]))  # not both begin at a multiple of 16 bytes
    infinite = np.array([np.inf, 1], dtype)
    *found, largest = multiply_pairs(
        ShimDevice(order), [(x, y) for x, y in [*pairs, (infinite, infinite)]]
    ).sum(axis=1)
    assert largest == np.inf
    wanted = [np.vdot(*np.asarray(pair, np.float64)) for pair in pairs]
    scales = [np.linalg.norm(x) * np.linalg.norm(y) or 1.0 for x, y in pairs]
    np.testing.assert_allclose(
        np.divide(found, scales), np.divide(wanted, scales), rtol=0, atol=1e-15
    )


@each_order
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_combinations_equal_definition(dtype, order):
    rng = np.random.default_rng(0)
    x, y, z, w = (rng.normal(size=size).astype(dtype) for size in (700, 700, 3, 0))
    wanted = 0.5 * x - 2.0 * y, 3.0 * z * np.vdot(x, x) ** -0.25, 4.0 * y
    device, outs = ShimDevice(order), [np.full_like(x, np.nan), z, y.copy()]
    parts = multiply_pairs(device, [(w, w), (x, x)])
    sums = [
        Combination(outs[0], 0.5, x, -2.0, y),
        Combination(outs[1], 3.0, z, row=1, exponent=-0.25),
        Combination(w, 1.0, w, 1.0, w),
        Combination(outs[2], 4.0, outs[2], row=0, exponent=-0.5),  # the sum is zero
    ]
    combine(device, sums, parts)()
    for found, expected in zip(outs, wanted, strict=True):
        # Two roundings of the terms and one of the sum.
        np.testing.assert_allclose(found, expected, rtol=0, atol=30 * np.finfo(dtype).eps)


@each_order
def test_choice_follows_the_sign_of_the_product(order):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 700)).astype(np.float32)
    device, outs = ShimDevice(order), np.full((3, 700), np.nan, np.float32)
    parts = multiply_pairs(device, [(x, x), (x, -x), (x, 0 * x)])
    choices = [Combination(outs[i], 0, x, 0, y, row=i) for i in range(3)]
    combine(device, choices, parts, choose=True)()
    np.testing.assert_array_equal(outs, [x, y, y])


@each_order
def test_small_products_equal_definition(order):
    """Matrices of any shapes; rows of two axes, as of a filter; transposed views; old values."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731 (of this test)
    weight, factor = draw(5, 7, 9), draw(63, 63)  # outputs, channels, taps
    rows = weight.transpose(2, 1, 0)  # (taps, channels, outputs)
    a, b, c, old = draw(70, 40), draw(33, 40), draw(3, 1), draw(3, 3)
    outs = [np.full_like(weight, np.nan), np.full((70, 33), np.nan, np.float32), old.copy()]
    products = [
        Product(factor, rows, outs[0].transpose(2, 1, 0), 0.5),
        Product(a, b.T, outs[1]),
        Product(c, c.T, outs[2], 2.0, -1.0, outs[2]),
    ]
    small_products(ShimDevice(order), products)()
    wanted = (
        0.5 * (factor @ rows.reshape(63, 5)).reshape(rows.shape).transpose(2, 1, 0),
        a @ b.T,
        2.0 * (c @ c.T) - old,
    )
    for found, expected in zip(outs, wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@each_order
def test_count_ids_ignores_ids_outside_table(order):
    ids = np.random.default_rng(0).integers(-3, 50, (40, 30))
    counts = np.zeros(45, np.int32)
    count_ids(ShimDevice(order), ids, counts)
    inside = ids[(ids >= 0) & (ids < 45)]
    np.testing.assert_array_equal(counts, np.bincount(inside, minlength=45))


@each_order
@pytest.mark.parametrize("side", [1, 31, 32, 33, 100])
def test_mirror_copies_lower_triangle(order, side):
    lower = np.tril(np.random.default_rng(0).normal(size=(side, side))).astype(np.float32)
    out = np.where(np.tri(side, dtype=bool), lower, np.float32(np.nan))
    mirror(ShimDevice(order), out)
    np.testing.assert_array_equal(out, lower + np.tril(lower, -1).T)


# Images enough for several pieces; a channel for each thread of more than one block.
MANY = Case(Window((2, 3), (1, 2), (1, 1), (1, 1), (0, 1)), 40, 3, (4, 5))
WIDE = Case(Window((1,), (1,), (1,), (0,), (0,)), 33, 300, (1,))


def squares(case, x):
    """Sums of squared patches, in float64."""
    w = case.window
    z = truths.patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    return (z**2).sum(axis=(0, 1))


def check_squares(
    case, *, order="forward", dtype=np.float32, channels_last=False, beta=0.9, processors=2
):
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
def test_patch_squares_are_independent_of_thread_order(case, channels_last, order):
    check_squares(case, order=order, channels_last=channels_last)


@pytest.mark.parametrize("case", [*STRIDED[::6], *CORNERS], ids=str)
def test_patch_squares_equal_definition_for_any_geometry(case):
    check_squares(case)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_squares_are_summed_in_float32(dtype):
    check_squares(MANY, dtype=dtype)


@pytest.mark.parametrize("processors", [1, 1000])
def test_image_sums_are_split_by_processors(processors):
    check_squares(MANY, beta=0, processors=processors)


def test_sums_of_many_images_have_float32_accuracy():
    """A plain float32 sum of 8192 equal numbers is off by 1e-5."""
    x = np.full((8192, 1, 1), 0.1, np.float32)
    out = np.full(1, np.nan, np.float32)
    window = Window((1,), (1,), (1,), (0,), (0,))
    PatchMoments(ShimDevice(processors=1), 0, 0).add_squares(x, window, out, alpha=1, beta=0)
    wanted = 8192 * np.float64(np.float32(0.1) * np.float32(0.1))
    # Eight pieces are added once more: a rounding each.
    np.testing.assert_allclose(out, wanted, rtol=5e-7)


def test_taps_outside_image_contribute_zero():
    case = Case(Window((1,), (1,), (1,), (3,), (-3,)), 2, 1, (4,))
    out = np.full(1, np.nan, np.float32)
    x = np.ones((2, 1, 4), np.float32)
    PatchMoments(ShimDevice(), 0, 0).add_squares(x, case.window, out, alpha=1, beta=0)
    assert out.tolist() == [2.0]  # of four outputs an image, the last sees its first pixel


@each_type
@pytest.mark.parametrize("case", [*STRIDED[::15], *CORNERS], ids=str)
def test_write_patches_equals_definition(case, dtype):
    x, w = case.images().astype(dtype), case.window
    wanted = truths.patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    found = np.full(wanted.shape, 7, dtype)
    device = ShimDevice()
    geometry = PatchMoments(device, 0, 0).geometry(x, w)
    write_patches(device, x, found, geometry)
    np.testing.assert_array_equal(found.astype(np.float64), wanted)
