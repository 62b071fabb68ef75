"""The kernels for groups compute their definitions, whichever thread goes first."""

import numpy as np
import pytest

from kfac_engine.backend.cuda.gram import GroupProducts
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from tests.comparing import assert_near
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler
from tests.kernels.test_group_kernels import SCRATCH, rows

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

# Rows of thirteen: more than fit the registers of a thread.
WINDOW = Window((3,), (1,), (1,), (1,), (1,))
IMAGES = np.random.default_rng(0).standard_normal((2, 8, 90), np.float32)
GRADIENTS = np.random.default_rng(1).standard_normal((2, 4, 90), np.float32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("squared", [False, True])
def test_products_of_groups_equal_their_definition(squared, order):
    z = rows(IMAGES, WINDOW, 2, ones=True)
    how = Accumulation(True, 1.0, 0.0)
    products = GroupProducts(ShimDevice(order), SCRATCH)
    if squared:
        g = GRADIENTS.astype(np.float64).reshape(2, 2, 2, 90)
        wanted = (np.einsum("gnti,ngot->gnio", z, g) ** 2).sum(axis=1)
        out = np.zeros(wanted.shape, np.float32)
        products.add_squares(IMAGES, WINDOW, GRADIENTS, out, how)
    else:
        wanted = np.einsum("gnti,gntj->gij", z, z)
        out = np.zeros(wanted.shape, np.float32)
        products.add_moments(IMAGES, WINDOW, out, how)
    assert_near(out, wanted, 2e-6)  # float32 sums
