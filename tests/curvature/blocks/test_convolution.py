"""Convolution blocks against patches read pixel by pixel and dense matrices."""

from math import prod

import numpy as np
import pytest

import kfac_engine as ke
from tests.curvature.blocks.convolutions import PARAMS, Convolution
from tests.lifecycle import (
    Block,
    assert_products,
    damped_block,
    observe,
    second_moment,
)

EXACT = 1e-11  # float64 sums of some hundred terms of size one


CASES = {
    "1d": Convolution((7,), (3,), "SAME", strides=(2,)),
    "1d-first": Convolution((6,), (2,), ((1, 0),), dilations=(2,), first=True, bias=False),
    "2d": Convolution((5, 4), (3, 2), "SAME"),
    "2d-strided": Convolution((6, 5), (2, 3), "SAME", strides=(2, 3), bias=False),
    "2d-dilated": Convolution((6, 7), (2, 2), "VALID", dilations=(3, 2)),
    "2d-first": Convolution((4, 4), (2, 2), ((0, 1), (2, 0)), first=True),
    "2d-1x1": Convolution((3, 3), (1, 1), channels=3),
    "3d": Convolution((3, 4, 3), (2, 1, 2), "SAME", strides=(1, 2, 1)),
    "3d-first": Convolution((3, 3, 3), (2, 2, 2), "VALID", first=True),
}


def registered(case, *, towers=1, config=None, **options):
    """A collection with the convolution, tower by tower."""
    collection = ke.LayerCollection(
        graph={"w": case.filter_shape, "b": (case.outputs,)}, config=config
    )
    for tower in range(towers):
        suffix = str(tower) if towers > 1 else ""
        collection.register_convolution(
            PARAMS[case.bias],
            f"x{suffix}",
            f"s{suffix}",
            case.padding,
            strides=case.strides,
            dilation_rate=case.dilations,
            **case.formats,
            **options,
        )
    return collection


def truth(case, values):
    a, ds = next(case.by_group(values))
    A = second_moment(a.reshape(-1, a.shape[-1]), case.bias)
    return A, second_moment(ds.reshape(-1, case.outputs)), a.shape[1]


def block_of(case):
    def matrix(values):
        A, G, t = truth(case, values)
        return t * np.kron(A, G)

    def damped(values, damping):
        return damped_block(*truth(case, values)[:2], damping, prod(case.locations))

    return Block(
        case.batch, lambda towers: registered(case, towers=towers), matrix, damped, case.shapes,
        case.pack, locations=prod(case.locations),
    )  # fmt: skip


BLOCKS = {name: block_of(case) for name, case in CASES.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_conv1d_is_a_convolution_over_one_axis(dtype):
    case = CASES["1d"]
    values = case.batch(4, seed=4, dtype=dtype)
    collection = ke.LayerCollection(graph={"w": case.filter_shape})
    collection.register_conv1d(("w", "b"), [1, 2, 1], "SAME", "x", "s", approx="kron")
    block = observe(collection, [["ds"]], [values])
    A, G, t = truth(case, values)
    tolerance = EXACT if dtype == np.float64 else 1e-5  # float32 sums of sixteen terms
    np.testing.assert_allclose(block.full_fisher_block(), t * np.kron(A, G), atol=tolerance)


@pytest.mark.parametrize(
    ("name", "case", "strides", "rates", "data_format"),
    [
        (None, "2d", (1, 1), (1, 1), None),
        ("extract_convolution_patches", "2d-strided", (2, 3), None, "NHWC"),
        (None, "2d-strided", (1, 1, 2, 3), (1, 1, 1, 1), "NCHW"),
        ("extract_convolution_patches", "2d-dilated", None, (3, 2), "NCHW"),
        ("extract_image_patches", "2d-strided", (1, 2, 3, 1), (1, 1, 1, 1), None),
        ("extract_image_patches", "2d-dilated", (1, 1, 1, 1), (1, 3, 2, 1), None),
        ("extract_pointwise_conv2d_patches", "2d-1x1", (1, 1, 1, 1), None, None),
    ],
)
def test_every_way_to_extract_patches_gives_the_same_numbers(
    name, case, strides, rates, data_format
):
    case = CASES[case]
    collection = ke.LayerCollection(graph={"w": case.filter_shape})
    params = PARAMS[case.bias]
    block = ke.ConvKFCBasicFB(
        collection,
        params,
        case.padding,
        strides,
        rates,
        data_format=data_format,
        extract_patches_fn=name,
    )
    assert isinstance(block, ke.KroneckerProductFB)
    block.register_additional_tower("x", "s")
    collection.register_block(params, block)
    values = case.batch(3, seed=5)
    first = data_format == "NCHW"
    given = {key: np.moveaxis(a, -1, 1) for key, a in values.items()} if first else values
    observe(collection, [["ds"]], [given], damping=0.2, exps=(-1, -0.25), cholesky=True)
    A, G, t = truth(case, values)
    np.testing.assert_allclose(block.full_fisher_block(), t * np.kron(A, G), atol=EXACT)
    B = damped_block(A, G, 0.2, t)
    assert_products(block, B, case.shapes, case.pack, 1e-9, exps=(-1, -0.25))
    assert block.num_registered_towers == 1
    assert block.tensors_to_compute_grads() == ("s",)


@pytest.mark.parametrize(
    ("name", "case", "strides"),
    [
        ("extract_image_patches", "1d", (1, 2, 1)),
        ("extract_image_patches", "2d-strided", (2, 3)),
        ("extract_pointwise_conv2d_patches", "2d", (1, 1, 1, 1)),
        ("extract_pointwise_conv2d_patches", "2d-1x1", (1, 2, 2, 1)),
        ("extract_gold", "2d", None),
    ],
)
def test_an_extraction_that_does_not_apply_is_refused(name, case, strides):
    collection = ke.LayerCollection(graph={"w": CASES[case].filter_shape})
    with pytest.raises(ke.UnsupportedError, match="extract"):
        ke.ConvKFCBasicFB(collection, "w", "VALID", strides, extract_patches_fn=name)


@pytest.mark.parametrize("first", [False, True], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("approx", ["kron", "diagonal"])
def test_a_mask_multiplies_every_patch(approx, first):
    case = Convolution((4, 5), (2, 3), "SAME", first=first)
    mask = np.random.default_rng(6).integers(0, 2, (2, 3, 2)) * 1.5
    collection = ke.LayerCollection(graph={"w": case.filter_shape})
    collection.register_conv2d(
        ("w", "b"), [1, 1, 1, 1], "SAME", "x", "s", approx=approx, patch_mask=mask, **case.formats
    )
    batches = [case.batch(3, seed=seed) for seed in (7, 8)]
    block = observe(collection, [["ds"]], batches, decay=1.0)
    found = []
    for values in batches:
        a, ds = next(case.by_group(values))
        a = a * mask.ravel()
        if approx == "kron":
            A = second_moment(a.reshape(-1, 12), has_bias=True)
            found.append((A, second_moment(ds.reshape(-1, 2))))
        else:
            a = np.concatenate([a, np.ones((*a.shape[:2], 1))], axis=2)
            found.append((sum((x.T @ d) ** 2 for x, d in zip(a, ds, strict=True)) / len(a),))
    averages = [sum(moments) / 2 for moments in zip(*found, strict=True)]
    expected = (
        prod(case.locations) * np.kron(*averages)
        if approx == "kron"
        else np.diag(averages[0].ravel())
    )
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=EXACT)


NAN_MASK = np.full((2, 2, 3), np.nan)


@pytest.mark.parametrize(
    ("method", "params", "options", "error"),
    [
        ("conv2d", "w", {"strides": [1, 1], "patch_mask": np.ones((2, 2))}, ke.ShapeError),
        ("conv2d", "w", {"strides": [1, 1], "patch_mask": NAN_MASK}, ke.NonFiniteError),
        ("conv1d", "w", {"strides": [1]}, ke.InputError),
        ("conv2d", "v", {"strides": [1, 1]}, ke.InputError),
        ("convolution", "w", {"approx": "diagonal"}, ke.InputError),
        ("convolution", "flat", {}, ke.InputError),
    ],
    ids=["mask-shape", "mask-nan", "rank-1d", "rank-2d", "approximation", "rank-any"],
)
def test_what_does_not_fit_is_refused_and_not_registered(method, params, options, error):
    collection = ke.LayerCollection(graph={"w": (2, 2, 3, 2), "v": (3, 2, 2), "flat": (4, 2)})
    with pytest.raises(error):
        getattr(collection, f"register_{method}")(
            params, padding="SAME", inputs="x", outputs="s", **options
        )
    assert collection.get_blocks() == ()
