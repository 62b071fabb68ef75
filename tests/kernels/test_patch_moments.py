"""Patch moments by our kernels, thread by thread on the CPU, against the definition in float64."""

from math import prod

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cuda import recipes
from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.cuda.moment_groups import plan
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.moments import TILE
from kfac_engine.kernels.tuned import BLOCKS, UNITS
from tests.backend.geometries import CORNERS, STRIDE_ONE, STRIDED, Case
from tests.backend.truths import moment, patches
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

SCRATCH = 4 << 20
ALPHA, BETA = 0.1, 0.9

# Float32 sums of products of standard normal numbers, relative to the largest entry. Two numbers of
# half precision hold 22 of float32's 24 bits; one holds 11.
TOLERANCES = {0: 1e-6, 3: 1e-6, 1: 2e-3}


def square(sides, kernel, pad, channels, n=1, axes=2):
    each = (1,) * axes
    window = Window((kernel,) * axes, each, each, (pad,) * axes, (pad,) * axes)
    return Case(window, n, channels, (sides,) * axes)


# Channels that fill tiles: the plan takes the full grid and takes off the frame where that is less.
TILED = [
    square(6, 3, 1, 64, n=2),
    square(4, 3, 0, 64),
    square(3, 3, 2, 64),
    square(5, 2, 1, 64, axes=1),
    square(3, 2, 0, 128),
    # One long piece. If a tensor core summed all of it, cutting would give an error of 4e-6.
    square(22, 1, 0, 64),
    Case(Window((3, 2), (1, 1), (1, 2), (0, 1), (2, 1)), 1, 64, (5, 6)),
]
# Full tiles and a remainder; one tap, whose patches are the pixels.
UNTILED = [square(4, 2, 1, 20, n=3), square(4, 1, 0, 70, n=2), square(3, 1, 0, 64, n=3)]
RANDOM = [*STRIDED[::10], *STRIDE_ONE[::10], *CORNERS]


def truth(case, x, homogeneous):
    w = case.window
    found = patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    return moment(found.reshape(-1, found.shape[2]), homogeneous)


def check(
    case,
    *,
    products=0,
    order="forward",
    homogeneous=True,
    dtype=np.float32,
    scratch=SCRATCH,
    processors=2,
    beta=BETA,
    channels_last=False,
):
    x = case.images(seed=1).astype(dtype)
    if channels_last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    wanted = truth(case, x, homogeneous)
    old = np.random.default_rng(2).normal(size=wanted.shape).astype(np.float32)
    out = old + old.T
    wanted = ALPHA * wanted + beta * out
    if beta == 0:
        out[...] = np.nan
    device = ShimDevice(order, processors)
    PatchMoments(device, scratch, products).add(
        x, case.window, out, Accumulation(homogeneous, ALPHA, beta)
    )
    np.testing.assert_array_equal(out, out.T)
    np.testing.assert_allclose(
        out, wanted, rtol=0, atol=TOLERANCES[products] * np.abs(wanted).max()
    )
    return device


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("products", TOLERANCES)
@pytest.mark.parametrize("case", [*UNTILED, *TILED[:1]], ids=str)
def test_patch_moment_is_independent_of_thread_order(case, products, order):
    check(case, products=products, order=order)


@pytest.mark.parametrize("case", [*TILED, *RANDOM], ids=str)
@pytest.mark.parametrize("products", [0, 3])
def test_patch_moment_equals_definition_for_any_geometry(case, products):
    check(case, products=products)


VARIANTS = {
    "float16": {"dtype": np.float16},
    "bfloat16": {"dtype": ml_dtypes.bfloat16},
    "channels last": {"channels_last": True},
    "over NaN": {"beta": 0},
}


@pytest.mark.parametrize("case", [TILED[0], UNTILED[0]], ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("products", [0, 3])
def test_patch_moment_of_each_variant_equals_definition(case, options, products):
    check(case, products=products, **options)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("products", TOLERANCES)
def test_moment_of_nan_or_infinity_is_not_finite(bad, products):
    case = square(3, 1, 0, 64)
    x, out = case.images(seed=1).astype(np.float32), np.zeros((64, 64), np.float32)
    x[0, 5, 1, 1] = bad
    PatchMoments(ShimDevice(), SCRATCH, products).add(
        x, case.window, out, Accumulation(False, 1, 0)
    )
    assert not np.isfinite(out[5, 5])
    assert np.isfinite(out[:5, :5]).all()


def test_patch_moment_without_homogeneous_coordinate_has_no_border():
    assert check(UNTILED[0], homogeneous=False).launched == ["patch_products", "assemble_moments"]


@pytest.mark.parametrize("scratch", [1, 4 * 64 * 64 * 4])
def test_small_scratch_memory_gives_several_passes(scratch):
    device = check(square(4, 3, 1, 20), scratch=scratch, homogeneous=False)
    assert len(device.launched) > 2


def test_images_above_scratch_memory_are_not_copied_as_pairs():
    device = check(TILED[0], products=3, scratch=1, homogeneous=False)
    assert set(device.launched) == {"patch_products", "assemble_moments"}


def test_positions_are_split_for_many_processors():
    case = square(40, 1, 0, 8, n=2)
    (jobs,) = passes(case, processors=2)[0].jobs.values()
    pieces = jobs["end"].tolist()
    assert pieces == [512, 1024, 1536, 2048, 2560, 3072, 3200]
    check(case, processors=2)


def passes(case, processors=100, scratch=SCRATCH):
    blocks = processors * BLOCKS[UNITS][0]
    recipe = recipes.recipe_for(case.window, case.n, case.channels, case.sides)
    return plan(recipe, case.n, blocks, scratch // (TILE**2 * 4), "patch_products")


def test_3x3_plan_has_13_products_over_pixels_that_both_taps_see():
    (found,) = passes(square(56, 3, 1, 64))
    sides = {number: grid["outputs"][1:] for number, grid in enumerate(found.grids)}
    (jobs,) = found.jobs.values()
    tiles = {(job["grid"], job["tiles"][0], job["tiles"][2]) for job in jobs}
    inner = {part for part in tiles if min(sides[part[0]]) > 3}
    seen = [(56 - abs(i)) * (56 - abs(j)) for i in range(3) for j in range(-2, 3) if i or j >= 0]
    assert sorted(prod(sides[grid]) for grid, *_ in inner) == sorted(seen)
    assert len(inner) == 13
    assert len(found.sums) == 45


def test_strided_or_unaligned_plan_is_direct():
    for case in (
        Case(Window((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), 1, 64, (56, 56)),
        square(56, 3, 1, 60),
    ):
        assert {len(found.grids) for found in passes(case)} == {1}


def test_passes_fit_scratch_memory():
    scratch = 60 * 64 * 64 * 4
    for case in (square(14, 3, 1, 64), square(14, 3, 1, 60)):
        for found in passes(case, scratch=scratch):
            assert found.parts * TILE**2 * 4 <= scratch


def test_matrix_of_wrong_shape_raises_error():
    case = UNTILED[0]
    moments = PatchMoments(ShimDevice(), SCRATCH, 0)
    with pytest.raises(ShapeError, match="80 features and a bias does not fit"):
        moments.add(
            case.images().astype(np.float32),
            case.window,
            np.zeros((80, 80), np.float32),
            Accumulation(True, 1, 0),
        )
