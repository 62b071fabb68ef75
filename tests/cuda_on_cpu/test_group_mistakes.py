"""Mistakes in the kernels for groups show in their results."""

import re

import numpy as np
import pytest

from kfac_engine.backend.channel_groups import Accumulation
from kfac_engine.backend.cuda.gram import GroupProducts
from kfac_engine.backend.window import Window
from tests.cuda_on_cpu.module import ORDERS, compiler
from tests.cuda_on_cpu.test_shim import BARRIER, Broken, without
from tests.kernels.test_group_kernels import SCRATCH, rows
from tests.nightly import nightly_but

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

# Rows of thirteen: more than fit the registers of a thread.
WINDOW = Window((3,), (1,), (1,), (1,), (1,))
IMAGES = np.random.default_rng(0).standard_normal((2, 8, 90), np.float32)
GRADIENTS = np.random.default_rng(1).standard_normal((2, 4, 90), np.float32)

# Two barriers of the prelude come first, then two of squares, then two of moments.
MISTAKES = {
    "squares, no barrier before the product": (True, without(re.escape(BARRIER), 2)),
    "squares, no barrier after the product": (True, without(re.escape(BARRIER), 3)),
    "moments, no barrier before the product": (False, without(re.escape(BARRIER), 4)),
    "moments, no barrier after the product": (False, without(re.escape(BARRIER), 5)),
    "channels of the first group": (
        False,
        lambda code: code.replace("(long long)group * g.channels", "0LL * g.channels"),
    ),
    "a one at positions past the last": (False, lambda code: code.replace(" && p.counts)", ")")),
}


def worst(device, *, squared):
    z = rows(IMAGES, WINDOW, 2, ones=True)
    how = Accumulation(True, 1.0, 0.0)
    products = GroupProducts(device, SCRATCH)
    if squared:
        g = GRADIENTS.astype(np.float64).reshape(2, 2, 2, 90)
        wanted = (np.einsum("gnti,ngot->gnio", z, g) ** 2).sum(axis=1)
        out = np.zeros(wanted.shape, np.float32)
        products.add_squares(IMAGES, WINDOW, GRADIENTS, out, how)
    else:
        wanted = np.einsum("gnti,gntj->gij", z, z)
        out = np.zeros(wanted.shape, np.float32)
        products.add_moments(IMAGES, WINDOW, out, how)
    error = np.abs(out - wanted).max() / np.abs(wanted).max()
    return np.inf if np.isnan(error) else float(error)


@pytest.mark.parametrize("mistake", nightly_but([*MISTAKES][::4], MISTAKES))
def test_mutated_group_kernel_gives_wrong_result(mistake):
    squared, change = MISTAKES[mistake]
    errors = [worst(Broken("group_products", change, o), squared=squared) for o in ORDERS]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("squared", [False, True])
def test_unmutated_kernel_gives_correct_result(squared):
    errors = [worst(Broken("group_products", str, o), squared=squared) for o in ORDERS]
    assert max(errors) < 2e-6  # float32 sums
