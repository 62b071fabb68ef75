"""Mistakes in the small kernels show in their results."""

import re

import numpy as np
import pytest

from kfac_engine.backend.channel_groups import Accumulation
from kfac_engine.backend.cuda import recursive_inverse
from kfac_engine.backend.cuda.gram import GroupProducts, PatchMoments
from kfac_engine.backend.window import Window
from kfac_engine.kernels.groups import draw_classes, sum_examples
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.small_products import Product, small_products
from kfac_engine.kernels.spans import find_infinite, multiply_pairs
from kfac_engine.kernels.symmetric import Floor, narrow, widen
from tests.backend.truths import patches
from tests.cuda_on_cpu.module import ORDERS, compiler
from tests.cuda_on_cpu.test_shim import BARRIER, Broken, without
from tests.nightly import nightly_but

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


def replaced(old, new):
    def change(code):
        assert old in code
        return code.replace(old, new)

    return change


def barrier(occurrence):
    """Without a barrier; the first two of each source are those of the prelude's ``block_sum``."""
    return without(re.escape(BARRIER), occurrence)


# What goes wrong: the source, its mistake, and what is computed by it.
MISTAKES = {
    "mirror, no barrier": ("moment", barrier(3), mirrored),
    "sums, no barrier before they are added": ("patch_sums", barrier(0), squared),
    "sums, no last piece": (
        "patch_sums", replaced("piece < layer.pieces", "piece < layer.pieces - 1"), squared),
    "sums, images beside the piece": (
        "patch_sums", replaced("min(begin + layer.length, g.images)", "begin + layer.length - 1"),
        squared),
    "matrices, no barrier before the largest": ("symmetric", barrier(2), widened),
    "matrices, no barrier after the largest": ("symmetric", barrier(3), widened),
    "matrices, no barrier before a sum": ("symmetric", barrier(4), widened),
    "matrices, no barrier after a sum": ("symmetric", barrier(5), widened),
    "matrices, the diagonal counted twice": (
        "symmetric", replaced("diagonal ? 1.0 : 2.0", "2.0"), widened),
    "matrices on the way back, no barrier": ("symmetric", barrier(6), narrowed),
    "leaves, the column of the pivot": (
        "leaf_inverse", replaced("pivot ? -1.0", "pivot ? 1.0"), inverted),
    "leaves, the last code": (
        "leaf_inverse", replaced(" && codes[blockIdx.x] == 0", ""), with_codes),
    "triangles, no barrier": ("leaf_inverse", barrier(3), triangles),
    "transposed block, no barrier": ("leaf_inverse", barrier(4), triangles),
    "finite, all but the last number": (
        "spans", replaced("i < span.numbers", "i + 1 < span.numbers"), judged),
    "finite, infinity passed over": (
        "spans", replaced("!(own[i] * (scalar)0 == (scalar)0)", "own[i] != own[i]"), judged),
    "pairs, no barrier": ("spans", barrier(2), paired),
    "small products, first barrier": ("small_products", barrier(2), multiplied),
    "small products, second barrier": ("small_products", barrier(3), multiplied),
    "small products, the block of the next one": (
        "small_products", replaced("<= (int)blockIdx.x", "< (int)blockIdx.x"), multiplied),
    "few features, no barrier before they are read": ("few_products", barrier(2), grouped),
    "few features, no barrier": ("few_products", barrier(3), grouped),
    "few features, squares, no barrier": ("few_products", barrier(4), group_squares),
    "few features, no carry to the next image": (
        "few_products", replaced("image += images + carry;", "image += images;"), grouped),
    "few features, squares of each lane": (
        "few_products", replaced("warp_sum(sums[f])", "sums[f]"), group_squares),
    "few features, each group the first": (
        "few_products", replaced("(long long)group * g.channels", "0LL * g.channels"), grouped),
    "examples, no barrier": ("example_sums", barrier(2), summed),
    "classes, the running sum of the wrong lane": (
        "classes", replaced("min(31, classes - 1 - first)", "30"), drawn),
    "classes, lanes beyond the first step": (
        "classes", replaced("if (lane >= distance) ", ""), drawn),
}  # fmt: skip


def worst(name, change, compute, order):
    found, wanted = compute(Broken(name, change, order))
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    return np.inf if np.isnan(error) else float(error)


@pytest.mark.parametrize("mistake", nightly_but([*MISTAKES][::6], MISTAKES))
def test_mutated_small_kernel_gives_wrong_result(mistake):
    assert max(worst(*MISTAKES[mistake], order) for order in ORDERS) > 1e-3


@pytest.mark.parametrize("compute", dict.fromkeys(row[2] for row in MISTAKES.values()))
def test_unmutated_kernel_gives_correct_result(compute):
    assert max(worst("moment", str, compute, order) for order in ORDERS) < 2e-6
