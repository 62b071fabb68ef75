"""Depthwise and separable convolutions against loops over channels."""

from functools import partial

import numpy as np
import pytest
from scipy.linalg import block_diag

import kfac_engine as ke
from tests.backend.truths import patches as truth_patches
from tests.lifecycle import Block, as_matrix, damped_block, observe, second_moment

EXACT = 1e-11  # float64 sums of some hundred terms of size one
DAMPING = 0.3
KERNEL, CHANNELS, MULTIPLIER = (2, 3), 3, 2
FILTER = (*KERNEL, CHANNELS, MULTIPLIER)
GRAPH = {"w": FILTER, "b": (CHANNELS * MULTIPLIER,)}
SIDES, PADS = (4, 5), ((0, 1), (1, 1))  # "SAME" for this kernel and strides of one


def batch(n=4, seed=0, dtype=np.float64, first=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, *SIDES, CHANNELS)) + 0.3
    ds = rng.normal(size=(n, *SIDES, CHANNELS * MULTIPLIER))
    if first:
        x, ds = np.moveaxis(x, -1, 1), np.moveaxis(ds, -1, 1)
    return {"x": x.astype(dtype), "ds": ds.astype(dtype)}


def by_channel(values, first=False):
    """For each channel, its patches ``(n, t, taps)`` and gradients ``(n, t, multiplier)``."""
    x, ds = (values[name] if first else np.moveaxis(values[name], -1, 1) for name in ("x", "ds"))
    begins, ends = zip(*PADS, strict=True)
    for c in range(CHANNELS):
        rows = truth_patches(x[:, c : c + 1], KERNEL, (1, 1), (1, 1), begins, ends)
        made = ds[:, c * MULTIPLIER : (c + 1) * MULTIPLIER]
        yield rows, made.reshape(*made.shape[:2], -1).swapaxes(1, 2)


def by_channel_packing(parts):
    return np.moveaxis(parts[0].reshape(-1, CHANNELS, MULTIPLIER), 1, 0)


def diagonal(values, first=False):
    """Mean squared gradient of each filter entry, channel by channel."""
    squares = [
        sum((x.T @ d) ** 2 for x, d in zip(a, ds, strict=True)) / len(a)
        for a, ds in by_channel(values, first)
    ]
    return np.diag(np.array(squares).ravel())


def pairs(values, first=False):
    return [
        (second_moment(a.reshape(-1, a.shape[2])), second_moment(ds.reshape(-1, MULTIPLIER)))
        for a, ds in by_channel(values, first)
    ]


def kronecker(values, first=False):
    t = int(np.prod(SIDES))
    return block_diag(*(t * np.kron(A, G) for A, G in pairs(values, first)))


TRUTHS = {None: diagonal, "diagonal": diagonal, "kron": kronecker}


def block_of(approx, first):
    def registered(towers):
        collection = ke.LayerCollection(graph=GRAPH)
        for tower in range(towers):
            names = [f"{name}{tower}" if towers > 1 else name for name in "xs"]
            collection.register_depthwise_conv2d(
                "w", *names, (1, 1, 1, 1), "SAME", approx=approx,
                data_format="NCHW" if first else None,
            )  # fmt: skip
        return collection

    def damped(values, damping):
        if approx != "kron":
            return diagonal(values, first) + damping * np.eye(np.prod(FILTER))
        t = int(np.prod(SIDES))
        return block_diag(*(damped_block(A, G, damping, t) for A, G in pairs(values, first)))

    return Block(
        partial(batch, first=first), registered, partial(TRUTHS[approx], first=first), damped,
        [FILTER], by_channel_packing, single=1e-5, linear=approx != "kron",
        locations=int(np.prod(SIDES)) if approx == "kron" else 1,
    )  # fmt: skip


BLOCKS = {
    f"{approx} {'NCHW' if first else 'NHWC'}": block_of(approx, first)
    for approx in TRUTHS
    for first in (False, True)
}


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_a_filter_with_its_outputs_first_is_the_same_layer(data_format):
    first = data_format == "NCHW"
    values = batch(seed=2, first=first)
    stored = (CHANNELS * MULTIPLIER, 1, *KERNEL)
    images = (4, CHANNELS, *SIDES) if first else (4, *SIDES, CHANNELS)
    collection = ke.LayerCollection(graph={"w": stored, "x": images})
    collection.register_depthwise_conv2d(
        "w", "x", "s", (1, 1, 1, 1), "SAME", None, data_format, "kron", weight_format="OIHW"
    )
    block = observe(collection, [["ds"]], [values])
    expected = kronecker(values, first)
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=EXACT * expected.max())

    def packing(parts):
        by_output = parts[0].reshape(CHANNELS, MULTIPLIER, -1)
        return by_output.swapaxes(1, 2)

    found = as_matrix(block.multiply, [stored], packing)
    t = int(np.prod(SIDES))
    matrix = block_diag(*(damped_block(A, G, 0.1, t) for A, G in pairs(values, first)))
    np.testing.assert_allclose(found, matrix, atol=EXACT * matrix.max())


def test_dilations_are_the_rate():
    values = batch(seed=3)
    values["ds"] = values["ds"][:, :2, :1]
    collection = ke.LayerCollection(graph=GRAPH)
    collection.register_depthwise_conv2d("w", "x", "s", (1, 1, 1, 1), "VALID", rate=(2, 2))
    block = observe(collection, [["ds"]], [values])
    x, ds = values["x"], values["ds"]
    expected = np.zeros(FILTER)
    for n in range(len(x)):
        gradient = np.zeros(FILTER)
        for i, j, c, m, row in np.ndindex(*FILTER, 2):
            made = ds[n, row, 0, c * MULTIPLIER + m]
            gradient[i, j, c, m] += x[n, row + 2 * i, 2 * j, c] * made
        expected += gradient**2 / len(x)
    found = by_channel_packing((expected,)).ravel()
    np.testing.assert_allclose(np.diag(block.full_fisher_block()), found, atol=EXACT * found.max())


@pytest.mark.parametrize(
    ("name", "truth"),
    [("DepthwiseConvDiagonalFB", diagonal), ("DepthwiseConvKFCBasicFB", kronecker)],
)
def test_named_blocks_equal_the_registered_ones(name, truth):
    collection = ke.LayerCollection(graph=GRAPH)
    block = getattr(ke, name)(collection, "w", (1, 1, 1, 1), "SAME", (1, 1), "NHWC")
    block.register_additional_tower("x", "s")
    collection.register_block("w", block)
    values = batch(seed=4)
    observe(collection, [["ds"]], [values])
    expected = truth(values)
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=EXACT * expected.max())
    with pytest.raises(NotImplementedError, match="without a bias"):
        getattr(ke, name)(collection, ("w", "b"), (1, 1, 1, 1), "SAME")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params": ("w", "b")}, NotImplementedError, "without a bias"),
        ({"strides": (1, 1)}, ValueError, "4 strides"),
        ({"rate": (1, 1, 1, 1)}, ValueError, "a dilation for each of two spatial axes"),
        ({"params": "flat"}, ValueError, "4 axes are needed"),
        ({"approx": "full"}, ValueError, "Bad value 'full' for approx"),
        ({"weight_format": "OIHW"}, ValueError, "shape of 'x' is needed"),
        ({"data_format": "NCWH"}, ValueError, "must be one of NHWC, NCHW; got 'NCWH'"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_registered(options, error, message):
    collection = ke.LayerCollection(graph=GRAPH | {"flat": (2, 3)})
    given = {"params": "w", "strides": (1, 1, 1, 1)} | options
    with pytest.raises(error, match=message):
        collection.register_depthwise_conv2d(inputs="x", outputs="s", padding="SAME", **given)
    assert collection.get_blocks() == ()


POINTWISE = {"p": (1, 1, CHANNELS * MULTIPLIER, 2), "q": (2,)}


@pytest.mark.parametrize("approx", [None, "kron", "diagonal"])
def test_a_separable_convolution_is_a_depthwise_and_a_pointwise_one(approx):
    collection = ke.LayerCollection(graph=GRAPH | POINTWISE)
    collection.register_separable_conv2d(
        "w", ("p", "q"), "x", "mid", "s", (1, 1, 1, 1), "SAME", approx=approx
    )
    depthwise, pointwise = collection.get_blocks()
    assert depthwise.tensors_to_compute_grads() == ("mid",)
    assert pointwise.tensors_to_compute_grads() == ("s",)
    depthwise.instantiate_factors([["dmid"]], DAMPING)
    pointwise.instantiate_factors([["ds"]], DAMPING)
    values = batch(seed=5)
    rng = np.random.default_rng(6)
    mid, ds = rng.normal(size=values["ds"].shape), rng.normal(size=(*values["ds"].shape[:3], 2))
    batch_ = {"x": values["x"], "dmid": values["ds"], "mid": mid, "ds": ds}
    for factor in collection.get_factors():
        factor.instantiate_cov_variables()
        factor.make_covariance_update_op(0.9)(batch_)
    expected = diagonal(values)
    np.testing.assert_allclose(depthwise.full_fisher_block(), expected, atol=EXACT * expected.max())
    a, g = mid.reshape(len(mid), -1, CHANNELS * MULTIPLIER), ds.reshape(len(ds), -1, 2)
    if approx == "diagonal":
        a = np.concatenate([a, np.ones((*a.shape[:2], 1))], axis=2)
        squares = sum((x.T @ d) ** 2 for x, d in zip(a, g, strict=True)) / len(a)
        expected = np.diag(squares.ravel())
    else:
        A, G = second_moment(a.reshape(-1, a.shape[2]), True), second_moment(g.reshape(-1, 2))
        expected = a.shape[1] * np.kron(A, G)
    np.testing.assert_allclose(pointwise.full_fisher_block(), expected, atol=EXACT * expected.max())


@pytest.mark.parametrize(
    ("params", "approx"), [(("p", "q"), "full"), ("flat", None), ("unknown", None)]
)
def test_no_half_of_a_separable_convolution_is_registered(params, approx):
    collection = ke.LayerCollection(graph=GRAPH | POINTWISE | {"flat": (6, 2)})
    with pytest.raises(ValueError, match=r"Bad value|axes are needed|shape of"):
        collection.register_separable_conv2d(
            "w", params, "x", "mid", "s", (1, 1, 1, 1), "SAME", approx=approx
        )
    assert collection.get_blocks() == ()
