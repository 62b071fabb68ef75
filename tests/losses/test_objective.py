"""The reduced loss against its definition in NumPy, for a batch and for the shards of a batch."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.objective import REDUCTIONS, BatchSize, Objective

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


def part(reduced, shard):
    return reduced.observe(shard).within(BatchSize(N, (N * T,)))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fisher_scales_of_shard_equal_batch(values, reduction):
    reduced = objective(reduction)
    for shard in shards(values):
        scales = reduced.fisher_scales(part(reduced, shard))
        assert scales["z"] ** 2 == pytest.approx(FISHER_WEIGHTS[reduction], rel=1e-14)
        ratio = reduced.fisher_ratio(part(reduced, shard))
        assert ratio == pytest.approx(scales["z"] * DIVISORS[reduction], rel=1e-14)


def test_sizes_of_parts_add_up_to_that_of_the_batch(values):
    reduced = objective("mean")
    first, *others = (reduced.observe(shard).size for shard in shards(values))
    assert sum(others, first) == reduced.observe(values).size == BatchSize(N, (N * T,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_sum_with_another_size_is_corrected(reduction):
    """Parts of other numbers of positions, divided by the size of the first one."""
    rng = np.random.default_rng(1)
    parts = [
        {name: rng.standard_normal((n, t, D)) for name in "zy"} for n, t in ((2, 5), (4, 3), (1, 1))
    ]
    reduced = objective(reduction)
    observed = [reduced.observe(part) for part in parts]
    used, whole = observed[0].size, BatchSize(7, (23,))
    residuals = np.concatenate([(part["z"] - part["y"]).reshape(-1, D) for part in parts])
    nats = residuals**2 / (2 * VARIANCE) + np.log(2 * np.pi * VARIANCE) / 2
    loss = COEFFICIENT * nats.sum() / {"mean": 23, "batch_mean": 7, "sum": 1}[reduction]
    pairs = list(zip(parts, observed, strict=True))
    assert sum(reduced.value(p, o.within(whole)) for p, o in pairs) == pytest.approx(loss)
    (correction,) = reduced.corrections(used, whole)
    assert correction * sum(reduced.value(p, o.within(used)) for p, o in pairs) == pytest.approx(
        loss
    )
    assert BatchSize(3, (0.0, 2.0)).positive() == BatchSize(3, (1.0, 2.0))
