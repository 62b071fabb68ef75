"""The estimator's statistics of a two-layer net: Fisher matrices and loops over the examples."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.distributed.shards import RowRange
from tests.two_layers import (
    EXACT,
    TARGETS,
    WEIGHTS,
    H,
    K,
    N,
    Trace,
    assert_blocks,
    batch,
    estimate,
    estimator_of,
    every_loss,
    exact_cotangents,
    exact_fisher,
    layers,
    on_diagonal,
    outer_sides,
    run,
    softmax,
)

# -- exactness -------------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("mode", ["exact", "exact_GGN"])
def test_one_example_gives_the_exact_fisher_of_each_layer(loss, mode):
    trace, estimator = run(batch(n=1)), estimate(loss, mode)
    estimator.update_covariances(trace)
    for block, expected in zip(
        estimator.blocks, on_diagonal(exact_fisher(trace, loss)), strict=True
    ):
        np.testing.assert_allclose(block.full_fisher_block(), expected, atol=EXACT)


def test_a_linear_net_with_gaussian_output_gives_the_exact_fisher_of_any_batch():
    trace, estimator = run(batch(n=7), linear=True), estimate("normal")
    estimator.update_covariances(trace)
    exact = exact_fisher(trace, "normal")
    for block, expected in zip(estimator.blocks, on_diagonal(exact), strict=True):
        np.testing.assert_allclose(block.full_fisher_block(), expected, rtol=EXACT, atol=EXACT)


@every_loss
def test_diagonal_blocks_are_the_diagonal_of_the_exact_fisher_of_any_batch(loss):
    trace, estimator = run(batch()), estimate(loss, approx="diagonal")
    estimator.update_covariances(trace)
    for block, expected in zip(
        estimator.blocks, on_diagonal(exact_fisher(trace, loss)), strict=True
    ):
        diagonal = np.diag(np.diag(expected))
        np.testing.assert_allclose(block.full_fisher_block(), diagonal, rtol=EXACT, atol=EXACT)


def test_generic_blocks_sum_the_squared_batch_gradients_of_all_sources():
    collection = ke.LayerCollection()
    collection.register_normal_predictive_distribution("z", name="loss")
    collection.register_fully_connected(("w1", "b1"), "x", "s")
    collection.register_generic("w2", "z")
    collection.register_generic(("b2",), N, approx="full")
    trace, estimator = run(batch()), estimator_of(collection)
    estimator.update_covariances(trace)
    _, w2, b2 = estimator.blocks
    # B e_k / √v for every example at once, v = ½.
    sources = [np.sqrt(2) * np.tile(np.eye(K)[k], (N, 1)) for k in range(K)]
    square = sum((trace.values["a"].T @ dz) ** 2 for dz in sources) / N
    np.testing.assert_allclose(w2.factor.cov, square, rtol=EXACT)
    outer = sum(np.outer(dz.sum(0), dz.sum(0)) for dz in sources) / N
    np.testing.assert_allclose(b2.full_fisher_block(), outer, rtol=EXACT, atol=EXACT)


# -- modes, coefficients, towers, losses -----------------------------------------------------------


def test_gradients_at_drawn_targets_are_weighted_by_the_root_of_the_coefficient():
    trace, estimator = run(batch()), estimate(mode="gradients", coeff=3.0)
    estimator.update_covariances(trace, draws={"loss": TARGETS})
    dz = np.sqrt(3) * (softmax(trace.values["z"]) - np.eye(K)[TARGETS])
    assert_blocks(estimator, outer_sides(trace, [dz]))
    assert estimator.mat_type == "Fisher"


def test_empirical_gradients_are_weighted_by_the_coefficient():
    trace, estimator = run(batch(), TARGETS), estimate(mode="empirical", coeff=3.0)
    estimator.update_covariances(trace)
    dz = 3 * (softmax(trace.values["z"]) - np.eye(K)[TARGETS])
    assert_blocks(estimator, outer_sides(trace, [dz]))
    assert estimator.mat_type == "Empirical_Fisher"


@pytest.mark.parametrize(
    ("mode", "matrix"), [("curvature_prop", "Fisher"), ("curvature_prop_GGN", "GGN")]
)
def test_curvature_propagation_sends_back_the_factor_times_signs(mode, matrix):
    trace, estimator = run(batch()), estimate(mode=mode, coeff=3.0)
    signs = np.random.default_rng(5).choice([-1.0, 1.0], (N, K))
    estimator.update_covariances(trace, draws={"loss": signs})
    root = np.sqrt(softmax(trace.values["z"]))
    dz = np.sqrt(3) * (root * signs - root**2 * (root * signs).sum(axis=1, keepdims=True))
    assert_blocks(estimator, outer_sides(trace, [dz]))
    assert estimator.mat_type == matrix


def test_scales_multiply_the_cotangents_of_their_loss_input():
    trace, estimator = run(batch()), estimate("multi_bernoulli")
    estimator.update_covariances(trace, scales={"z": 0.5})
    sources = exact_cotangents(trace.values["z"], "multi_bernoulli")
    assert_blocks(estimator, outer_sides(trace, [0.5 * dz for dz in sources]))


@pytest.mark.parametrize("mode", ["exact", "gradients"])
@pytest.mark.parametrize("approx", ["kron", "diagonal"])
def test_two_towers_are_one_tower_of_both(mode, approx):
    x, targets = batch(n=6), np.array([0, 1, 1, 0, 1, 0])
    whole = estimate(mode=mode, approx=approx)
    whole.update_covariances(run(x), draws={"loss": targets})
    halves = layers(approx, towers="01")
    for tower in "01":
        halves.register_categorical_predictive_distribution(f"z{tower}", name="loss")
    estimator = estimator_of(halves, mode)
    draws = {"loss": (targets[:3], targets[3:])}
    estimator.update_covariances(run(x, towers=2), draws=draws)
    for found, expected in zip(estimator.blocks, whole.blocks, strict=True):
        np.testing.assert_allclose(
            found.full_fisher_block(), expected.full_fisher_block(), rtol=EXACT, atol=EXACT
        )


def test_a_batch_in_towers_is_not_divided_over_ranks():
    collection = layers(towers="01")
    for tower in "01":
        collection.register_categorical_predictive_distribution(f"z{tower}", name="loss")
    estimator = estimator_of(collection)
    with pytest.raises(ke.UnsupportedError, match="in parts"):
        estimator.set_rows(RowRange(0, 2, 4))
    assert estimator.sources.rows is None


def test_losses_on_one_output_add_their_fishers():
    collection = layers()
    collection.register_multi_bernoulli_predictive_distribution("z", name="first", coeff=2.0)
    collection.register_normal_predictive_distribution("z", name="second")
    trace, estimator = run(batch()), estimator_of(collection)
    estimator.update_covariances(trace)
    z = trace.values["z"]
    sources = [np.sqrt(2) * dz for dz in exact_cotangents(z, "multi_bernoulli")]
    assert_blocks(estimator, outer_sides(trace, sources + exact_cotangents(z, "normal")))


def test_a_loss_that_does_not_reach_a_layer_adds_nothing_to_it():
    collection = layers()
    collection.register_normal_predictive_distribution("z", name="far")
    collection.register_normal_predictive_distribution("s", name="near")
    trace = run(batch())

    class Both(Trace):
        def _backward(self, tower, cotangents, total):
            super()._backward(tower, cotangents, total)
            if "s" in cotangents:
                total["s"] = total.get("s", 0) + cotangents["s"]

    estimator = estimator_of(collection)
    estimator.update_covariances(Both(trace.values))
    (A, G), second = outer_sides(trace, exact_cotangents(trace.values["z"], "normal"))
    assert_blocks(estimator, [(A, G + 2 * np.eye(H)), second])  # 1/v = 2


# -- averages over batches -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gradients", "exact"])
@pytest.mark.parametrize("decay", [0.0, 0.8, 1.0])
def test_batches_are_averaged_with_decaying_weights(mode, decay):
    estimator = estimate("multi_bernoulli", mode, decay=decay)
    var, total = None, 0.0
    targets = (batch(9, n=K * N)[:, 0] > 0).reshape(N, K).astype(float)
    for seed, n in enumerate([N, N, 3, N]):  # sizes of a batch with other shapes are its own
        trace = run(batch(seed, n))
        estimator.update_covariances(trace, draws={"loss": targets[:n]})
        z = trace.values["z"]
        drawn = [1 / (1 + np.exp(-z)) - targets[:n]]
        sources = drawn if mode == "gradients" else exact_cotangents(z, "multi_bernoulli")
        moments = [M for side in outer_sides(trace, sources) for M in side]
        var = moments if var is None else [decay * v + M for v, M in zip(var, moments, strict=True)]
        total = decay * total + 1
    for factor, expected in zip(estimator.factors, var, strict=True):
        np.testing.assert_allclose(factor.cov, expected / total, rtol=EXACT, atol=EXACT)


def test_sources_stream_through_without_changing_single_precision():
    estimator = estimate("normal")
    estimator.update_covariances(run(batch(dtype=np.float32)))
    assert {factor.cov.dtype for factor in estimator.factors} == {np.dtype(np.float32)}


# -- sums of gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "coeff"), [("empirical", 3.0), ("exact", 1.0)])
def test_params_stats_are_gradients_summed_over_sources_divided_by_the_batch(mode, coeff):
    trace = run(batch(), TARGETS)
    estimator = estimate(mode=mode, coeff=coeff, compute_params_stats=True, batch_size=N)
    estimator.update_covariances(trace)
    z = trace.values["z"]
    if mode == "empirical":
        sources = [coeff * (softmax(z) - np.eye(K)[TARGETS])]
    else:
        p = softmax(z)
        sources = [np.sqrt(p[:, [i]]) * (np.eye(K)[i] - p) for i in range(K)]
    a, x = trace.values["a"], trace.values["x"]
    ds = [dz @ trace.values["w2"].T * (1 - a**2) for dz in sources]
    expected = [
        sum(x.T @ d for d in ds),
        sum(d.sum(0) for d in ds),
        sum(a.T @ dz for dz in sources),
        sum(dz.sum(0) for dz in sources),
    ]
    for found, total in zip(estimator.params_stats, expected, strict=True):
        np.testing.assert_allclose(found, total / N, rtol=EXACT, atol=EXACT)


def test_without_params_stats_parameters_are_not_differentiated():
    trace, estimator = run(batch()), estimate()
    estimator.update_covariances(trace)
    assert estimator.params_stats == []
    assert not {name for wrt in trace.asked for name in wrt} & set(WEIGHTS)


# -- work is shared --------------------------------------------------------------------------------


class Counting(NumpyBackend):
    """Notes the shapes of what it takes second moments of."""

    def __init__(self):
        super().__init__()
        self.moments = []

    def second_moment(self, x, out, *how, **options):
        self.moments.append(x.shape[-1])
        super().second_moment(x, out, *how, **options)


@pytest.mark.parametrize(("mode", "sources"), [("gradients", 1), ("exact", K)])
def test_a_shared_input_is_measured_once_and_gradients_once_a_source(mode, sources):
    collection = ke.LayerCollection()
    collection.backend = Counting()
    collection.register_normal_predictive_distribution("z", name="loss")
    collection.register_fully_connected(("w1", "b1"), "a", "s")
    collection.register_fully_connected(("w2", "b2"), "a", "z")
    estimator = estimator_of(collection, mode)
    assert len(estimator.factors) == 3
    trace = run(batch())
    estimator.update_covariances(trace)
    # "a" once (4 features with the hidden gradients' 4), "s" and "z" once a source.
    assert sorted(collection.backend.moments) == sorted([H] + [H, K] * sources)
    assert trace.reads.count("x") == 0
    assert all(set(wrt) == {"s", "z"} for wrt in trace.asked)
    assert len(trace.asked) == sources


# -- randomness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gradients", "curvature_prop"])
def test_a_seed_repeats_itself_and_batches_and_seeds_differ(mode):
    def observed(seed, batches=1):
        estimator = estimate(mode=mode, seed=seed, decay=0.0)
        for _ in range(batches):
            estimator.update_covariances(run(batch(n=20)))
        return estimator.blocks[1].full_fisher_block()

    np.testing.assert_array_equal(observed(0), observed(0))
    assert not np.array_equal(observed(0), observed(1))
    assert not np.array_equal(observed(0), observed(0, batches=2))
