"""Kronecker blocks of dense layers against dense matrices."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.curvature.blocks.dense_layer import (
    D_IN,
    D_OUT,
    DAMPING,
    DOUBLE,
    SHAPES,
    batch,
    block_power,
    damped,
    dampings,
    either_bias,
    registered,
    sides,
)
from tests.lifecycle import as_matrix, assert_products, observe, plain_packing

# -- products --------------------------------------------------------------------------------------


@either_bias
@pytest.mark.parametrize("between", [(), (3,), (2, 2)], ids=["dense", "tokens", "images"])
def test_powers_are_those_of_the_dense_damped_product(bias, between):
    values = batch(between=between)
    block = observe(registered(bias), [["ds"]], [values], damping=DAMPING, exps=(-1, -0.5, 0.3))
    A, G = sides(values, bias)
    c = int(np.prod(between, dtype=int))
    np.testing.assert_allclose(block.full_fisher_block(), c * np.kron(A, G), rtol=DOUBLE)
    for exp in (1, -1, -0.5, 0.3):
        found = as_matrix(
            lambda v, p=exp: block.multiply_matpower(v, p), SHAPES[bias], plain_packing
        )
        expected = block_power(A, G, exp, c=c)
        np.testing.assert_allclose(found, expected, atol=DOUBLE * abs(expected).max())
    assert block.repeats == c
    assert block.damping == pytest.approx(DAMPING / c)


@pytest.mark.parametrize("debias", [True, False], ids=["debiased", "classical"])
def test_batches_of_different_lengths_count_by_their_rows(debias):
    config, decay, lengths = ke.CollectionConfig(debias=debias), 0.8, (2, 5, 5, 1)
    batches = [batch(seed, between=(t,)) for seed, t in enumerate(lengths)]
    block = observe(registered(config=config), [["ds"]], batches, decay=decay)
    weights = decay ** np.arange(len(lengths) - 1, -1, -1.0)
    count = weights @ lengths / weights.sum()
    total = weights.sum() if debias else 1 / (1 - decay)
    A, G = (
        sum(w * t * M for w, t, M in zip(weights, lengths, moments, strict=True)) / total
        for moments in zip(*(sides(values, True) for values in batches), strict=True)
    )
    assert block.repeats == pytest.approx(count, rel=DOUBLE)
    np.testing.assert_allclose(block.full_fisher_block(), np.kron(A, G) / count, rtol=DOUBLE)


@either_bias
def test_roots_are_the_product_of_the_sides_roots_and_their_transposes(bias):
    values = batch(between=(2,))
    block = observe(registered(bias), [["ds"]], [values], damping=DAMPING, cholesky=True)
    A, G = sides(values, bias)
    a, g = dampings(A, G, DAMPING / 2)
    L = np.sqrt(2) * np.kron(np.linalg.cholesky(damped(A, a)), np.linalg.cholesky(damped(G, g)))
    for multiply, matrix in [
        (block.multiply_cholesky, L),
        (block.multiply_cholesky_inverse, np.linalg.inv(L)),
    ]:
        for transpose in (False, True):
            found = as_matrix(
                lambda v, f=multiply, t=transpose: f(v, transpose=t), SHAPES[bias], plain_packing
            )
            expected = matrix.T if transpose else matrix
            np.testing.assert_allclose(found, expected, atol=DOUBLE * abs(expected).max())


@pytest.mark.parametrize(
    ("approx", "diagonal"),
    [
        ("kron_in_diag", (True, False)),
        ("kron_out_diag", (False, True)),
        ("kron_both_diag", (True, True)),
    ],
)
@either_bias
def test_a_diagonal_side_is_a_dense_side_without_what_lies_off_its_diagonal(approx, diagonal, bias):
    values = batch()
    block = observe(
        registered(bias, approx=approx),
        [["ds"]],
        [values],
        damping=DAMPING,
        exps=(-1, -0.5),
        cholesky=True,
    )
    A, G = (
        np.diag(np.diag(M)) if flat else M
        for M, flat in zip(sides(values, bias), diagonal, strict=True)
    )
    np.testing.assert_allclose(block.full_fisher_block(), np.kron(A, G), atol=DOUBLE)
    B = block_power(A, G, 1)
    assert_products(block, B, SHAPES[bias], plain_packing, DOUBLE, exps=(-1, -0.5))


@pytest.mark.parametrize("weight_format", ["IO", "OI"])
def test_the_layout_of_the_weight_changes_nothing_but_the_layout(weight_format):
    values, v = batch(), np.random.default_rng(1).normal(size=(D_IN, D_OUT))
    collection = registered(False, weight_format=weight_format)
    block = observe(collection, [["ds"]], [values], damping=DAMPING, exps=(-1,))
    inverse = block_power(*sides(values, False), -1)
    expected = (inverse @ v.ravel()).reshape(D_IN, D_OUT)
    if weight_format == "OI":
        found = block.multiply_inverse(np.ascontiguousarray(v.T)).T
    else:
        found = block.multiply_inverse(v)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


def test_data_may_have_its_features_before_its_positions():
    values = batch(between=(3,))
    turned = {name: array.swapaxes(1, 2) for name, array in values.items()}
    block = observe(registered(feature_axis=-2), [["ds"]], [turned])
    A, G = sides(values, True)
    np.testing.assert_allclose(block.full_fisher_block(), 3 * np.kron(A, G), rtol=DOUBLE)


# -- damping ---------------------------------------------------------------------------------------


def test_without_pi_both_sides_get_the_root_of_the_damping():
    values = batch()
    config = ke.CollectionConfig(pi_type="off")
    block = observe(registered(config=config), [["ds"]], [values], damping=DAMPING, exps=(-1,))
    A, G = sides(values, True)
    root = np.sqrt(DAMPING)
    expected = np.linalg.inv(np.kron(damped(A, root), damped(G, root)))
    found = as_matrix(block.multiply_inverse, SHAPES[True], plain_packing)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_damping_is_divided_by_a_power_of_the_positions(power):
    values = batch(between=(4,))
    config = ke.CollectionConfig(normalize_damping_power=power)
    block = observe(registered(config=config), [["ds"]], [values], damping=DAMPING)
    assert block.damping == pytest.approx(DAMPING / 4**power)
    A, G = sides(values, True)
    a, g = dampings(A, G, DAMPING / 4**power)
    expected = 4 * np.kron(damped(A, a), damped(G, g))
    found = as_matrix(block.multiply, SHAPES[True], plain_packing)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)
    # The multiple of the identity that the two dampings add to the block.
    assert 4 * a * g == pytest.approx(DAMPING * 4 ** (1 - power))


@pytest.mark.parametrize("zero", ["x", "ds"])
def test_a_side_without_any_signal_leaves_the_damping_even(zero):
    values = batch()
    values[zero] = np.zeros_like(values[zero])
    block = observe(registered(False), [["ds"]], [values], damping=DAMPING, exps=(-1,))
    A, G = sides(values, False)
    root = np.sqrt(DAMPING)
    expected = np.linalg.inv(np.kron(damped(A, root), damped(G, root)))
    found = as_matrix(block.multiply_inverse, SHAPES[False], plain_packing)
    np.testing.assert_allclose(found, expected, rtol=DOUBLE, atol=DOUBLE)


def test_the_split_is_by_the_moments_at_refresh_and_fresh_for_power_one():
    collection, batches = registered(), [batch(0), batch(1)]
    block = observe(collection, [["ds"]], batches[:1], damping=DAMPING, exps=(-1,), decay=1.0)
    v = np.ones((D_IN, D_OUT)), np.ones(D_OUT)
    flat = np.ones((D_IN + 1) * D_OUT)
    stale = block_power(*sides(batches[0], True), -1) @ flat
    for factor in collection.get_factors():
        factor.make_covariance_update_op(1.0)(batches[1])
    A, G = (
        (first + second) / 2
        for first, second in zip(sides(batches[0], True), sides(batches[1], True), strict=True)
    )
    inverse, fresh = (plain_packing(f(v)).ravel() for f in (block.multiply_inverse, block.multiply))
    np.testing.assert_allclose(inverse, stale, rtol=DOUBLE, atol=DOUBLE)
    np.testing.assert_allclose(fresh, block_power(A, G, 1) @ flat, rtol=DOUBLE, atol=DOUBLE)
