"""The small kernels compute their definitions, whichever thread goes first."""

import numpy as np
import pytest

from kfac_engine.backend.cuda import recursive_inverse
from kfac_engine.backend.cuda.gram import GroupProducts, PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.kernels.groups import draw_classes, sum_examples
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.small_products import Product, small_products
from kfac_engine.kernels.spans import find_infinite, multiply_pairs
from kfac_engine.kernels.symmetric import Floor, narrow, widen
from tests.backend.truths import patches
from tests.comparing import assert_near
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

RNG = np.random.default_rng(0)
MATRICES = RNG.normal(size=(2, 50, 50))
MATRICES += MATRICES.swapaxes(1, 2)
IMAGES = RNG.normal(size=(40, 3, 30)).astype(np.float32)
ROWS = RNG.normal(size=(2, 3, 40, 5)).astype(np.float32)
LOGITS = RNG.normal(size=(20, 70, 1)).astype(np.float32)
UNIFORMS = RNG.random((20, 1))


def mirrored(device):
    out = np.where(np.tri(50, dtype=bool), MATRICES[0], np.nan).astype(np.float32)
    mirror(device, out)
    return out, MATRICES[0]


def squared(device):
    out = np.full(9, np.nan, np.float32)
    window = Window((3,), (1,), (1,), (1,), (1,))
    PatchMoments(device, 0, 0).add_squares(IMAGES, window, out, alpha=1, beta=0)
    z = patches(IMAGES, (3,), (1,), (1,), (1,), (1,))
    return out, (z**2).sum(axis=(0, 1))


def widened(device):
    wide, _ = widen(device, MATRICES, np.zeros(2), Floor(0.1, 0.0))
    norms = np.linalg.norm(MATRICES, axis=(1, 2))
    return wide, MATRICES + 0.1 * norms[:, None, None] * np.eye(50)


def narrowed(device):
    return narrow(device, MATRICES, np.float32), MATRICES


def inverted(device):
    """Blocks that are a leaf: one of full size, and a smaller one in a larger matrix."""
    matrices = np.stack([np.eye(128) + root @ root.T for root in RNG.normal(size=(2, 128, 3))])
    work = np.zeros((2, 140, 140))
    work[:, :128, :128] = matrices
    invert = recursive_inverse._Inverse(device, np.zeros(2, np.int32))
    invert(work[:, :128, :128], np.zeros(0), 0)
    invert(work[:, 50:77, 50:77], np.zeros(0), 0)
    wanted = np.linalg.inv(matrices)
    wanted[:, 50:77, 50:77] = np.linalg.inv(wanted[:, 50:77, 50:77])
    return work[:, :128, :128], wanted


def with_codes(device):
    """A code is of the first block that has no inverse."""
    codes = np.zeros(2, np.int32)
    invert = recursive_inverse._Inverse(device, codes)
    work = np.stack([np.diag([1.0, 1, -1, 1, -1]), np.eye(5)])
    for first in (0, 70):
        invert(work, np.zeros(0), first)
    return codes, np.array([3, 0])


def triangles(device):
    """The mean of both triangles, and the lower left block in the upper right one."""
    work = RNG.normal(size=(2, 80, 80))
    wanted = work.copy()
    mean = 0.5 * (work[:, 30:, 30:] + work[:, 30:, 30:].swapaxes(1, 2))
    wanted[:, 30:, 30:], wanted[:, :30, 30:] = mean, work[:, 30:, :30].swapaxes(1, 2)
    inverse = recursive_inverse._Inverse(device, np.zeros(2, np.int32))
    inverse._symmetrize(work[:, 30:, 30:])
    inverse._transpose(work[:, 30:, :30], work[:, :30, 30:])
    return work, wanted


def summed(device):
    """Entries lie closer together in memory than what is summed."""
    sums = np.full((3, 10), np.nan, np.float32)
    x, ds = (np.moveaxis(array, -1, 1) for array in ROWS)
    sum_examples(device, x, ds, sums)
    wide = ROWS.astype(np.float64)
    return sums, np.concatenate([wide.prod(axis=0).sum(axis=1), wide[1].sum(axis=1)], axis=1)


def drawn(device):
    ids = np.full((20, 1), -1)
    draw_classes(device, LOGITS, UNIFORMS, ids)
    bound = np.exp(LOGITS.astype(np.float64)).cumsum(axis=1)
    return ids, (bound <= UNIFORMS[:, None] * bound[:, -1:]).sum(axis=1)


def grouped(device):
    """A channel for each group."""
    out = np.full((3, 4, 4), np.nan, np.float32)
    window = Window((3,), (1,), (1,), (1,), (1,))
    how = Accumulation(True, 1.0, 0.0)
    GroupProducts(device, 1 << 20).add_moments(IMAGES, window, out, how)
    z = np.stack([patches(x, (3,), (1,), (1,), (1,), (1,)) for x in np.split(IMAGES, 3, axis=1)])
    z = np.concatenate([z, np.ones((*z.shape[:3], 1))], axis=3)
    return out, np.einsum("gnti,gntj->gij", z, z)


def group_squares(device):
    """A channel and an output for each group."""
    out = np.full((3, 3, 1), np.nan, np.float32)
    window = Window((3,), (1,), (1,), (1,), (1,))
    how = Accumulation(False, 1.0, 0.0)
    GroupProducts(device, 1 << 20).add_squares(IMAGES, window, IMAGES, out, how)
    z = np.stack([patches(x, (3,), (1,), (1,), (1,), (1,)) for x in np.split(IMAGES, 3, axis=1)])
    y = IMAGES.astype(np.float64).swapaxes(0, 1)
    return out, (np.einsum("gnti,gnt->gni", z, y) ** 2).sum(axis=1)[..., None]


def judged(device):
    """The last number of the last array is not finite."""
    arrays = [np.ones(size) for size in (5, 701)]
    arrays[1][-1] = np.inf
    flags = np.ones(2, np.int32)
    find_infinite(device, arrays, flags)
    return flags, np.array([1, 0])


def paired(device):
    found = multiply_pairs(device, [(MATRICES[0], MATRICES[1])]).sum(axis=1)
    return found, np.vdot(MATRICES[0], MATRICES[1])[None]


def multiplied(device):
    """The second product begins after the tiles of the first one."""
    left, right = MATRICES.astype(np.float32)
    outs = [np.full((50, 50), np.nan, np.float32) for _ in range(2)]
    small_products(device, [Product(left, right, outs[0]), Product(right, left, outs[1])])()
    return np.stack(outs), np.stack([MATRICES[0] @ MATRICES[1], MATRICES[1] @ MATRICES[0]])


KERNELS = (
    mirrored, squared, widened, narrowed, inverted, with_codes, triangles, summed, drawn, grouped,
    group_squares, judged, paired, multiplied,
)  # fmt: skip


@pytest.mark.parametrize("compute", KERNELS)
def test_kernel_equals_its_definition_in_every_order_of_threads(compute):
    for order in ORDERS:
        found, wanted = compute(ShimDevice(order))
        assert_near(found, wanted, 2e-6)
