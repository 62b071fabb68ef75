"""Updates factor by factor, plain means, what is stored, and what an estimator is made with."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.two_layers import (
    DAMPING,
    EXACT,
    WEIGHTS,
    N,
    batch,
    estimate,
    estimator_of,
    layers,
    run,
    weights,
)

SAMPLING = ["gradients", "curvature_prop"]


def averages(estimator):
    return [factor.cov for factor in estimator.factors]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# -- one factor at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*SAMPLING, "exact"])
def test_all_thunks_on_a_trace_do_what_one_update_does(mode):
    whole, parts = (estimate(mode=mode, seed=3) for _ in range(2))
    for seed in range(3):
        trace = run(batch(seed))
        whole.update_covariances(trace)
        for thunk in parts.cov_update_thunks:
            thunk(trace)
    assert_equal(averages(parts), averages(whole))
    assert parts.rng.bit_generator.state == whole.rng.bit_generator.state


@pytest.mark.parametrize("mode", SAMPLING)
def test_a_pass_goes_on_after_another_batch_came_between(mode):
    estimator, undisturbed = (estimate(mode=mode, seed=3, decay=0.0) for _ in range(2))
    first, second = run(batch(0)), run(batch(1))
    for each in (estimator, undisturbed):
        each.cov_update_thunks[1](first)
    estimator.update_covariances(second)
    after = estimator.rng.bit_generator.state
    for each in (estimator, undisturbed):
        each.cov_update_thunks[3](first)
    np.testing.assert_array_equal(estimator.factors[3].cov, undisturbed.factors[3].cov)
    assert estimator.rng.bit_generator.state == after


def test_a_thunk_that_fails_draws_nothing():
    estimator, untouched = (estimate(mode="gradients", seed=3) for _ in range(2))
    trace = run(batch())
    good, trace.values["a"] = trace.values["a"], np.full((N, 4), np.nan)
    with pytest.raises(ke.NonFiniteError):
        estimator.cov_update_thunks[2](trace)
    trace.values["a"] = good
    for each in (estimator, untouched):
        each.update_covariances(trace)
    assert_equal(averages(estimator), averages(untouched))


def test_there_is_a_thunk_for_every_factor_in_their_order():
    estimator = estimate(approx="kron_in_diag")
    assert len(estimator.cov_update_thunks) == len(estimator.inv_update_thunks) == 4
    trace = run(batch())
    for index, thunk in enumerate(estimator.cov_update_thunks):
        thunk(trace)
        counted = [factor.average.weight for factor in estimator.factors]
        assert counted == [1.0] * (index + 1) + [0.0] * (3 - index)
    for thunk in estimator.inv_update_thunks:
        thunk()
    assert [len(stored) for stored in estimator.get_inv_vars()] == [0, 1, 0, 1]


@pytest.mark.parametrize("how", ["whole", "thunks"])
def test_without_decay_batches_are_averaged_alike(how):
    estimator = estimate("normal", decay=0.5)
    for seed in range(4):
        trace = run(batch(seed))
        if how == "whole":
            estimator.update_covariances(trace, should_decay=False)
        else:
            for thunk in estimator.cov_update_thunks:
                thunk(trace, should_decay=False)
    rows = np.concatenate([np.c_[batch(seed), np.ones(N)] for seed in range(4)])
    A = sum(np.outer(row, row) for row in rows) / len(rows)
    np.testing.assert_allclose(estimator.factors[0].cov, A, rtol=EXACT, atol=EXACT)


# -- what is stored --------------------------------------------------------------------------------


def test_the_averages_and_inverses_of_all_factors_can_be_read():
    estimator = estimate(exps=(-1, -0.5))
    with pytest.raises(ke.NotReadyError):
        estimator.get_cov_vars()
    assert estimator.get_inv_vars() == ([], [], [], [])
    estimator.update_covariances(run(batch()))
    estimator.update_inverses()
    for (average,), (inverse, root), factor in zip(
        estimator.get_cov_vars(), estimator.get_inv_vars(), estimator.factors, strict=True
    ):
        np.testing.assert_array_equal(average, factor.cov)
        np.testing.assert_allclose(root @ root, inverse, rtol=1e-9, atol=1e-9)
        inverse[:] = 0
    assert estimator.get_inv_vars()[0][0].any()


# -- sizes -----------------------------------------------------------------------------------------


def test_factors_must_see_batches_of_one_size():
    collection = layers()
    collection.register_generic("w3", batch_size=N + 1)
    collection.register_normal_predictive_distribution("z")
    estimator = ke.FisherEstimator((*WEIGHTS, "w3"), 0.9, DAMPING, collection)
    trace = run(batch())
    trace.values["w3"] = np.zeros(2)
    with pytest.raises(ke.InputError, match=f"Batch size {N + 1} .* did not match value {N}, that"):
        estimator.update_covariances(trace)
    assert all(factor.average.value is None for factor in estimator.factors)


def test_towers_must_be_of_one_size():
    collection = layers(towers="01")
    for tower in "01":
        collection.register_normal_predictive_distribution(f"z{tower}", name="loss")
    estimator = estimator_of(collection)
    trace = run(batch(n=6), towers=2)
    for name in ("x1", "s1", "a1", "z1"):
        trace.values[name] = trace.values[name][:2]
    with pytest.raises(ke.InputError, match="examples"):
        estimator.update_covariances(trace)


def test_the_batch_size_is_counted_over_all_towers():
    collection = layers(towers="01")
    for tower in "01":
        collection.register_normal_predictive_distribution(f"z{tower}", name="loss")
    estimator = estimator_of(collection, batch_size=6)
    estimator.update_covariances(run(batch(n=6), towers=2))
    with pytest.raises(ke.InputError, match=r"Batch size 8 .* did not match value 6"):
        estimator.update_covariances(run(batch(n=8), towers=2))


# -- construction ----------------------------------------------------------------------------------


def test_powers_and_roots_are_those_that_were_asked_for():
    """Also where nothing is stored, and any power could be computed."""
    estimator = estimate(approx="diagonal", exps=(-0.5,))
    estimator.update_covariances(run(batch()))
    vector = [(array, name) for name, array in weights().items()]
    estimator.multiply_matpower(-0.5, vector)
    estimator.multiply(vector)
    for product in (
        estimator.multiply_inverse,
        estimator.multiply_cholesky,
        estimator.multiply_cholesky_inverse,
    ):
        with pytest.raises(ke.UnknownNameError, match="not registered"):
            product(vector)


def test_the_default_collection_serves_where_none_is_given():
    collection = layers()
    collection.register_normal_predictive_distribution("z")
    with collection.as_default():
        estimator = ke.FisherEstimator(tuple(WEIGHTS), 0.9, DAMPING, None)
    assert estimator.blocks == collection.get_blocks()
    with pytest.raises(ke.RegistrationError, match="no default LayerCollection"):
        ke.FisherEstimator(tuple(WEIGHTS), 0.9, DAMPING, None)


@pytest.mark.parametrize("colocate", [True, False])
def test_the_place_of_the_backward_pass_does_not_change_the_numbers(colocate):
    model = ke.load_model(models.mlp(dtype="float64"))
    inputs = models.random_inputs(models.mlp(dtype="float64"))

    def observed(**options):
        collection = ke.LayerCollection(model)
        collection.register_fully_connected(
            ("fc2.weight", "fc2.bias"), "act1", "output", weight_format="OI"
        )
        for name in ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"):
            collection.register_generic(name, batch_size="output")
        collection.register_softmax_cross_entropy_loss("output")
        estimator = ke.FisherEstimator(
            tuple(model.parameters), 0.9, DAMPING, collection, estimation_mode="exact", **options
        )
        estimator.update_covariances(model.run(inputs))
        return averages(estimator)

    assert_equal(observed(colocate_gradients_with_ops=colocate), observed())


def test_an_estimator_tells_what_it_was_made_with():
    estimator = estimate(name="mine")
    assert estimator.name == "mine"
    assert estimator.variables == tuple(WEIGHTS)
    assert estimator.damping == DAMPING
    assert len(estimator.blocks) == 2
    assert len(estimator.factors) == 4
