"""The reduced loss against its definition in NumPy, for a batch and for the shards of a batch."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.objective import REDUCTIONS, Objective

# Examples, positions, features; the batch is divided after these examples.
N, T, D, CUTS = 7, 4, 3, (2, 6)
VARIANCE, COEFFICIENT = 0.5, 1.7
DIVISORS = {"mean": N * T, "batch_mean": N, "sum": 1}
FISHER_WEIGHTS = {"mean": 1 / T, "batch_mean": 1, "sum": N}


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    return {"z": rng.standard_normal((N, T, D)), "y": rng.standard_normal((N, T, D))}


def objective(reduction):
    collection = ke.LayerCollection()
    collection.register_normal_predictive_distribution("z", targets="y", coeff=COEFFICIENT)
    return Objective(collection.registered_losses, reduction)


def shards(values):
    return [
        dict(zip(values, arrays, strict=True))
        for arrays in zip(*(np.split(array, CUTS) for array in values.values()), strict=True)
    ]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shard_losses_and_gradients_sum_to_batch(values, reduction):
    reduced, residuals = objective(reduction), values["z"] - values["y"]
    nats = residuals**2 / (2 * VARIANCE) + np.log(2 * np.pi * VARIANCE) / 2
    loss = COEFFICIENT * nats.sum() / DIVISORS[reduction]
    gradient = COEFFICIENT * residuals / VARIANCE / DIVISORS[reduction]
    losses = [reduced.value(shard, examples=N) for shard in shards(values)]
    gradients = [reduced.cotangents(shard, examples=N)["z"] for shard in shards(values)]
    assert sum(losses) == pytest.approx(loss, rel=1e-14)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-14)
    # The number matters, unless nothing is divided by it.
    alone = sum(reduced.value(shard) for shard in shards(values))
    assert (alone == pytest.approx(loss, rel=1e-9)) == (reduction == "sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fisher_scales_of_shard_equal_batch(values, reduction):
    reduced = objective(reduction)
    for shard in shards(values):
        scales = reduced.fisher_scales(shard, examples=N)
        assert scales["z"] ** 2 == pytest.approx(FISHER_WEIGHTS[reduction], rel=1e-14)
        ratio = reduced.fisher_ratio(shard, examples=N)
        assert ratio == pytest.approx(scales["z"] * DIVISORS[reduction], rel=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_default_number_of_examples_is_batch_size(values, reduction):
    reduced = objective(reduction)
    assert reduced.value(values) == reduced.value(values, examples=N)
    assert reduced.fisher_scales(values) == reduced.fisher_scales(values, examples=N)
    np.testing.assert_array_equal(
        reduced.cotangents(values)["z"], reduced.cotangents(values, examples=N)["z"]
    )
