"""Convolution blocks against patches read pixel by pixel and dense matrices."""

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest

import kfac_engine as ke
from tests.backend.truths import patches as truth_patches
from tests.lifecycle import (
    Block,
    assert_products,
    damped_block,
    observe,
    plain_packing,
    second_moment,
)

EXACT = 1e-11  # float64 sums of some hundred terms of size one


@dataclass(frozen=True)
class Case:
    """A convolution over some spatial axes."""

    sides: tuple
    kernel: tuple
    padding: object = "VALID"
    strides: tuple | None = None
    dilations: tuple | None = None
    bias: bool = True
    first: bool = False
    channels: int = 2
    outputs: int = 2

    @property
    def axes(self):
        return len(self.sides)

    @property
    def filter_shape(self):
        if self.first:
            return (self.outputs, self.channels, *self.kernel)
        return (*self.kernel, self.channels, self.outputs)

    @property
    def steps(self):
        return self.strides or (1,) * self.axes, self.dilations or (1,) * self.axes

    @property
    def pads(self):
        """Padding before and after, written out from TensorFlow's definition."""
        if self.padding == "VALID":
            return [(0, 0)] * self.axes
        if self.padding != "SAME":
            return list(self.padding)
        pads = []
        for side, k, s, d in zip(self.sides, self.kernel, *self.steps, strict=True):
            outputs = -(-side // s)
            total = max((outputs - 1) * s + (k - 1) * d + 1 - side, 0)
            pads.append((total // 2, total - total // 2))
        return pads

    @property
    def locations(self):
        return tuple(
            (side + b + e - (k - 1) * d - 1) // s + 1
            for side, (b, e), k, s, d in zip(
                self.sides, self.pads, self.kernel, *self.steps, strict=True
            )
        )

    def batch(self, n, seed, dtype=np.float64):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, *self.sides, self.channels)) + 0.3
        ds = rng.normal(size=(n, *self.locations, self.outputs))
        if self.first:
            x, ds = np.moveaxis(x, -1, 1), np.moveaxis(ds, -1, 1)
        return {"x": x.astype(dtype), "ds": ds.astype(dtype)}

    def rows(self, values):
        """Patches ``(n, t, d)`` and gradients ``(n, t, outputs)``, in float64."""
        x, ds = values["x"], values["ds"]
        if not self.first:
            x, ds = np.moveaxis(x, -1, 1), np.moveaxis(ds, -1, 1)
        begins, ends = zip(*self.pads, strict=True)
        a = truth_patches(x, self.kernel, *self.steps, begins, ends)
        flat = ds.reshape(len(ds), self.outputs, -1).astype(np.float64)
        return a, flat.swapaxes(1, 2)

    @property
    def shapes(self):
        return [self.filter_shape] + [(self.outputs,)] * self.bias

    def pack(self, parts):
        weight = parts[0]
        if self.first:
            weight = np.moveaxis(weight, (0, 1), (-1, -2))
        return plain_packing((weight, *parts[1:]))


CASES = {
    "1d": Case((7,), (3,), "SAME", strides=(2,)),
    "1d-first": Case((6,), (2,), ((1, 0),), dilations=(2,), first=True, bias=False),
    "2d": Case((5, 4), (3, 2), "SAME"),
    "2d-strided": Case((6, 5), (2, 3), "SAME", strides=(2, 3), bias=False),
    "2d-dilated": Case((6, 7), (2, 2), "VALID", dilations=(3, 2)),
    "2d-first": Case((4, 4), (2, 2), ((0, 1), (2, 0)), first=True),
    "2d-1x1": Case((3, 3), (1, 1), channels=3),
    "3d": Case((3, 4, 3), (2, 1, 2), "SAME", strides=(1, 2, 1)),
    "3d-first": Case((3, 3, 3), (2, 2, 2), "VALID", first=True),
}
PARAMS = {True: ("w", "b"), False: "w"}
FORMATS = {1: ("NCW", "OIW"), 2: ("NCHW", "OIHW"), 3: ("NCDHW", "OIDHW")}


def formats(case):
    names = ("data_format", "weight_format")
    return dict(zip(names, FORMATS[case.axes], strict=True)) if case.first else {}


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
            **formats(case),
            **options,
        )
    return collection


def truth(case, values):
    a, ds = case.rows(values)
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
    case = Case((4, 5), (2, 3), "SAME", first=first)
    mask = np.random.default_rng(6).integers(0, 2, (2, 3, 2)) * 1.5
    collection = ke.LayerCollection(graph={"w": case.filter_shape})
    collection.register_conv2d(
        ("w", "b"), [1, 1, 1, 1], "SAME", "x", "s", approx=approx, patch_mask=mask, **formats(case)
    )
    batches = [case.batch(3, seed=seed) for seed in (7, 8)]
    block = observe(collection, [["ds"]], batches, decay=1.0)
    found = []
    for values in batches:
        a, ds = case.rows(values)
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
