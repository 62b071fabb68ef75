"""Blocks with one factor: explicit per-example gradients, and dense matrices of their averages."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.backend.truths import patches
from tests.lifecycle import as_matrix, assert_products, observe, plain_packing

EXACT = 1e-12  # float64 sums of a hundred products of size one
DOUBLE = 1e-10  # relative: the same through powers of matrices of condition number a hundred

N, D_IN, D_OUT = 6, 3, 2
DAMPING = 0.3


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) + 0.2


def flat(vector):
    """A tuple of arrays (or one) as one row-major vector."""
    parts = vector if isinstance(vector, tuple) else (vector,)
    return np.concatenate([part.ravel() for part in parts])


def as_column(parts):
    return flat(tuple(parts))


def example_gradients(a, ds, bias):
    """One packed gradient an example: the sum over positions of outer products, written out."""
    gradients = []
    for x, g in zip(a, ds, strict=True):
        total = np.zeros((a.shape[2] + bias, ds.shape[2]))
        for position in range(a.shape[1]):
            row = np.append(x[position], 1.0) if bias else x[position]
            total += np.outer(row, g[position])
        gradients.append(total)
    return gradients


def mean_square(gradients):
    return sum(g**2 for g in gradients) / len(gradients)


# -- diagonals of layers ---------------------------------------------------------------------------

PARAMS = {True: ("w", "b"), False: "w"}
either_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def dense_layer(bias, config=None, **options):
    collection = ke.LayerCollection(config=config)
    collection.register_fully_connected(PARAMS[bias], "x", "s", approx="diagonal", **options)
    return collection


@either_bias
@pytest.mark.parametrize("positions", [None, 4], ids=["dense", "tokens"])
def test_a_dense_diagonal_multiplies_by_mean_squared_example_gradients(bias, positions):
    between = () if positions is None else (positions,)
    values = {"x": draw(N, *between, D_IN), "ds": draw(N, *between, D_OUT, seed=1)}
    block = observe(dense_layer(bias), [["ds"]], [values], damping=DAMPING, cholesky=True)
    a, ds = values["x"].reshape(N, -1, D_IN), values["ds"].reshape(N, -1, D_OUT)
    diagonal = mean_square(example_gradients(a, ds, bias)).ravel()
    np.testing.assert_allclose(block.full_fisher_block(), np.diag(diagonal), atol=EXACT)
    shapes = [(D_IN, D_OUT), (D_OUT,)][: 1 + bias]
    D = np.diag(diagonal + DAMPING)
    assert_products(block, D, shapes, plain_packing, DOUBLE, exps=(-1, -0.5))
    assert block.damping == DAMPING
    assert block.factor.cov.shape == (D_IN + bias, D_OUT)


@either_bias
@pytest.mark.parametrize("first", [False, True], ids=["NHWC", "NCHW"])
def test_a_convolution_diagonal_sums_over_locations_before_it_squares(bias, first):
    x, ds = draw(N, 2, 5, 4), draw(N, 3, 3, 2, seed=1)
    a = patches(x, (3, 2), (2, 2), (1, 1), (1, 0), (1, 0))
    diagonal = mean_square(example_gradients(a, ds.reshape(N, 3, 6).swapaxes(1, 2), bias))
    collection = ke.LayerCollection(graph={"w": (3, 2, 2, 3)})
    options = {"strides": [1, 2, 2, 1], "data_format": "NHWC"}
    values = {"x": np.moveaxis(x, 1, -1), "ds": np.moveaxis(ds, 1, -1)}
    if first:
        options, values = {"strides": [1, 1, 2, 2], "data_format": "NCHW"}, {"x": x, "ds": ds}
    collection.register_conv2d(
        PARAMS[bias], padding="same", inputs="x", outputs="s", approx="diagonal", **options
    )
    block = observe(collection, [["ds"]], [values], damping=DAMPING)
    np.testing.assert_allclose(block.full_fisher_block(), np.diag(diagonal.ravel()), atol=EXACT)
    shapes = [(3, 2, 2, 3), (3,)][: 1 + bias]
    inverse = as_matrix(block.multiply_inverse, shapes, plain_packing)
    np.testing.assert_allclose(inverse, np.diag(1 / (diagonal.ravel() + DAMPING)), rtol=DOUBLE)
    assert block.damping == DAMPING


def test_sources_are_summed_and_towers_averaged():
    values = {f"x{t}": draw(N, D_IN, seed=t) for t in range(2)}
    values |= {f"d{s}{t}": draw(N, D_OUT, seed=5 + 2 * s + t) for s in range(2) for t in range(2)}
    collection = ke.LayerCollection()
    for tower in range(2):
        collection.register_fully_connected(("w", "b"), f"x{tower}", f"s{tower}", approx="diagonal")
    block = observe(collection, [["d00", "d01"], ["d10", "d11"]], [values])
    expected = sum(
        mean_square(example_gradients(values[f"x{t}"][:, None], values[f"d{s}{t}"][:, None], True))
        / 2
        for s in range(2)
        for t in range(2)
    )
    np.testing.assert_allclose(block.factor.cov, expected, atol=EXACT)
    assert block.tensors_to_compute_grads() == ("s0", "s1")
    assert block.num_registered_towers == 2


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_diagonal_adds_the_multiple_of_the_identity_that_a_kronecker_block_adds(power):
    # A Kronecker block of c positions adds c·λ/c**p where its factors are multiples of I.
    config = ke.CollectionConfig(normalize_damping_power=power)
    values = {"x": draw(N, 4, D_IN), "ds": draw(N, 4, D_OUT, seed=1)}
    block = observe(dense_layer(False, config), [["ds"]], [values], damping=DAMPING)
    assert block.damping == pytest.approx(DAMPING * 4 ** (1 - power))
    found = block.multiply(np.ones((D_IN, D_OUT)))
    np.testing.assert_allclose(found, block.factor.cov + block.damping, rtol=DOUBLE)


@pytest.mark.parametrize("weight_format", ["IO", "OI"])
def test_the_diagonal_follows_the_layout_of_the_weight(weight_format):
    values, v = {"x": draw(N, D_IN), "ds": draw(N, D_OUT, seed=1)}, draw(D_IN, D_OUT, seed=2)
    collection = dense_layer(False, weight_format=weight_format)
    block = observe(collection, [["ds"]], [values], damping=DAMPING)
    square = mean_square(example_gradients(values["x"][:, None], values["ds"][:, None], False))
    given = v if weight_format == "IO" else np.ascontiguousarray(v.T)
    found = block.multiply_inverse(given)
    found = found if weight_format == "IO" else found.T
    np.testing.assert_allclose(found, v / (square + DAMPING), rtol=DOUBLE)


# -- blocks without a layer ------------------------------------------------------------------------


def generic(params, approx, batch=(N,)):
    collection = ke.LayerCollection()
    for size in batch:
        collection.register_generic(params, size, approx=approx)
    return collection


@pytest.mark.parametrize(
    ("params", "shapes"),
    [("w", [(2, 3)]), (("w", "b"), [(2, 3), (3,)]), (("w", "b", "c"), [(2,), (2, 1), (1,)])],
    ids=["one", "two", "three"],
)
def test_the_naive_full_block_is_the_outer_product_of_the_batch_gradient(params, shapes):
    names = ["g0", "g1", "g2"][: len(shapes)]
    gradients = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    values = dict(zip(names, gradients, strict=True))
    source = names[0] if isinstance(params, str) else tuple(names)
    block = observe(
        generic(params, "full"), [source], [values], damping=DAMPING, exps=(-1, -0.5), cholesky=True
    )
    g = flat(tuple(gradients))
    F = np.outer(g, g) / N
    np.testing.assert_allclose(block.full_fisher_block(), F, atol=EXACT)
    damped = F + DAMPING * np.eye(len(g))
    assert_products(block, damped, shapes, as_column, DOUBLE, exps=(-1, -0.5))
    root = as_matrix(block.multiply_cholesky, shapes, as_column)
    np.testing.assert_allclose(root, np.linalg.cholesky(damped), atol=DOUBLE)
    assert block.damping == DAMPING
    assert block.tensors_to_compute_grads() == ((params,) if len(names) == 1 else params)


def test_the_naive_diagonal_block_is_the_squared_batch_gradient():
    g = draw(2, 3)
    block = observe(generic("w", "diagonal"), ["g"], [{"g": g}], damping=DAMPING, cholesky=True)
    diagonal = g**2 / N
    np.testing.assert_allclose(block.full_fisher_block(), np.diag(diagonal.ravel()), atol=EXACT)
    assert block.factor.cov.shape == (2, 3)
    v = draw(2, 3, seed=1)
    for exp in (1, -1, -0.5):
        found = block.multiply_matpower(v, exp)
        np.testing.assert_allclose(found, (diagonal + DAMPING) ** exp * v, rtol=DOUBLE)
    for transpose in (False, True):
        root = block.multiply_cholesky(v, transpose=transpose)
        np.testing.assert_allclose(root, np.sqrt(diagonal + DAMPING) * v, rtol=DOUBLE)
        root = block.multiply_cholesky_inverse(v, transpose=transpose)
        np.testing.assert_allclose(root, v / np.sqrt(diagonal + DAMPING), rtol=DOUBLE)


@pytest.mark.parametrize("approx", ["full", "diagonal"])
def test_sources_are_summed_over_the_examples_of_all_towers(approx):
    values = {"g": draw(4), "h": draw(4, seed=1), "x": np.zeros((3, 2))}
    block = observe(generic("w", approx, batch=(5, "x")), ["g", "h"], [values])
    outer = (np.outer(values["g"], values["g"]) + np.outer(values["h"], values["h"])) / 8
    expected = outer if approx == "full" else np.diag(np.diag(outer))
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=EXACT)
    assert block.num_registered_towers == 2


# -- refusals --------------------------------------------------------------------------------------


def test_the_naive_diagonal_takes_one_parameter():
    with pytest.raises(ValueError, match="takes one parameter"):
        generic(("w", "b"), "diagonal")


@pytest.mark.parametrize("grads_list", [[], ["g"], [("g", "h", "i")]], ids=str)
def test_a_generic_block_needs_one_gradient_a_parameter(grads_list):
    (block,) = generic(("w", "b"), "full").get_blocks()
    with pytest.raises(ValueError, match="one gradient a parameter"):
        block.instantiate_factors(grads_list, DAMPING)


def test_a_layer_diagonal_takes_one_use():
    with pytest.raises(ValueError, match="one use"):
        ke.LayerCollection().register_fully_connected(
            ("w", "b"), ["x0", "x1"], ["s0", "s1"], approx="diagonal"
        )


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        (np.ones((D_IN, D_OUT)), ke.InputError),
        ((np.ones((D_OUT, D_IN)), np.ones(D_IN)), ke.ShapeError),
        ((np.ones((D_IN + 1, D_OUT)), np.ones(D_OUT)), ke.ShapeError),
    ],
    ids=["no bias", "transposed", "another layer"],
)
def test_vectors_of_another_layer_are_refused(vector, error):
    values = {"x": draw(N, D_IN), "ds": draw(N, D_OUT, seed=1)}
    block = observe(dense_layer(True), [["ds"]], [values])
    with pytest.raises(error):
        block.multiply(vector)


@pytest.mark.parametrize(
    ("graph", "vector", "error"),
    [
        ({}, (np.ones((2, 3)), np.ones(4)), ke.ShapeError),
        ({}, np.ones(9), ke.InputError),
        ({"w": (2, 3)}, (np.ones((3, 2)), np.ones(3)), ke.ShapeError),
    ],
    ids=["size", "one array", "transposed"],
)
def test_vectors_of_other_parameters_are_refused(graph, vector, error):
    collection = ke.LayerCollection(graph=graph)
    collection.register_generic(("w", "b"), N, approx="full")
    values = {"g0": draw(2, 3), "g1": draw(3)}
    block = observe(collection, [("g0", "g1")], [values])
    with pytest.raises(error):
        block.multiply(vector)


def test_a_block_without_factors_says_what_is_missing():
    collection = ke.LayerCollection()
    block = ke.NaiveFullFB(collection, "w")
    collection.register_block("w", block)
    with pytest.raises(ke.NotReadyError, match="register tensors"):
        block.instantiate_factors(["g"], DAMPING)
    with pytest.raises(ke.NotReadyError, match="instantiate_factors"):
        block.multiply(np.ones(3))
    with pytest.raises(ke.NotReadyError, match="instantiate_factors"):
        _ = block.damping
    block.register_additional_tower(N)
    block.instantiate_factors(["g"], DAMPING)
    with pytest.raises(ke.NotReadyError, match="no statistics"):
        block.multiply(np.ones(3))
