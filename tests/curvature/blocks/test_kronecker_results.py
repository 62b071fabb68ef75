"""Form, type and ownership of what Kronecker blocks give back, and what they refuse."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.curvature.blocks.dense_layer import (
    D_IN,
    D_OUT,
    DAMPING,
    DOUBLE,
    SHAPES,
    SINGLE,
    batch,
    block_power,
    registered,
    sides,
)
from tests.lifecycle import observe

# -- the form of results ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_results_have_the_type_and_form_of_the_vector(dtype):
    block = observe(registered(), [["ds"]], [batch(dtype=dtype)], damping=DAMPING, exps=(-1,))
    rng = np.random.default_rng(1)
    pair = [rng.normal(size=shape).astype(dtype) for shape in SHAPES[True]]
    expected = block_power(*sides(batch(dtype=dtype), True), -1) @ np.concatenate(
        [part.ravel().astype(np.float64) for part in pair]
    )
    tolerance = {np.float16: 1e-2, np.float32: SINGLE, np.float64: DOUBLE}[dtype]
    for vector in (tuple(pair), pair):
        found = block.multiply_inverse(vector)
        assert isinstance(found, tuple)
        assert [(part.dtype, part.shape) for part in found] == [(dtype, s) for s in SHAPES[True]]
        flat = np.concatenate([part.ravel() for part in found])
        np.testing.assert_allclose(flat, expected, rtol=tolerance, atol=tolerance)
    kept = np.float64 if dtype is np.float64 else np.float32
    assert block.full_fisher_block().dtype == kept


def test_a_vector_of_whole_numbers_is_not_answered_in_whole_numbers():
    block = observe(registered(False), [["ds"]], [batch()], damping=DAMPING, exps=(-1,))
    whole = np.arange(D_IN * D_OUT).reshape(D_IN, D_OUT)
    found = block.multiply_inverse(whole)
    np.testing.assert_array_equal(found, block.multiply_inverse(whole.astype(np.float64)))


def test_results_are_new_arrays_that_nothing_later_changes():
    collection = registered()
    block = observe(collection, [["ds"]], [batch()], damping=DAMPING, exps=(-1,), cholesky=True)
    v = np.ones((D_IN, D_OUT)), np.ones(D_OUT)
    results = [block.full_fisher_block()]
    for multiply in (
        block.multiply,
        block.multiply_inverse,
        block.multiply_cholesky,
        block.multiply_cholesky_inverse,
    ):
        results += multiply(v)
    kept = [array.copy() for array in results]
    for factor in collection.get_factors():
        factor.make_covariance_update_op(0.5)(batch(3))
        factor.refresh()
    block.multiply_inverse(v)
    for array, before in zip(results, kept, strict=True):
        np.testing.assert_array_equal(array, before)
        assert not any(np.shares_memory(array, part) for part in v)
        assert array.flags.writeable
    np.testing.assert_array_equal(v[0], 1)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [-0.1, np.nan, np.inf])
def test_a_damping_that_is_none_is_refused(damping):
    (block,) = registered().get_blocks()
    with pytest.raises(ValueError, match=r"damping .* must not be negative"):
        block.instantiate_factors([["ds"]], damping)


@pytest.mark.parametrize("damping", [-0.1, np.nan, np.inf])
def test_a_damping_that_becomes_none_is_refused_when_it_is_read(damping):
    lam, collection = {"value": 0.1}, registered(False)
    read = lambda: lam["value"]  # noqa: E731 (a damping that changes)
    block = observe(collection, [["ds"]], [batch()], damping=read, exps=(-1,))
    before = block.multiply_inverse(np.ones((D_IN, D_OUT)))
    lam["value"] = damping
    with pytest.raises(ValueError, match="must not be negative"):
        collection.get_factors()[0].refresh()
    np.testing.assert_array_equal(block.multiply_inverse(np.ones((D_IN, D_OUT))), before)


@pytest.mark.parametrize("grads_list", [[], ["ds"], [[]], [["ds", "dt"]], [["ds"], []]], ids=str)
def test_gradients_that_do_not_match_the_towers_are_refused(grads_list):
    (block,) = registered().get_blocks()
    with pytest.raises(ValueError, match="grads_list needs"):
        block.instantiate_factors(grads_list, 0.1)


def test_a_block_without_towers_or_factors_or_statistics_says_what_is_missing():
    collection = ke.LayerCollection()
    block = ke.FullyConnectedKFACBasicFB(collection, has_bias=True)
    collection.register_block(("w", "b"), block)
    with pytest.raises(ke.NotReadyError, match="register tensors"):
        block.instantiate_factors([["ds"]], 0.1)
    block.register_additional_tower(inputs="x", outputs="s")
    for read in (
        lambda: block.damping,
        lambda: block.factors,
        block.register_inverse,
        lambda: block.multiply((np.ones((D_IN, D_OUT)), np.ones(D_OUT))),
    ):
        with pytest.raises(ke.NotReadyError, match="instantiate_factors of the block of"):
            read()
    block.instantiate_factors([["ds"]], 0.1)
    with pytest.raises(ke.NotReadyError, match=r"statistics are updated|no statistics"):
        block.multiply((np.ones((D_IN, D_OUT)), np.ones(D_OUT)))


def test_a_declared_output_gives_the_damping_before_the_first_batch():
    collection = ke.LayerCollection(graph={"s": (8, 5, D_OUT)})
    collection.register_fully_connected(("w", "b"), "x", "s")
    (block,) = collection.get_blocks()
    block.instantiate_factors([["ds"]], 0.1)
    assert block.damping == pytest.approx(0.1 / 5)


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        (np.ones((D_IN, D_OUT)), ke.InputError),
        ((np.ones((D_OUT, D_IN)), np.ones(D_IN)), ke.ShapeError),
        ((np.ones((D_IN, D_OUT)), np.ones(D_IN)), ke.ShapeError),
        ((np.ones(D_IN * D_OUT), np.ones(D_OUT)), ke.ShapeError),
    ],
    ids=["no bias", "transposed", "bias", "flat"],
)
def test_vectors_of_another_layer_are_refused(vector, error):
    block = observe(registered(), [["ds"]], [batch()])
    with pytest.raises(error):
        block.multiply(vector)
