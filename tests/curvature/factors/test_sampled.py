"""Sub-sampled input statistics: how much is drawn, what it is divided by, and that it repeats.

Images are made so that the moment shows what was drawn: each example, or each pixel, has a channel
of its own, and the filter sees one pixel.
"""

from math import ceil

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.compat import convolution_factors
from kfac_engine.distributed.shards import RowRange
from tests.lifecycle import observe, second_moment

SIDE = 4


def examples_apart(n):
    """Example ``i`` is one in channel ``i`` of every pixel, zero elsewhere."""
    x = np.zeros((n, SIDE, SIDE, n))
    x[np.arange(n), :, :, np.arange(n)] = 1
    return x


def pixels_apart(n):
    """Every pixel of every example has a channel of its own."""
    return np.eye(n * SIDE * SIDE).reshape(n, SIDE, SIDE, -1)


def observed(x, batches=1, config=None, **options):
    """The input factor of a 1 × 1 convolution with a bias after so many equal batches."""
    channels = x.shape[-1]
    config = config or ke.CollectionConfig(**options)
    collection = ke.LayerCollection(graph={"w": (1, 1, channels, 1)}, config=config)
    collection.register_conv2d(("w", "b"), [1, 1, 1, 1], "SAME", "x", "s")
    values = {"x": x, "ds": np.ones((len(x), SIDE, SIDE, 1))}
    return observe(collection, [["ds"]], [values] * batches, decay=0.0).input_factor


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.51, 1.0])
def test_a_part_of_the_examples_is_drawn_without_replacement(fraction):
    n = 7
    factor = observed(
        examples_apart(n), sub_sample_inputs=True, inputs_to_extract_patches_factor=fraction
    )
    kept = ceil(fraction * n)
    weights = np.diag(factor.cov)
    drawn = np.flatnonzero(weights[:-1])
    assert len(drawn) == kept
    np.testing.assert_allclose(weights[drawn], 1 / kept, rtol=1e-12)  # float64 rounding
    assert weights[-1] == pytest.approx(1, rel=1e-12)  # the bias: divided by what was kept


@pytest.mark.parametrize(
    ("bound", "per_feature", "kept"),
    [(10, 3.0, 10), (1000, 0.25, 8), (1000, 3.0, 32), (32, 1.0, 32)],
    ids=["bound", "per feature", "all", "exactly all"],
)
def test_a_part_of_the_patches_is_drawn_without_replacement(bound, per_feature, kept):
    factor = observed(
        pixels_apart(2),
        sub_sample_patches=True,
        max_num_patches=bound,
        max_num_patches_per_dimension=per_feature,
    )
    weights = np.diag(factor.cov)[:-1]
    assert np.count_nonzero(weights) == kept
    np.testing.assert_allclose(weights[weights > 0], 1 / kept, rtol=1e-12)  # float64 rounding
    assert factor.cov[-1, -1] == pytest.approx(1, rel=1e-12)


def test_patches_are_drawn_from_the_drawn_examples():
    factor = observed(
        pixels_apart(4),
        sub_sample_inputs=True,
        inputs_to_extract_patches_factor=0.5,
        sub_sample_patches=True,
        max_num_patches=20,
    )
    drawn = np.flatnonzero(np.diag(factor.cov)[:-1])
    assert len(drawn) == 20
    assert len(set(drawn // (SIDE * SIDE))) == 2


def test_two_towers_are_one_of_both():
    """Where everything is drawn: a factor is the mean over its towers."""
    x = np.random.default_rng(0).normal(size=(6, SIDE, SIDE, 3))
    config = ke.CollectionConfig(sub_sample_patches=True, max_num_patches_per_dimension=1000)
    collection = ke.LayerCollection(graph={"w": (1, 1, 3, 1)}, config=config)
    for tower in "01":
        collection.register_conv2d(
            ("w", "b"), [1, 1, 1, 1], "SAME", f"x{tower}", f"s{tower}", reuse=tower == "1"
        )
    ds = np.ones((3, SIDE, SIDE, 1))
    values = {"x0": x[:3], "x1": x[3:], "ds0": ds, "ds1": ds}
    found = observe(collection, [["ds0", "ds1"]], [values]).input_factor.cov
    # Float64 rounding of a hundred terms of size one.
    np.testing.assert_allclose(found, second_moment(x.reshape(-1, 3), True), atol=1e-12)


def test_every_row_is_equally_likely():
    """The mean over many draws is the moment of everything."""
    draws = 400
    config = ke.CollectionConfig(sub_sample_patches=True, max_num_patches=8)
    collection = ke.LayerCollection(graph={"w": (1, 1, 32, 1)}, config=config)
    collection.register_conv2d("w", [1, 1], "SAME", "x", "s")
    values = {"x": pixels_apart(2), "ds": np.ones((2, SIDE, SIDE, 1))}
    block = observe(collection, [["ds"]], [values] * draws, decay=1.0)
    # A row is drawn in a quarter of the batches: standard deviation sqrt(p(1-p)/400)/8 = 0.0027.
    np.testing.assert_allclose(np.diag(block.input_factor.cov), 1 / 32, atol=5 * 0.0027)


@pytest.mark.parametrize(("asked", "kept"), [(True, 2), (False, 10), (None, 10)])
def test_a_layer_may_choose_for_itself(asked, kept):
    collection = ke.LayerCollection(graph={"w": (1, 1, 10, 1)})
    collection.register_conv2d("w", [1, 1], "SAME", "x", "s", sub_sample_inputs=asked)
    values = {"x": examples_apart(10), "ds": np.ones((10, SIDE, SIDE, 1))}
    block = observe(collection, [["ds"]], [values])
    assert np.count_nonzero(np.diag(block.input_factor.cov)) == kept
    assert block.repeats == SIDE * SIDE


SAMPLINGS = {
    "images": {"sub_sample_inputs": True, "inputs_to_extract_patches_factor": 0.3},
    "patches": {"sub_sample_patches": True, "max_num_patches": 9},
    "patches of images": {
        "sub_sample_inputs": True,
        "inputs_to_extract_patches_factor": 0.6,
        "sub_sample_patches": True,
        "max_num_patches": 9,
    },
    "everything": {},
}
TENSORS = {"one use": "x0", "two tensors": ("x0", "x1"), "two uses in a tensor": "x"}


def sampled_factor(uses, config):
    """An input factor of a convolution with a kernel of 2 × 2 and a bias."""
    name = "ConvInputKroneckerFactor" if uses == "one use" else "ConvInputMultiKF"
    options = {} if uses == "one use" else {"num_uses": 2}
    factor = getattr(convolution_factors, name)
    return factor([TENSORS[uses]], (2, 2, 3, 1), "SAME", has_bias=True, config=config, **options)


def images_of(rows):
    """Two uses of a batch of images, apart and with all uses along the first axis."""
    x = np.random.default_rng(1).normal(size=(2, 7, SIDE, SIDE, 3))[:, rows]
    return {"x0": x[0], "x1": x[1], "x": x.reshape(-1, SIDE, SIDE, 3)}


@pytest.mark.parametrize("uses", TENSORS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("counts", [(7,), (3, 4), (2, 1, 4), (1,) * 7], ids=len)
def test_ranks_measure_the_draws_of_one_process(uses, sampling, counts):
    config = ke.CollectionConfig(**SAMPLINGS[sampling], seed=3)
    whole = sampled_factor(uses, config)
    factors = [sampled_factor(uses, config) for _ in counts]
    for _ in range(2):  # the second batch has other draws
        whole.update(whole.read(images_of(slice(None))), 0.5)
        measurements = []
        for rank, factor in enumerate(factors):
            rows = RowRange.of(counts, rank)
            factor.set_rows(rows)
            shard = images_of(slice(rows.start, rows.start + rows.count))
            measurements.append(factor.measure(factor.read(shard), joined=True))
            assert measurements[-1].count.examples == rows.count
        mean = sum(m.count.examples * m.array for m in measurements) / sum(counts)
        for factor, measurement in zip(factors, measurements, strict=True):
            measurement.array[...] = mean
            factor.commit(measurement, 0.5)
    for factor in factors:
        # Float64 rounding of a hundred terms of size one.
        np.testing.assert_allclose(factor.cov, whole.cov, atol=1e-12)


def test_a_rank_without_a_drawn_example_measures_zero():
    config = ke.CollectionConfig(**SAMPLINGS["images"], seed=3)
    zeros = 0
    for rank in range(7):
        factor = sampled_factor("one use", config)
        factor.set_rows(RowRange.of((1,) * 7, rank))
        measurement = factor.measure(factor.read(images_of(slice(rank, rank + 1))))
        zeros += not measurement.array.any()
        assert measurement.count.examples == 1
    assert zeros == 7 - ceil(0.3 * 7)


@pytest.mark.parametrize("rows", [RowRange(0, 2, 7), RowRange(0, 0, 7)])
def test_rows_of_another_batch_are_refused(rows):
    factor = sampled_factor("one use", ke.CollectionConfig())
    factor.set_rows(rows)
    with pytest.raises(ke.ShapeError, match=f"gave this process {rows.count} examples"):
        factor.read(images_of(slice(0, 3)))
    factor.set_rows(None)
    factor.update(factor.read(images_of(slice(0, 3))), 0.5)


class ImageTrace(dict):
    """A convolution with one output as the loss input; the gradient of its weight is not asked."""

    def vjp(self, cotangents, wrt):
        return {name: cotangents[name] for name in wrt}


def conv_estimator(config):
    collection = ke.LayerCollection(graph={"w": (1, 1, 3, 2)}, config=config)
    collection.register_conv2d("w", [1, 1], "SAME", "x", "z")
    collection.register_categorical_predictive_distribution("z", name="loss")
    return ke.FisherEstimator(["w"], 0.5, 0.1, collection, estimation_mode="gradients")


def test_an_estimator_sets_the_rows_of_its_factors():
    config = ke.CollectionConfig(**SAMPLINGS["images"], seed=3)
    rng = np.random.default_rng(1)
    x, z = rng.normal(size=(7, SIDE, SIDE, 3)), rng.normal(size=(7, SIDE, SIDE, 2))
    whole = conv_estimator(config)
    whole.update_covariances(ImageTrace(x=x, z=z))
    sums = [0.0, 0.0]
    for rank in range(2):
        estimator = conv_estimator(config)
        rows = RowRange.of((3, 4), rank)
        estimator.set_rows(rows)
        part = slice(rows.start, rows.start + rows.count)
        estimator.update_covariances(ImageTrace(x=x[part], z=z[part]))
        sums = [
            total + rows.count * f.cov for total, f in zip(sums, estimator.factors, strict=True)
        ]
    for total, factor in zip(sums, whole.factors, strict=True):
        np.testing.assert_allclose(total / 7, factor.cov, atol=1e-12)  # float64 rounding


def test_several_uses_draw_the_first_batch_with_the_seed_of_the_configuration():
    averages = []
    for seed in (1, 1, 2):
        config = ke.CollectionConfig(**SAMPLINGS["images"], seed=seed)
        factor = sampled_factor("two tensors", config)
        factor.update(factor.read(images_of(slice(None))), 0.5)
        averages.append(factor.cov)
    np.testing.assert_array_equal(averages[0], averages[1])
    assert not np.allclose(averages[0], averages[2])
