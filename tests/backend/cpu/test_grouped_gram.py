"""Moments of groups of channels equal those of patches gathered pixel by pixel, in either form."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu import grouped_gram, patch_gram
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.grouped_gram import CACHE_BYTES
from kfac_engine.backend.kernel_offsets import line_products
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window, pointwise
from tests import models
from tests.backend import truths
from tests.backend.cpu.test_patch_gram import ORDERS, ROUNDING, SINGLE_ROUNDING, moment, patches
from tests.backend.geometries import CORNERS, EVERY, Case, nightly_but_covering
from tests.comparing import assert_near

ALL = [*CORNERS, *EVERY]
SAME = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
# With room, small groups are multiplied pixel by pixel; without, each is taken alone.
ROOM = pytest.mark.parametrize("scratch_bytes", [64 << 20, 300], ids=["by_pixels", "by_groups"])


def grouped(case, size, seed=0):
    """Images with as many groups as the case has channels, and the moment of each."""
    x = np.concatenate([case.images(seed + c) for c in range(size)], axis=1)
    return x, np.array([moment(part, case.window) for part in np.split(x, case.channels, axis=1)])


def bordered(x, window, groups):
    return np.array([moment(part, window, True) for part in np.split(x, groups, axis=1)])


def add_moments(x, window, out, *, scratch_bytes=64 << 20, threads=None, **options):
    backend = NumpyBackend(scratch_bytes=scratch_bytes, threads=threads)
    backend.patch_second_moment(x, window, out, Accumulation(**options))
    backend.mirror(out)


@ROOM
@pytest.mark.parametrize("case", nightly_but_covering(ALL))
def test_group_gram_matrices_are_added_to_scaled_old_matrices(case, scratch_bytes):
    i = ALL.index(case)
    x, new = grouped(case, size=1 + i % 3)
    old = np.random.default_rng(i).standard_normal(new.shape)
    old += old.swapaxes(1, 2)
    out = old.copy()
    add_moments(
        ORDERS[i % len(ORDERS)](x),
        case.window,
        out,
        scratch_bytes=scratch_bytes,
        alpha=0.3,
        beta=0.7,
    )
    assert_near(out, 0.7 * old + 0.3 * new, ROUNDING)


@ROOM
@pytest.mark.parametrize("case", [*CORNERS, *EVERY[::20]], ids=str)
def test_homogeneous_coordinate_and_zero_beta_overwrite_nan(case, scratch_bytes):
    x = case.images()
    expected = bordered(x, case.window, case.channels)
    out = np.full_like(expected, np.nan)
    add_moments(x, case.window, out, scratch_bytes=scratch_bytes, homogeneous=True)
    assert_near(out, expected, ROUNDING)


@pytest.mark.parametrize("groups", [1, 3, 6, 48], ids="{} groups".format)
@pytest.mark.parametrize("window", [SAME, pointwise(2)], ids=["patches", "pixels"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_group_gram_matrices_of_threads_equal_definition(groups, window, dtype):
    # More images than are summed at a time, and enough work for several threads.
    x = Case(window, 70, 48, (12, 13)).images().astype(dtype)
    kept = np.float64 if dtype == np.float64 else np.float32
    expected = bordered(x, window, groups)
    out = np.full(expected.shape, np.nan, kept)
    add_moments(x, window, out, threads=3, homogeneous=True)
    assert_near(out, expected, ROUNDING if kept == np.float64 else SINGLE_ROUNDING)


@pytest.mark.parametrize("groups", [1, 4])
def test_no_images_only_scale_old_matrices(groups):
    old = np.random.default_rng(0).standard_normal(
        (groups, 4 // groups * 9 + 1, 4 // groups * 9 + 1)
    )
    old += old.swapaxes(1, 2)
    out = old.copy()
    add_moments(np.zeros((0, 4, 5, 5)), SAME, out, homogeneous=True, beta=0.5)
    np.testing.assert_array_equal(out, 0.5 * old)


def test_single_row_per_example_equals_dense_definition():
    x = np.random.default_rng(0).standard_normal((9, 6))
    out = np.empty((3, 2, 2))
    add_moments(x, pointwise(0), out)
    assert_near(out, [truths.moment(part, False) for part in np.split(x, 3, axis=1)], ROUNDING)


@pytest.mark.parametrize("scratch_bytes", [400_000, 4_000_000])
def test_scratch_memory_is_within_scratch_bytes(scratch_bytes):
    x = np.random.default_rng(0).standard_normal((40, 30, 30, 32)).swapaxes(1, 3)
    out, expected = np.empty((32, 9, 9)), np.empty((32, 9, 9))
    add_moments(x, SAME, expected)
    tracemalloc.start()
    add_moments(x, SAME, out, scratch_bytes=scratch_bytes, threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Small objects come on top: a plan, and tasks.
    assert peak <= scratch_bytes + 200_000
    assert_near(out, expected, ROUNDING)


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("scratch_bytes", [64 << 20, 30_000], ids=["roomy", "one_thread"])
def test_squared_gradients_of_threads_equal_definition(scratch_bytes, beta, homogeneous):
    rng = np.random.default_rng(0)
    x, ds = rng.standard_normal((2, 70, 32, 12, 12))
    z = patches(x, SAME)
    z = np.concatenate([z, np.ones((*z.shape[:2], 1))], axis=2) if homogeneous else z
    gradients = np.einsum("ntd,not->ndo", z, ds.reshape(70, 32, -1), optimize=True)
    new = (gradients**2).sum(axis=0)[None]
    out = np.full(new.shape, np.nan if beta == 0 else 2.0)
    backend = NumpyBackend(scratch_bytes=scratch_bytes, threads=3)
    backend.squared_gradients(x, SAME, ds, out, Accumulation(homogeneous, 0.3, beta))
    assert_near(out, 2.0 * beta + 0.3 * new, ROUNDING)


def in_row(taps):
    return Window((taps,), (1,), (1,), (taps // 2,), (taps // 2,))


# Images and the number of groups, so wide that the offsets of a group, or the pairs of its taps,
# are many: stacks of dense layers, convolutions of one tap, and long kernels.
WIDE = {
    "stack_512": (pointwise(0), (1, 1024), 2),
    "stack_1024": (pointwise(0), (2, 1024), 1),
    "stack_of_32": (pointwise(0), (4, 32 * 64), 32),
    "pixels_768": (pointwise(2), (1, 768, 2, 2), 1),
    "kernel_of_128": (in_row(128), (1, 8, 16), 2),
    "square_kernel": (Window((31, 31), (1, 1), (1, 1), (15, 15), (15, 15)), (1, 1, 4, 4), 1),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WIDE)
def test_memory_of_wide_groups_is_that_of_the_result(name, threads):
    window, shape, groups = WIDE[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    d = window.taps * shape[1] // groups
    out = np.zeros((groups, d, d), np.float32)
    backend, scratch = NumpyBackend(scratch_bytes=4 << 20, threads=threads), 4 << 20
    clear_caches()
    tracemalloc.start()
    backend.patch_second_moment(x, window, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= scratch + CACHE_BYTES + (1 << 20), f"{peak:,} bytes"
    assert_near(out[-1], np.tril(moment(x[:, -(shape[1] // groups) :], window)), SINGLE_ROUNDING)


def test_plans_of_many_geometries_fit_into_the_announced_bytes():
    clear_caches()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for side in range(8, 88, 4):
        x = np.zeros((1, 4, side, side), np.float32)
        add_moments(x, SAME, np.zeros((4, 9, 9), np.float32))
        x = np.zeros((1, 8 * side), np.float32)
        add_moments(x, pointwise(0), np.zeros((8, side, side), np.float32))
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grouped_gram._plan.cache_info().currsize > 4
    assert kept <= CACHE_BYTES
    model = models.written(
        "batch,4,5,5", "w(4,1,3,3)", "output = Conv<group=4, pads=[1, 1, 1, 1]>(input, w)"
    )
    engine = ke.Engine.from_onnx(model, loss="normal")
    alone = engine.memory(1, statistics=False).sessions
    assert engine.memory(1).sessions >= alone + CACHE_BYTES


def clear_caches():
    for cached in (grouped_gram._plan, patch_gram.select_algorithm, line_products):
        cached.cache_clear()
