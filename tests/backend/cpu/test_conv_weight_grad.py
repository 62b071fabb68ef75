"""Gradients of kernels against their definition, tap by tap, in float64."""

import tracemalloc
from itertools import product

import numpy as np
import pytest

from kfac_engine.backend.cpu.conv_weight_grad import Scratch, add_weight_gradient
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window
from tests.backend.geometries import CORNERS, EVERY, Case, nightly_but_covering
from tests.backend.truths import patches

# Sums of some hundred products of numbers around one.
DOUBLE, SINGLE = 1e-12, 1e-5
SCRATCH = {"a position": 1, "a line": 3000, "all": 1 << 26}
THREE_BY_THREE = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))


def cotangents(case, channels, seed=1):
    outputs = case.window.output_shape(case.sides)
    return np.random.default_rng(seed).standard_normal((case.n, channels, *outputs))


def definition(case, x, g, groups):
    window, ins = case.window, case.channels // groups
    seen = patches(x, *(getattr(window, name) for name in window.__slots__))
    seen = seen.reshape(case.n, -1, window.taps, groups, ins)
    g_rows = np.asarray(g, np.float64).reshape(case.n, groups, -1, seen.shape[1])
    found = np.einsum("ngoq,nqugc->gocu", g_rows, seen)
    return found.reshape(g.shape[1], ins, *window.kernel)


def gradient(x, g, case, groups, *, threads=1, scratch=1 << 26):
    out = np.zeros((g.shape[1], x.shape[1] // groups, *case.window.kernel), x.dtype)
    add_weight_gradient(x, g, case.window, out, Workers(threads), scratch=Scratch(scratch))
    return out


@pytest.mark.parametrize("scratch", SCRATCH.values(), ids=SCRATCH)
@pytest.mark.parametrize("case", nightly_but_covering([*CORNERS, *EVERY]))
def test_weight_gradient_equals_definition_for_all_windows(case, scratch):
    x = case.images()
    for groups, outs in ((1, 3), (case.channels, case.channels * 2)):
        g = cotangents(case, outs)
        found, expected = (
            gradient(x, g, case, groups, scratch=scratch),
            definition(case, x, g, groups),
        )
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=DOUBLE * max(1, abs(expected).max())
        )


@pytest.mark.parametrize("n", [1, 2, 7], ids="{}_images".format)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_weight_gradient_of_threads_equals_definition(n, strides):
    window = Window((3, 3), strides, (1, 1), (1, 1), (1, 1))
    case = Case(window, n, 32, (40, 24))
    x, g = case.images().astype(np.float32), cotangents(case, 32).astype(np.float32)
    expected = definition(case, x, g, 1)
    for threads, scratch in product((2, 3), (1 << 19, 1 << 26)):
        found = gradient(x, g, case, 1, threads=threads, scratch=scratch)
        np.testing.assert_allclose(found, expected, rtol=0, atol=SINGLE * abs(expected).max())


def test_weight_gradient_is_added_to_result_with_any_strides():
    case = Case(THREE_BY_THREE, 3, 4, (6, 5))
    x, g = case.images(), cotangents(case, 2)
    room = np.full((3, 4, 3, 2, 2), np.nan)
    out = room[..., 0].transpose(3, 1, 0, 2)
    out[...] = 7
    add_weight_gradient(x, g, case.window, out, Workers(1), scratch=Scratch(1 << 20))
    expected = 7 + definition(case, x, g, 1)
    np.testing.assert_allclose(out, expected, rtol=0, atol=DOUBLE * abs(expected).max())
    assert np.isnan(room[..., 1]).all()


def test_operands_may_have_any_strides():
    case = Case(THREE_BY_THREE, 3, 4, (6, 5))
    x, g = case.images(), cotangents(case, 2)
    last = [np.ascontiguousarray(np.moveaxis(value, 1, -1)) for value in (x, g)]
    found = gradient(*(np.moveaxis(value, -1, 1) for value in last), case, 1)
    expected = definition(case, x, g, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=DOUBLE * abs(expected).max())


@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_memory_is_within_bound(threads):
    case = Case(THREE_BY_THREE, 2, 32, (64, 64))
    x, g = case.images().astype(np.float32), cotangents(case, 32).astype(np.float32)
    bound, small = 700_000, 100_000  # objects of Python, and the sum of what threads found
    gradient(x, g, case, 1, threads=threads, scratch=bound)
    tracemalloc.start()
    gradient(x, g, case, 1, threads=threads, scratch=bound)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < bound + small
    assert x.nbytes > bound


def test_tasks_reuse_scratch_memory():
    scratch = Scratch(1 << 20)
    with scratch.bytes(1000) as first:
        first.fill(5)
    with scratch.bytes(600) as second, scratch.bytes(10) as other:
        assert second.size == 600
        assert np.shares_memory(first, second)
        assert not np.shares_memory(first, other)
