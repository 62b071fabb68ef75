"""The reduced loss against its definition in NumPy, for a batch and for the shards of a batch."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.objective import REDUCTIONS, Counts, Objective

# Examples, positions, features; the batch is divided after these examples.
N, T, D, CUTS = 7, 4, 3, (2, 6)
BATCH = Counts(N, (N * T,))
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


def shards(values, cuts=CUTS):
    return [
        dict(zip(values, arrays, strict=True))
        for arrays in zip(*(np.split(array, cuts) for array in values.values()), strict=True)
    ]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shard_losses_and_gradients_sum_to_batch(values, reduction):
    reduced, residuals = objective(reduction), values["z"] - values["y"]
    nats = residuals**2 / (2 * VARIANCE) + np.log(2 * np.pi * VARIANCE) / 2
    loss = COEFFICIENT * nats.sum() / DIVISORS[reduction]
    gradient = COEFFICIENT * residuals / VARIANCE / DIVISORS[reduction]
    losses = [reduced.value(shard, counts=BATCH) for shard in shards(values)]
    gradients = [reduced.cotangents(shard, counts=BATCH)["z"] for shard in shards(values)]
    assert sum(losses) == pytest.approx(loss, rel=1e-14)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-14)
    # The number matters, unless nothing is divided by it.
    alone = sum(reduced.value(shard) for shard in shards(values))
    assert (alone == pytest.approx(loss, rel=1e-9)) == (reduction == "sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fisher_scales_of_shard_equal_batch(values, reduction):
    reduced = objective(reduction)
    for shard in shards(values):
        scales = reduced.fisher_scales(shard, counts=BATCH)
        assert scales["z"] ** 2 == pytest.approx(FISHER_WEIGHTS[reduction], rel=1e-14)
        ratio = reduced.fisher_ratio(shard, counts=BATCH)
        assert ratio == pytest.approx(scales["z"] * DIVISORS[reduction], rel=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_default_counts_are_those_of_batch(values, reduction):
    reduced = objective(reduction)
    assert reduced.value(values) == reduced.value(values, counts=BATCH)
    assert reduced.fisher_scales(values) == reduced.fisher_scales(values, counts=BATCH)
    np.testing.assert_array_equal(
        reduced.cotangents(values)["z"], reduced.cotangents(values, counts=BATCH)["z"]
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_counts_of_parts_of_other_lengths_add_up(reduction):
    rng = np.random.default_rng(1)
    parts = [
        {name: rng.standard_normal((n, t, D)) for name in "zy"} for n, t in ((2, 5), (4, 3), (1, 1))
    ]
    reduced = objective(reduction)
    counts = sum((reduced.counts(part) for part in parts[1:]), reduced.counts(parts[0]))
    assert counts == Counts(7, (23,))
    residuals = np.concatenate([(part["z"] - part["y"]).reshape(-1, D) for part in parts])
    nats = residuals**2 / (2 * VARIANCE) + np.log(2 * np.pi * VARIANCE) / 2
    loss = COEFFICIENT * nats.sum() / {"mean": 23, "batch_mean": 7, "sum": 1}[reduction]
    assert sum(reduced.value(part, counts=counts) for part in parts) == pytest.approx(loss)
    (correction,) = reduced.corrections(reduced.counts(parts[0]), counts)
    first = sum(reduced.value(part, counts=reduced.counts(parts[0])) for part in parts)
    assert correction * first == pytest.approx(loss)
    scale = reduced.fisher_scales(parts[0], counts=counts)["z"]
    assert scale**2 == pytest.approx({"mean": 7 / 23, "batch_mean": 1, "sum": 7}[reduction])
