"""Kernels for groups of channels, squares, sums and classes, thread by thread on the CPU."""

import ml_dtypes
import numpy as np
import pytest

from kfac_engine.backend.cuda.gram import GroupProducts
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.kernels.groups import cross_entropy, draw_classes, sum_examples
from tests.backend.geometries import CORNERS, STRIDED, Case
from tests.backend.truths import patches
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

each_order = pytest.mark.parametrize("order", ORDERS)

SCRATCH = 4 << 20
ALPHA, BETA = 0.1, 0.9
# Float32 sums of some thousand products, relative to the largest entry; squares of such sums.
TOLERANCE = 2e-6

# Images with four channels more for each group: what is drawn has few.
GEOMETRIES = [*STRIDED[::12], *CORNERS]
# Groups whose features fill more than a small tile, and more than a large one.
WIDE = [
    (Case(Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), 2, 8, (4, 5)), 2),
    (Case(Window((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), 2, 16, (6, 5)), 2),
    (Case(Window((1,), (1,), (1,), (0,), (0,)), 3, 70, (4,)), 1),
]
# Rows of thirteen: more than fit the registers of a thread, and less than a small tile.
NARROW = Case(Window((3,), (1,), (1,), (1,), (1,)), 2, 4, (90,)), 2


def grouped(case, groups, dtype=np.float32):
    """Images whose channels are those of the case for each group."""
    shape = case.n, case.channels * groups, *case.sides
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def rows(x, window, groups, *, ones):
    """Patches of each group in float64, ``(groups, n, t, features (+ 1))``."""
    w = window
    each = [
        patches(part, w.kernel, w.strides, w.dilations, w.begins, w.ends)
        for part in np.split(x.astype(np.float64), groups, axis=1)
    ]
    found = np.stack(each)
    return np.concatenate([found, np.ones((*found.shape[:3], 1))], axis=3) if ones else found


def check(
    case,
    groups,
    columns=3,
    *,
    order="forward",
    ones=True,
    dtype=np.float32,
    beta=BETA,
    processors=2,
    scratch=SCRATCH,
    channels_last=False,
):
    """Compare the moments and the squares of groups with their definitions; return the device."""
    x = grouped(case, groups, dtype)
    if channels_last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    z = rows(x, case.window, groups, ones=ones)
    outputs = case.window.output_shape(case.sides)
    y = np.random.default_rng(3).standard_normal((case.n, *outputs, groups * columns))
    y = np.moveaxis(y.astype(dtype), -1, 1)
    g = y.astype(np.float64).reshape(case.n, groups, columns, -1)
    moment = ALPHA * np.einsum("gnti,gntj->gij", z, z)
    squares = ALPHA * (np.einsum("gnti,ngot->gnio", z, g) ** 2).sum(axis=1)
    device = ShimDevice(order, processors)
    products, how = GroupProducts(device, scratch), Accumulation(ones, ALPHA, beta)
    for wanted, add in (
        (moment, lambda out: products.add_moments(x, case.window, out, how)),
        (squares, lambda out: products.add_squares(x, case.window, y, out, how)),
    ):
        old = np.random.default_rng(2).normal(size=wanted.shape).astype(np.float32)
        old = old + old.swapaxes(1, 2) if wanted is moment else old
        out = old.copy() if beta else np.full_like(old, np.nan)
        add(out)
        expected = wanted + beta * old
        if wanted is moment:
            np.testing.assert_array_equal(out, out.swapaxes(1, 2))
        np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    return device


@each_order
@pytest.mark.parametrize(("case", "groups"), [*WIDE, NARROW, (STRIDED[0], 3)], ids=str)
def test_group_products_are_independent_of_thread_order(case, groups, order):
    check(case, groups, order=order)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
def test_group_products_equal_definition_for_any_geometry(case, groups):
    check(case, groups)


PIECES = Case(Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), 5, 1, (20, 20)), 2
VARIANTS = {
    "float16": (WIDE[0], {"dtype": np.float16}),
    "bfloat16": (WIDE[0], {"dtype": ml_dtypes.bfloat16}),
    "without the homogeneous coordinate": (WIDE[0], {"ones": False}),
    "over NaN": (WIDE[0], {"beta": 0}),
    "channels last": (WIDE[0], {"channels_last": True}),
    "more columns than a tile": (WIDE[0], {"columns": 70}),
    "pieces of one": (PIECES, {"scratch": 1, "processors": 3}),
    "one piece": (PIECES, {"processors": 3}),
}


@pytest.mark.parametrize(("case", "options"), VARIANTS.values(), ids=VARIANTS)
def test_group_products_of_each_variant_equal_definition(case, options):
    check(*case, **options)


# Rows that fit the registers of a thread: of three and of ten, and of each of many images.
FEW = [
    (Case(Window((3,), (1,), (1,), (1,), (1,)), 3, 1, (40,)), 4),
    (Case(Window((3, 3), (2, 1), (1, 2), (1, 1), (0, 1)), 20, 1, (7, 6)), 3),
    (Case(Window((1, 2), (1, 1), (1, 1), (0, 0), (0, 0)), 9, 4, (3, 4)), 2),
]


@each_order
@pytest.mark.parametrize(("case", "groups"), FEW, ids=str)
def test_register_products_are_independent_of_thread_order(case, groups, order):
    assert {"few_products", "few_squares"} <= set(check(case, groups, 1, order=order).launched)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize("beta", [0, BETA])
@pytest.mark.parametrize(("case", "groups"), FEW, ids=str)
def test_register_products_support_all_types(case, groups, beta, ones, dtype):
    check(case, groups, 1, beta=beta, ones=ones, dtype=dtype, processors=5)


# Axes of data after the batch, and how they lie in memory: the first is that of the entries.
LAYOUTS = {
    "channels first": ((5, 3, 7), (0, 1, 2)),
    "channels last": ((40, 3, 7), (1, 2, 0)),
    "nothing to sum": ((70,), (0,)),
    "many positions": ((2, 300), (0, 1)),
}


@each_order
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sum_examples_equals_definition(layout, dtype, order):
    sides, memory = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    stored = [rng.normal(size=(3, *(sides[axis] for axis in memory))) for _ in range(2)]
    places = [1 + memory.index(axis) for axis in range(len(sides))]
    x, ds = (a.astype(dtype).transpose(0, *places) for a in stored)
    sums = np.full((3, 2 * sides[0]), np.nan, np.float32)
    sum_examples(ShimDevice(order), x, ds, sums)
    a, g = (array.astype(np.float64).reshape(3, sides[0], -1) for array in (x, ds))
    wanted = np.concatenate([(a * g).sum(axis=2), g.sum(axis=2)], axis=1)
    np.testing.assert_allclose(sums, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_broadcast_operands_are_not_copied():
    rng = np.random.default_rng(0)
    x, ds = rng.normal(size=(3, 1, 4)), rng.normal(size=(3, 6, 4))
    x, ds = np.broadcast_to(x.astype(np.float32), ds.shape), ds.astype(np.float32)
    sums = np.empty((3, 12), np.float32)
    sum_examples(ShimDevice(), x, ds, sums)
    wanted = np.concatenate([(x * ds).sum(axis=2), ds.sum(axis=2)], axis=1)
    np.testing.assert_allclose(sums, wanted, atol=1e-5)


@each_order
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 1), (9, 100, 1), (3, 31, 2), (2, 7, 300)], ids=str)
def test_draw_classes_inverts_cumulative_weights(shape, dtype, order):
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=shape)).astype(dtype)
    uniforms = rng.random((shape[0], shape[2]))
    uniforms[0, 0], uniforms[1, 0] = 0.0, 1 - 2**-53
    ids = np.full(uniforms.shape, -1, np.int64)
    draw_classes(ShimDevice(order), logits, uniforms, ids)
    weights = np.exp(logits.astype(np.float64) - logits.astype(np.float64).max(1, keepdims=True))
    cumulative = weights.cumsum(axis=1)
    wanted = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(axis=1)
    np.testing.assert_array_equal(ids, wanted)


@each_order
@pytest.mark.parametrize("shape", [(3, 5, 1), (2, 70, 1), (2, 10, 300)], ids=str)
@pytest.mark.parametrize("scale", [1, 30])
def test_cross_entropy_equals_definition(shape, scale, order):
    """Also of the class that is nearly certain, whose gradient is the sum of all others."""
    rng = np.random.default_rng(0)
    logits = (scale * rng.normal(size=shape)).astype(np.float32)
    logits[0, 2, 0] = logits[0, 4, 0] = logits.max()  # the first largest one counts
    logits[1] -= 100  # of negative logits, too
    ids = rng.integers(0, shape[1], (shape[0], shape[2]))
    ids[0, 0], ids[1, 0] = 2, logits[1, :, 0].argmax()
    terms, gradient = np.full(ids.shape, np.nan, np.float32), np.full_like(logits, np.nan)
    cross_entropy(ShimDevice(order), logits, ids, terms, gradient)
    z = logits.astype(np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    at = np.expand_dims(ids, 1)
    hit = np.arange(shape[1])[None, :, None] == at
    wanted = np.where(hit, -np.where(hit, 0, p).sum(axis=1, keepdims=True), p)
    np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=1e-30)  # exponents to 200
    np.testing.assert_allclose(
        terms, -np.log(np.take_along_axis(p, at, 1))[:, 0], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("inner", [1, 300], ids=["a warp a row", "a thread a row"])
def test_draw_classes_never_draws_zero_probability(inner):
    logits = np.full((64, 40, inner), -1000.0, np.float32)
    logits[:, 3], logits[:, 35] = 2.0, 1.0
    uniforms = np.repeat(np.linspace(0, 1, 64, endpoint=False)[:, None], inner, axis=1)
    ids = np.zeros((64, inner), np.int64)
    draw_classes(ShimDevice(), logits, uniforms, ids)
    assert set(ids.ravel().tolist()) == {3, 35}
    assert set(ids[0].tolist()) == {3}
