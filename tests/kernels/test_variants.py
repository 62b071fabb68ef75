"""The table of variants is what launches choose from: no variant more, none less."""

from importlib.resources import files
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cuda import recursive_inverse
from kfac_engine.backend.cuda.gram import GroupProducts, PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.kernels.averages import count_ids, update_average
from kfac_engine.kernels.groups import cross_entropy, draw_classes, sum_examples
from kfac_engine.kernels.launch import MACROS, options, source, variants
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.patches import write_patches
from kfac_engine.kernels.small_products import Product, small_products
from kfac_engine.kernels.spans import find_infinite
from kfac_engine.kernels.symmetric import Floor, narrow, widen

COMPUTED = (np.float32, np.float16, ml_dtypes.bfloat16)
SCRATCH = 4 << 20
ONE = Window((1, 1), (1, 1), (1, 1), (0, 0), (0, 0))


class Recorder:
    """A device that notes what is compiled and runs nothing."""

    processors = 2

    def __init__(self):
        self.asked: set[tuple[str, tuple[str, ...]]] = set()

    def function(self, source, name, options, shared_bytes=0):
        del name, shared_bytes
        self.asked.add((source, options))
        return lambda grid, block, arguments, shared_mem=0: None

    def upload(self, host):
        return host

    def address(self, array):
        return int(array.ctypes.data)

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)


def images(channels, dtype, *, last, side=3):
    """Images with channels beside each other in memory, or pixels."""
    found = np.zeros((2, channels, side, side), dtype)
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(found, 1, -1)), -1, 1) if last else found


def launch_patches(device):
    # Channels that fill tiles, and that leave part of one empty.
    for channels, products, dtype in product((20, 64), (0, 1, 3), COMPUTED):
        moments = PatchMoments(device, SCRATCH, products)
        scales = {"alpha": 1, "beta": 0}
        for last in (False, True):
            x = images(channels, dtype, last=last)
            out = np.empty((channels + 1,) * 2, np.float32)
            moments.add(x, ONE, out, Accumulation(True, **scales))
            moments.add_squares(x, ONE, np.empty(channels, np.float32), **scales)
    # Images that are copied as pairs, and others that are read by rows.
    each = product((3, 6), (64, 128), (1, 3), COMPUTED)
    for side, channels, products, dtype in each:
        x = images(channels, dtype, last=False, side=side)
        out = np.empty((channels, channels), np.float32)
        PatchMoments(device, SCRATCH, products).add(x, ONE, out, Accumulation(False, **scales))
    mirror(device, np.empty((5, 5), np.float32))
    for dtype in (*COMPUTED, np.float64):
        x = images(4, dtype, last=False)
        geometry = PatchMoments(device, SCRATCH, 0).geometry(x, ONE)
        write_patches(device, x, np.empty((2, 9, 4), dtype), geometry)


def launch_groups(device):
    groups = GroupProducts(device, SCRATCH)
    for rows, dtype in product((5, 10, 20, 40), COMPUTED):
        x, how = images(rows, dtype, last=False), Accumulation(False, 1, 0)
        groups.add_moments(x, ONE, np.empty((1, rows, rows), np.float32), how)
        for columns in (1, 40):
            out = np.empty((1, rows, columns), np.float32)
            groups.add_squares(x, ONE, images(columns, dtype, last=False), out, how)


def launch_plain(device):
    for dtype in COMPUTED:
        update_average(device, np.empty(5, np.float32), np.zeros(5, dtype), 1, 0)
        for last in (False, True):
            x = images(4, dtype, last=last)
            sum_examples(device, x, x, np.empty((2, 8), np.float32))
        for inner in (1, 300):
            ids = np.empty((2, inner), np.int64)
            z = np.zeros((2, 3, inner), dtype)
            draw_classes(device, z, np.zeros((2, inner)), ids)
            if dtype == np.float32:
                cross_entropy(device, z, ids, np.empty((2, inner), dtype), np.empty_like(z))
    leaf = recursive_inverse._Inverse(device, np.zeros(1, np.int32))
    leaf(np.zeros((1, 3, 3)), np.zeros(0), 0)
    count_ids(device, np.zeros(5, np.int64), np.empty(3, np.int32))
    small_products(device, [Product(*np.zeros((3, 2, 2), np.float32))])
    for dtype in (np.float32, np.float64):
        find_infinite(device, [np.zeros(5, dtype)], np.ones(1, np.int32))
        widen(device, np.zeros((1, 3, 3), dtype), np.zeros(1), Floor(0, 0))
        narrow(device, np.zeros((1, 3, 3)), dtype)


def test_launches_use_exactly_listed_variants():
    device = Recorder()
    for launch in (launch_patches, launch_groups, launch_plain):
        launch(device)
    assert device.asked == {(source(name), found) for name in MACROS for found in variants(name)}


def test_unlisted_variant_is_not_launched():
    with pytest.raises(AssertionError, match="ROWS"):
        options("few_products", ROWS=12, INPUT=0)
    with pytest.raises(AssertionError, match="few_products"):
        options("few_products", ROWS=10)


def test_all_sources_have_macro_rows():
    found = {path.name for path in files("kfac_engine.kernels").iterdir()}
    assert {name.removesuffix(".cu") for name in found if name.endswith(".cu")} == set(MACROS)
