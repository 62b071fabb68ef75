"""Layers used several times, independently: every way to hand over uses gives the same block."""

from itertools import product

import numpy as np
import pytest

import kfac_engine as ke
from tests.backend.truths import patches
from tests.lifecycle import (
    as_matrix,
    assert_products,
    damped_block,
    observe,
    plain_packing,
    second_moment,
)

EXACT = 1e-12  # float64 sums of a few dozen terms of size one
SINGLE = 1e-5  # the same in float32
USES, BATCH, D_IN, D_OUT = 3, 4, 3, 2
DAMPING = 0.2
FORMS = ("list", "folded", "stacked")
PARAMS = {True: ("w", "b"), False: "w"}
SHAPES = {True: [(D_IN, D_OUT), (D_OUT,)], False: [(D_IN, D_OUT)]}


def draw(*sides, seed, dtype=np.float64, uses=USES, batch=BATCH):
    return np.random.default_rng(seed).normal(size=(uses, batch, *sides)).astype(dtype) + dtype(0.2)


def named(prefix, array, form):
    """Names and values of ``array``, ``(u, n, …)``, handed over in one of the forms."""
    if form == "list":
        names = [f"{prefix}{u}" for u in range(len(array))]
        return names, dict(zip(names, array, strict=True))
    if form == "folded":
        array = array.reshape(-1, *array.shape[2:])
    return prefix, {prefix: array}


def rows(array):
    return array.reshape(-1, array.shape[-1])


def handed_over(input_form, gradient_form, a, ds, *, towers=1, **options):
    """A collection, its list of gradients and the values, the batch cut into towers."""
    collection = ke.LayerCollection()
    values, source = {}, []
    for tower, (x, d) in enumerate(
        zip(np.split(a, towers, axis=1), np.split(ds, towers, axis=1), strict=True)
    ):
        inputs, x_values = named(f"x{tower}_", x, input_form)
        gradients, d_values = named(f"d{tower}_", d, gradient_form)
        outputs, _ = named(f"s{tower}_", d, gradient_form)
        collection.register_fully_connected_multi(
            PARAMS[options.pop("bias", True)] if tower == 0 else params_of(collection),
            inputs,
            outputs,
            num_uses=len(a),
            **options,
        )
        source.append(gradients)
        values |= x_values | d_values
    return collection, [source], values


def params_of(collection):
    (key,) = collection.fisher_blocks
    return key


@pytest.mark.parametrize(("input_form", "gradient_form"), list(product(FORMS, FORMS)))
@pytest.mark.parametrize("towers", [1, 2])
def test_every_form_of_uses_gives_uses_times_the_product_over_all_rows(
    input_form, gradient_form, towers
):
    a, ds = draw(D_IN, seed=0), draw(D_OUT, seed=1)
    collection, grads, values = handed_over(input_form, gradient_form, a, ds, towers=towers)
    block = observe(collection, grads, [values])
    A, G = second_moment(rows(a), has_bias=True), second_moment(rows(ds))
    np.testing.assert_allclose(block.full_fisher_block(), USES * np.kron(A, G), atol=EXACT)
    assert block.num_registered_towers == towers
    assert block.repeats == USES


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("approx", "diagonal"),
    [
        ("kron_indep", (False, False)),
        ("kron_indep_in_diag", (True, False)),
        ("kron_indep_out_diag", (False, True)),
        ("kron_indep_both_diag", (True, True)),
    ],
)
def test_damped_products_are_those_of_the_dense_matrix(approx, diagonal, bias):
    a, ds = draw(D_IN, seed=2), draw(D_OUT, seed=3)
    collection, grads, values = handed_over("stacked", "list", a, ds, approx=approx, bias=bias)
    block = observe(collection, grads, [values], damping=DAMPING, exps=(-1, -0.5), cholesky=True)
    moments = second_moment(rows(a), bias), second_moment(rows(ds))
    A, G = (np.diag(np.diag(M)) if line else M for M, line in zip(moments, diagonal, strict=True))
    B = damped_block(A, G, DAMPING, USES)
    assert_products(block, B, SHAPES[bias], plain_packing, 1e-10, exps=(-1, -0.5))
    assert block.damping == pytest.approx(DAMPING / USES)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)], ids=["double", "single"]
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_named_block_counts_its_listed_uses(dtype, tolerance, bias):
    a, ds = draw(D_IN, seed=4, dtype=dtype), draw(D_OUT, seed=5, dtype=dtype)
    collection = ke.LayerCollection()
    block = ke.FullyConnectedMultiIndepFB(collection, has_bias=bias)
    inputs, x_values = named("x", a, "list")
    block.register_additional_tower(inputs, "s")
    collection.register_block(PARAMS[bias], block)
    gradients, d_values = named("d", ds, "folded")
    observe(collection, [[gradients]], [x_values | d_values])
    A, G = second_moment(rows(a), bias), second_moment(rows(ds))
    assert block.input_factor.cov.dtype == dtype
    np.testing.assert_allclose(block.full_fisher_block(), USES * np.kron(A, G), atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [False, True], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("named_class", [False, True], ids=["registered", "named"])
def test_a_convolution_counts_uses_times_locations(form, first, named_class):
    """3 × 4 images of two channels, a 2 × 2 filter, no padding: 2 × 3 locations."""
    x, ds = draw(3, 4, 2, seed=6), draw(2, 3, D_OUT, seed=7)
    begins = ends = (0, 0)
    planes = np.moveaxis(x, -1, 2).reshape(-1, 2, 3, 4)
    A = second_moment(
        patches(planes, (2, 2), (1, 1), (1, 1), begins, ends).reshape(-1, 8), has_bias=True
    )
    G = second_moment(rows(ds))
    options = {"data_format": "NCHW"} if first else {}
    if first:
        x, ds = np.moveaxis(x, -1, 2), np.moveaxis(ds, -1, 2)
    inputs, x_values = named("x", x, form)
    gradients, d_values = named("d", ds, form)
    outputs, _ = named("s", ds, form)
    collection = ke.LayerCollection(graph={"w": (2, 2, 2, D_OUT)})
    if named_class:
        block = ke.ConvKFCBasicMultiIndepFB(
            collection, ("w", "b"), "VALID", num_uses=USES, **options
        )
        block.register_additional_tower(inputs, outputs)
        collection.register_block(("w", "b"), block)
    else:
        collection.register_conv2d_multi(
            ("w", "b"), [1, 1, 1, 1], "VALID", inputs, outputs, num_uses=USES, **options
        )
    block = observe(collection, [[gradients]], [x_values | d_values], damping=DAMPING, exps=(-1,))
    np.testing.assert_allclose(block.full_fisher_block(), 6 * USES * np.kron(A, G), atol=EXACT)
    inverse = as_matrix(block.multiply_inverse, [(2, 2, 2, D_OUT), (D_OUT,)], plain_packing)
    np.testing.assert_allclose(
        inverse, np.linalg.inv(damped_block(A, G, DAMPING, 6 * USES)), atol=1e-9
    )


def test_listed_uses_with_positions_count_both():
    rng = np.random.default_rng(10)
    a, ds = rng.normal(size=(2, 4, 5, D_IN)), rng.normal(size=(2, 4, 5, D_OUT))
    collection = ke.LayerCollection()
    collection.register_fully_connected_multi("w", ["x0", "x1"], ["s0", "s1"])
    values = {f"x{u}": a[u] for u in range(2)} | {f"d{u}": ds[u] for u in range(2)}
    block = observe(collection, [[["d0", "d1"]]], [values])
    A, G = second_moment(rows(a)), second_moment(rows(ds))
    np.testing.assert_allclose(block.full_fisher_block(), 10 * np.kron(A, G), atol=EXACT)


@pytest.mark.parametrize(
    ("inputs", "outputs", "num_uses", "message"),
    [
        ("x", "s", None, "You must supply a value for the num_uses"),
        (["x0", "x1"], ["s0", "s1"], 3, "counted differently"),
        (["x0", "x1"], ["s0"], None, "counted differently"),
        ("x", "s", 0, "at least once"),
        ([], "s", None, "at least once"),
    ],
    ids=["unknown", "not the number", "different lists", "none", "empty list"],
)
def test_uses_that_cannot_be_counted_are_refused(inputs, outputs, num_uses, message):
    collection = ke.LayerCollection()
    with pytest.raises(ValueError, match=message):
        collection.register_fully_connected_multi("w", inputs, outputs, num_uses=num_uses)
    assert collection.get_blocks() == ()


def test_a_named_block_without_a_number_of_uses_says_so():
    block = ke.FullyConnectedMultiIndepFB(ke.LayerCollection())
    block.register_additional_tower("x", "s")
    with pytest.raises(ke.InputError, match="num_uses"):
        block.instantiate_factors([["d"]], DAMPING)


def test_gradients_must_list_as_many_uses():
    collection = ke.LayerCollection()
    collection.register_fully_connected_multi("w", ["x0", "x1"], ["s0", "s1"])
    with pytest.raises(ke.RegistrationError, match="counted differently"):
        observe(collection, [[["d0", "d1", "d2"]]], [])


@pytest.mark.parametrize(
    ("inputs", "outputs", "uses"), [(["x0", "x1"], ["s0", "s1"], 2), ("x", "s", 1)]
)
def test_uses_are_counted_as_the_graph_shows_them(inputs, outputs, uses):
    collection = ke.LayerCollection()
    collection.register_fully_connected_multi("w", inputs, outputs, num_uses=2)
    collection.register_fully_connected_multi("w", inputs, outputs, num_uses=2, reuse=True)
    assert collection._uses["w"] == 2 * uses  # read by check_registration against the graph
