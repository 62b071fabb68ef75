"""The small kernels, thread by thread on the CPU, against what they are to do."""

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cupy_moments import PatchMoments
from kfac_engine.kernels.averages import count_ids, update_average
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches
from tests.backend import truths
from tests.backend.geometries import CORNERS, STRIDED, Case
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

each_order = pytest.mark.parametrize("order", ORDERS)


@each_order
@pytest.mark.parametrize("beta", [0.9, 0.0])
@pytest.mark.parametrize("numbers", [1, 255, 20_011])
def test_an_average_is_blended(order: str, beta: float, numbers: int) -> None:
    rng = np.random.default_rng(0)
    average, measured = rng.normal(size=(2, numbers)).astype(np.float32)
    wanted = np.float32(0.3) * measured + np.float32(beta) * average
    if beta == 0:
        average[...] = np.nan
    update_average(ShimDevice(order), average, measured, 0.3, beta)
    np.testing.assert_allclose(average, wanted, rtol=0, atol=1e-6)  # three float32 roundings


@each_order
def test_ids_are_counted_and_those_outside_the_table_ignored(order: str) -> None:
    ids = np.random.default_rng(0).integers(-3, 50, (40, 30))
    counts = np.zeros(45, np.int32)
    count_ids(ShimDevice(order), ids, counts)
    inside = ids[(ids >= 0) & (ids < 45)]
    np.testing.assert_array_equal(counts, np.bincount(inside, minlength=45))


@each_order
@pytest.mark.parametrize("side", [1, 31, 32, 33, 100])
def test_the_lower_triangle_is_mirrored(order: str, side: int) -> None:
    lower = np.tril(np.random.default_rng(0).normal(size=(side, side))).astype(np.float32)
    out = np.where(np.tri(side, dtype=bool), lower, np.float32(np.nan))
    mirror(ShimDevice(order), out)
    np.testing.assert_array_equal(out, lower + np.tril(lower, -1).T)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", [*STRIDED[::15], *CORNERS], ids=str)
def test_patches_are_copied(case: Case, dtype: type) -> None:
    x, w = case.images().astype(dtype), case.window
    wanted = truths.patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    found = np.full(wanted.shape, 7, dtype)
    device = ShimDevice()
    geometry = PatchMoments(device, 0, 0).geometry(x, w)
    write_patches(device, x, found, geometry)
    np.testing.assert_array_equal(found.astype(np.float64), wanted)
