"""Moments of several layers from pairs of half-precision numbers, thread by thread on the CPU.

The tensor cores of the shim cut sums toward zero, as those of a device do. Other tests of the
kernels on tensor cores are in ``test_patch_moments``.
"""

from math import prod

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.kernels.tuned import PATCHES, PIXELS, ROWS, Choice, shape_key
from tests.backend.geometries import Case
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler
from tests.kernels.test_patch_moments import SCRATCH, TOLERANCES, square, truth

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

SUM = Accumulation(homogeneous=False, alpha=1.0, beta=0.0)
# Odd and even numbers of tiles of a tap, and channels that leave part of a tile empty; one tap, and
# patches with and without strides.
LAYERS = [
    square(4, 3, 1, 64),
    square(3, 1, 0, 128, n=3),
    Case(Window((3, 2), (2, 1), (1, 2), (1, 0), (0, 2)), 2, 128, (5, 6)),
    square(5, 1, 0, 192, n=2),
    square(3, 2, 1, 64, n=2, axes=3),
    square(5, 3, 1, 40),
    Case(Window((7, 7), (2, 2), (1, 1), (3, 3), (3, 3)), 2, 3, (9, 8)),
    Case(Window((), (), (), (), ()), 70, 90, ()),
    square(6, 1, 0, 70, n=3),
]
# More than half of the scratch memory as pairs: by another kernel.
LARGE = square(SCRATCH // 500 + 1, 1, 0, 3, axes=1)
BORDERS = ["sum_images", "add_sums"]
EACH_CALL = ["find_peaks", "write_pairs", "pair_products", "assemble_moments"]


def images(case, seed=0):
    return case.images(seed=seed).astype(np.float32)


def empty(case, bias=False):
    return np.full((case.window.taps * case.channels + bias,) * 2, np.nan, np.float32)


def error(found, wanted):
    """The largest error, relative to the largest entry; infinite for NaN."""
    worst = np.abs(found - wanted).max() / np.abs(wanted).max()
    return float("inf") if np.isnan(worst) else float(worst)


def moment(x, case, order="forward"):
    out = empty(case)
    PatchMoments(ShimDevice(order), SCRATCH, 3).add(x, case.window, out, SUM)
    return out


def channels_last(x):
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)


@pytest.mark.parametrize("layout", [np.asarray, channels_last])
@pytest.mark.parametrize("way", [ROWS, PIXELS, PATCHES])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_each_way_equals_definition(case, way, layout):
    x = layout(images(case))
    positions = case.n * prod(case.window.output_shape(case.sides))
    key = shape_key(case.window.taps, case.channels, positions)
    moments = PatchMoments(ShimDevice("shuffled"), SCRATCH, 3, {key: Choice(way, 8)})
    if way not in moments.ways(x, case.window):
        pytest.skip("these images have no such way")
    out = empty(case, bias=True)
    moments.add(x, case.window, out, Accumulation(True, 1.0, 0.0))
    np.testing.assert_array_equal(out, out.T)
    assert error(out, truth(case, x, True)) < TOLERANCES[3]


def test_cheaper_way_is_the_default():
    """Patches are copied for few channels, for which tiles of one tap are mostly empty."""

    def default(case):
        x = np.lib.stride_tricks.as_strided(
            np.zeros(1, np.float32), (case.n, case.channels, *case.sides), (0, 0, 0, 0)
        )
        return PatchMoments(ShimDevice(), 1 << 30, 3).ways(x, case.window)[0]

    stem = Case(Window((7, 7), (2, 2), (1, 1), (3, 3), (3, 3)), 32, 3, (224, 224))
    halved = Case(Window((1, 1), (2, 2), (1, 1), (0, 0), (0, 0)), 32, 256, (56, 56))
    assert [default(case) for case in (stem, halved)] == [PATCHES, PATCHES]
    assert [default(square(28, 3, 1, channels, n=32)) for channels in (32, 96, 128)] == [PIXELS] * 3


@pytest.mark.parametrize("order", ORDERS)
def test_layers_share_launches(order):
    device = ShimDevice(order)
    moments = PatchMoments(device, 64 << 20, 3)
    outs = [empty(case, bias=True) for case in LAYERS]
    how = Accumulation(True, 0.5, 0.0)
    with moments.gathered():
        for case, out in zip(LAYERS, outs, strict=True):
            moments.add(images(case), case.window, out, how)
    for case, out in zip(LAYERS, outs, strict=True):
        assert error(out, 0.5 * truth(case, images(case), True)) < TOLERANCES[3]
    # A launch for each width of blocks.
    products = [*2 * ["pair_products"], "pair_rows"]
    assert device.launched == [*EACH_CALL[:2], *products, "assemble_moments", *BORDERS]


@pytest.mark.parametrize("scratch", [64 << 10, 70 << 10])
def test_pairs_and_parts_of_a_group_fit_scratch_memory(scratch):
    """In a quarter and a half of it: two layers at a time."""
    device = ShimDevice()
    cases = [square(4, 1, 0, 64, n=2)] * 3  # 8 kB of pairs, and a part of 16 kB
    moments = PatchMoments(device, scratch, 3)
    outs = [empty(case) for case in cases]
    with moments.gathered():
        for seed, (case, out) in enumerate(zip(cases, outs, strict=True)):
            moments.add(images(case, seed), case.window, out, SUM)
    assert device.launched == 2 * EACH_CALL
    for seed, (case, out) in enumerate(zip(cases, outs, strict=True)):
        assert error(out, truth(case, images(case, seed), False)) < TOLERANCES[3]


def test_batch_above_scratch_memory_is_divided():
    case = square(4, 2, 1, 64, n=5)
    device = ShimDevice()
    out = empty(case)
    # Two images of 4 kB at a time; the matrix takes passes of one tile.
    PatchMoments(device, 2 * 2 * 4 << 10, 3).add(images(case), case.window, out, SUM)
    assert device.launched.count("write_pairs") == 3
    assert error(out, truth(case, images(case), False)) < TOLERANCES[3]


def test_second_sum_into_one_matrix_waits_for_the_first():
    case = square(3, 1, 0, 64, n=2)
    moments, out = PatchMoments(ShimDevice(), SCRATCH, 3), empty(case)
    large = LARGE._replace(channels=64)
    with moments.gathered():
        moments.add(images(case, 0), case.window, out, SUM)
        moments.add(images(case, 1), case.window, out, Accumulation(False, 1.0, 0.5))
        moments.add(images(large), large.window, out, Accumulation(False, 1.0, 2.0))
    first, second = (truth(case, images(case, seed), False) for seed in range(2))
    wanted = 2.0 * (0.5 * first + second) + truth(large, images(large), False)
    assert error(out, wanted) < TOLERANCES[3]


def test_layers_of_other_kernels_do_not_divide_a_group():
    case = square(3, 1, 0, 64)
    device = ShimDevice()
    moments = PatchMoments(device, SCRATCH, 3)
    outs = [empty(each) for each in (case, LARGE, case)]
    with moments.gathered():
        for each, out in zip((case, LARGE, case), outs, strict=True):
            moments.add(images(each), each.window, out, SUM)
    assert sorted(device.launched) == sorted(["patch_products", "assemble_moments", *EACH_CALL])


def test_error_keeps_old_matrices():
    case = square(3, 1, 0, 64)
    moments, out = PatchMoments(ShimDevice(), SCRATCH, 3), np.zeros((64, 64), np.float32)

    def fail():
        with moments.gathered():
            moments.add(images(case), case.window, out, SUM)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    moments.flush()
    assert not out.any()


@pytest.mark.parametrize("layout", [np.asarray, channels_last])
def test_whole_batch_has_float32_accuracy(layout):
    """Sums that tensor cores cut would have an error of 1.3e-5 at 1600 positions."""
    case = square(40, 1, 0, 64, n=2)
    x = layout(images(case) + np.float32(2.0))  # the cuts of all sums have one sign
    assert error(moment(x, case), truth(case, x, False)) < 4e-7


@pytest.mark.parametrize("order", ORDERS)
def test_scale_of_each_channel_is_kept(order):
    case = square(4, 1, 0, 128, n=2)
    scales = np.geomspace(1e-15, 1e15, 128, dtype=np.float32)[:, None, None]
    x = images(case) * scales
    x[:, 5] = 0.0  # a channel of zeros
    x[0, 7, 0, 0] = 1e6 * np.abs(x[:, 7]).max()  # an outlier
    x[:, 9] = 0.0
    x[0, 9, 1, 1] = np.float32(1e-42)  # subnormal: its square is zero
    with np.errstate(under="ignore"):
        wanted = truth(case, x, False)
    roots = np.sqrt(np.diag(wanted))
    bound = np.outer(roots, roots)
    found = moment(x, case, order)
    # Products below the smallest normal number are not exact.
    assert (np.abs(found - wanted) <= 1e-6 * bound + 1e-37).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_number_that_is_not_finite_reaches_its_channel_only(bad):
    case = square(4, 3, 1, 64)
    x = images(case)
    x[0, 3, 2, 2] = bad
    found = moment(x, case)
    channels = np.arange(len(found)) % 64
    touched = (channels[:, None] == 3) | (channels == 3)
    assert not np.isfinite(found.diagonal()[channels == 3]).any()  # every tap sees the number
    assert np.isfinite(found[~touched]).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_types_of_a_group_are_computed_apart(dtype):
    case = square(4, 2, 1, 64)
    moments = PatchMoments(ShimDevice(), SCRATCH, 3)
    each = [images(case), images(case).astype(dtype)]
    outs = [empty(case) for _ in each]
    with moments.gathered():
        for x, out in zip(each, outs, strict=True):
            moments.add(x, case.window, out, SUM)
    for x, out in zip(each, outs, strict=True):
        assert error(out, truth(case, x, False)) < TOLERANCES[3]
