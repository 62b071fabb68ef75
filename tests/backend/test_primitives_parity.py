"""Primitives for groups, squares, sums, counts and draws, on the CPU and the GPU."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import ShapeError
from tests.backend import cupy_standin
from tests.backend.truths import patches

# Sums of some hundred products of standard normal numbers, relative to the largest entry.
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-12}
WINDOW = Window((3, 2), (1, 2), (1, 1), (1, 0), (1, 1))
GROUPS, OUTPUTS = 2, 3


@pytest.fixture(params=["numpy", *cupy_standin.KINDS])
def backend(request, monkeypatch):
    if request.param == "numpy":
        return NumpyBackend(scratch_bytes=1 << 12)
    cupy_standin.begin(request.param, monkeypatch)
    return CupyBackend(scratch_bytes=8 << 20)


def close(backend, found, wanted, dtype):
    host = backend.to_numpy(found)
    assert host.dtype == dtype
    np.testing.assert_allclose(host, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def images(dtype, window):
    """Images, output gradients, and the rows of each group, ``(groups, n, t, d)``, with the one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 4, 6, 5)).astype(dtype)
    outputs = window.output_shape(x.shape[2:])
    ds = rng.normal(size=(5, GROUPS * OUTPUTS, *outputs)).astype(dtype)
    w = window
    z = np.stack(
        [
            patches(part, w.kernel, w.strides, w.dilations, w.begins, w.ends)
            for part in np.split(x, GROUPS, axis=1)
        ]
    )
    return x, ds, np.concatenate([z, np.ones((*z.shape[:3], 1))], axis=3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [WINDOW, pointwise(2)], ids=["patches", "pixels"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_group_moments_equal_definition(backend, window, dtype, beta):
    x, _, z = images(dtype, window)
    wanted = 0.3 * np.einsum("gnti,gntj->gij", z, z) + beta
    out = backend.asarray(np.ones(wanted.shape, dtype) if beta else np.full(wanted.shape, np.nan))
    out = out.astype(dtype)
    backend.patch_second_moment(backend.asarray(x), window, out, Accumulation(True, 0.3, beta))
    backend.mirror(out)
    close(backend, out, wanted, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [WINDOW, pointwise(2)], ids=["patches", "pixels"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_squared_gradients_equal_definition(backend, window, dtype, beta):
    x, ds, z = images(dtype, window)
    g = ds.astype(np.float64).reshape(5, GROUPS, OUTPUTS, -1)
    wanted = 0.3 * (np.einsum("gnti,ngot->gnio", z, g) ** 2).sum(axis=1) + beta
    out = backend.asarray(np.ones(wanted.shape, dtype) if beta else np.full(wanted.shape, np.nan))
    out = out.astype(dtype)
    operands = backend.asarray(x), window, backend.asarray(ds)
    backend.squared_gradients(*operands, out, Accumulation(True, 0.3, beta))
    close(backend, out, wanted, dtype)


# Half precision is squared in single, where 300 and its like do not overflow.
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("window", [WINDOW, pointwise(2)], ids=["patches", "pixels"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_patch_squares_equal_definition(backend, window, dtype, beta):
    x = (300 * np.random.default_rng(0).normal(size=(5, 4, 6, 5))).astype(dtype)
    w = window
    z = patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    wanted = 0.3 * (z**2).sum(axis=(0, 1)) + 7e4 * beta
    kept = np.float64 if dtype == np.float64 else np.float32
    out = backend.asarray(np.full(wanted.shape, 7e4 if beta else np.nan, kept))
    backend.patch_squares(backend.asarray(x), window, out, alpha=0.3, beta=beta)
    close(backend, out, wanted, kept)


@pytest.mark.parametrize("shape", [(7, 4), (3, 4, 2, 3, 2, 2)], ids=["a row each", "four axes"])
def test_patch_squares_equal_definition_for_any_strides(backend, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    out = backend.asarray(np.full(4, np.nan, np.float32))
    backend.patch_squares(backend.asarray(x), pointwise(len(shape) - 2), out)
    sums = (x.astype(np.float64) ** 2).sum(axis=(0, *range(2, len(shape))))
    close(backend, out, sums, np.float32)


def test_patch_squares_of_wrong_shape_raise_error(backend):
    x = backend.asarray(np.ones((2, 4, 6, 5), np.float32))
    with pytest.raises(ShapeError, match="4 channels under 6 taps"):
        backend.patch_squares(x, WINDOW, backend.asarray(np.zeros(23, np.float32)))
    with pytest.raises(ShapeError, match="contiguous"):
        backend.patch_squares(x, WINDOW, backend.asarray(np.zeros(48, np.float32))[::2])


# Of a group: one channel with one output, with four, with five, and eight channels.
@pytest.mark.parametrize(("channels", "outputs"), [(1, 1), (1, 4), (2, 5), (8, 2), (9, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_squared_gradients_of_small_groups_equal_definition(backend, channels, outputs, dtype):
    rng, w = np.random.default_rng(0), WINDOW
    x = rng.normal(size=(5, 3 * channels, 6, 5)).astype(dtype)
    sides = w.output_shape((6, 5))
    ds = rng.normal(size=(5, 3 * outputs, *sides)).astype(dtype)
    z = np.stack(
        [
            patches(part, w.kernel, w.strides, w.dilations, w.begins, w.ends)
            for part in np.split(x, 3, axis=1)
        ]
    )
    z = np.concatenate([z, np.ones((*z.shape[:3], 1))], axis=3)
    g = ds.astype(np.float64).reshape(5, 3, outputs, -1)
    wanted = 0.3 * (np.einsum("gnti,ngot->gnio", z, g) ** 2).sum(axis=1) + 0.5
    kept = np.float64 if dtype == np.float64 else np.float32
    out = backend.asarray(np.ones(wanted.shape, kept))
    operands = backend.asarray(x), WINDOW, backend.asarray(ds)
    backend.squared_gradients(*operands, out, Accumulation(True, 0.3, 0.5))
    close(backend, out, wanted, kept)


def test_squared_gradients_of_single_rows_equal_definition(backend):
    rng = np.random.default_rng(0)
    x, ds = (rng.normal(size=(7, d)).astype(np.float32) for d in (4, 3))
    out = backend.asarray(np.zeros((1, 5, 3), np.float32))
    operands = backend.asarray(x), pointwise(0), backend.asarray(ds)
    backend.squared_gradients(*operands, out, Accumulation(homogeneous=True))
    ones = np.concatenate([x, np.ones((7, 1))], axis=1)
    close(backend, out, (np.einsum("ni,no->nio", ones, ds) ** 2).sum(axis=0)[None], np.float32)


def test_group_results_of_wrong_shape_raise_error(backend):
    x = backend.asarray(np.ones((2, 4, 5, 5), np.float32))
    out = backend.asarray(np.zeros((3, 6, 6), np.float32))
    with pytest.raises(ShapeError, match="3 groups of 4 channels under 6 taps"):
        backend.patch_second_moment(x, WINDOW, out)
    turned = backend.asarray(np.zeros((2, 12, 12), np.float32)).swapaxes(1, 2)
    with pytest.raises(ShapeError, match="C-contiguous"):
        backend.patch_second_moment(x, WINDOW, turned)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("axes", [(1,), (2, 3), (1, 3), (), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("short", [None, 1, 3])
def test_example_sums_equal_definition(backend, axes, short, dtype):
    rng = np.random.default_rng(0)
    shape = [3, 4, 5, 6]
    ds = rng.normal(size=shape).astype(dtype)
    if short is not None:
        shape[short] = 1
    x = rng.normal(size=shape).astype(dtype)
    found = backend.example_sums(backend.asarray(x), backend.asarray(ds), axes)
    wide = x.astype(np.float64) * ds, ds.astype(np.float64)
    wanted = np.concatenate([a.sum(axis=axes).reshape(3, -1) for a in wide], axis=1)
    close(backend, found, wanted, dtype)


def test_count_ids_counts_ids_in_range(backend):
    ids = np.random.default_rng(0).integers(-2, 9, (6, 5))
    found = backend.to_numpy(backend.count_ids(backend.asarray(ids), 7))
    np.testing.assert_array_equal(found, [(ids == i).sum() for i in range(7)])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("axis", [1, -1])
def test_draw_classes_inverts_cumulative_sum(backend, axis, dtype):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 6, 5)).astype(dtype)
    shape = np.delete(logits.shape, axis)
    uniforms = rng.random(shape)
    p = np.exp(logits.astype(np.float64))
    bound = (p / p.sum(axis=axis, keepdims=True)).cumsum(axis=axis)
    wanted = (bound <= np.expand_dims(uniforms, axis)).sum(axis=axis)
    found = backend.to_numpy(backend.draw_classes(backend.asarray(logits), uniforms, axis))
    np.testing.assert_array_equal(found, wanted)


def test_draw_classes_uses_float64_sums(backend):
    """Of many equal weights that float32 rounds, a float32 sum would be off by some classes."""
    logits = np.full((5, 50_000), 0.1, np.float32)
    logits[:, -1] = 2.0
    weight = np.exp(np.float64(np.float32(0.1) - np.float32(2.0)))
    wanted = np.array([0, 15_000, 35_000, 49_000, 49_998])
    # In the middle between two classes, so that nothing hangs on the order of a sum.
    uniforms = (wanted + 0.5) * weight / (49_999 * weight + 1)
    found = backend.to_numpy(backend.draw_classes(backend.asarray(logits), uniforms, -1))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_add_scaled_equals_definition(backend, beta, dtype):
    """Of half precision, products would overflow: they are taken in the result's."""
    measured = (1e4 * np.random.default_rng(0).normal(size=(3, 5))).astype(dtype)
    kept = np.float64 if dtype == np.float64 else np.float32
    out = backend.asarray(np.full((3, 5), 2.0 if beta else np.nan, kept))
    backend.add_scaled(out, backend.asarray(measured), 30.0, beta)
    close(backend, out, 30.0 * measured.astype(np.float64) + 2 * beta, kept)


def test_are_finite_detects_nonfinite_arrays(backend):
    wide = np.ones((40, 30), np.float32)
    bad = wide.copy()
    bad[39, 29] = -np.inf
    hosts = [wide, bad, np.full(3, 3e38, np.float32), np.array([1, np.nan]), np.arange(4.0)]
    hosts += [np.array([[np.inf]], np.float16), np.zeros((0, 2)), bad.T, np.arange(3)]
    flags = backend.are_finite([backend.asarray(host) for host in hosts])
    found = backend.to_numpy(flags).astype(bool).tolist()
    assert found == [np.isfinite(host).all() for host in hosts]
    assert backend.to_numpy(backend.are_finite([])).shape == (0,)


def test_are_finite_reads_device_once(backend):
    arrays = [np.ones(3, np.float32), np.array([1, np.nan]), np.arange(4), np.zeros((0, 2))]
    cupy_standin.COUNTS.clear()
    found = backend.squared_norms([backend.asarray(array) for array in arrays])
    np.testing.assert_array_equal(found, [3.0, np.nan, 14.0, 0.0])
    assert cupy_standin.COUNTS["downloads"] + cupy_standin.COUNTS["reads"] <= 1
