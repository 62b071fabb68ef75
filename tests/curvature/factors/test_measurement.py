"""Measure, join, commit: the measurements of parts of a batch are joined to that of all."""

from dataclasses import replace

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.readers import Readers
from kfac_engine.curvature.factors.statistics import ReducedMoment
from kfac_engine.layers.views import RowView

EXACT = 1e-12  # float64, sums of a hundred products of size one

FILTER, STRIDES = (2, 2, 3, 4), (1, 1, 1, 1)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) + 0.3


def batch(seed):
    """Values of six examples."""
    return {
        "x": draw(6, 4, seed=seed),
        "y": draw(6, 4, seed=seed + 1),
        "ds": draw(6, 3, seed=seed + 2),
        "tokens": draw(6, 5, 4, seed=seed + 3),
        "images": draw(6, 4, 4, 3, seed=seed + 4),
        "dimages": draw(6, 3, 3, 4, seed=seed + 5),
        "ids": np.random.default_rng(seed).integers(0, 7, (6, 2)),
    }


def tokens_reduced():
    return DenseSquareMatrixFactor(ReducedMoment(("tokens",), RowView(), True, mean=True))


ADDITIVE = {
    "dense": lambda: ke.FullyConnectedKroneckerFactor([["x"]], has_bias=True),
    "dense, two sources": lambda: ke.FullyConnectedKroneckerFactor([["x"], ["y"]]),
    "positions": lambda: ke.FullyConnectedKroneckerFactor([["tokens"]]),
    "diagonal": lambda: ke.DiagonalKroneckerFactor([["x"]], has_bias=True),
    "squares of gradients": lambda: ke.FullyConnectedDiagonalFactor(["x"], [["ds"]], has_bias=True),
    "patches": lambda: ke.ConvInputKroneckerFactor(["images"], FILTER, "VALID", has_bias=True),
    "output of a convolution": lambda: ke.ConvOutputKroneckerFactor([["dimages"]]),
    "squares of filter gradients": lambda: ke.ConvDiagonalFactor(
        ["images"], [["dimages"]], FILTER, STRIDES, "VALID"
    ),
    "token ids": lambda: ke.EmbeddingInputKroneckerFactor(["ids"], 7, np.float64),
    "scale and shift": lambda: ke.ScaleAndShiftFullFactor(["x"], [["y"]], []),
    "reduced": tokens_reduced,
    "pixels around their mean": lambda: ke.ConvInputSUAKroneckerFactor(["images"], FILTER),
    "square of a sum": lambda: ke.NaiveDiagonalFactor(["g"], "x"),
    "outer product of a sum": lambda: ke.NaiveFullFactor(["g"], "x"),
    "outer product of two sums": lambda: ke.NaiveFullFactor(["g", "h"], "x"),
}


def rows(values, start, stop):
    """A part of a batch; ``g`` and ``h`` are sums over the examples of the part."""
    part = {name: array[start:stop] for name, array in values.items()}
    return part | {"g": part["x"].sum(axis=0), "h": part["y"].sum(axis=0)}


def over_ranks(factor, measurements):
    """The mean over processes, of which each has measured a shard of a batch."""
    total = sum((m.count for m in measurements[1:]), measurements[0].count)
    shares = [factor.share(m, total) for m in measurements]
    return replace(shares[0], array=sum(share.array for share in shares))


@pytest.mark.parametrize("make", ADDITIVE.values(), ids=ADDITIVE)
@pytest.mark.parametrize("processes", [False, True], ids=["parts", "processes"])
def test_two_parts_joined_are_the_whole_batch(make, processes):
    whole, part = make(), make()
    for seed in (0, 10):
        values = rows(batch(seed), 0, 6)
        whole.update(values, 0.75)
        first = part.measure(rows(values, 0, 2), joined=True)
        if processes:
            second = part.measure(rows(values, 2, 6), joined=True)
            assert second.array.any()
            joined = over_ranks(part, [first, second])
        else:
            joined = part.measure(rows(values, 2, 6), joined=True, before=first)
        part.commit(joined, 0.75)
    np.testing.assert_allclose(part.cov, whole.cov, atol=EXACT)
    assert part.repeats == whole.repeats


def test_a_measurement_leaves_the_average_as_it_is():
    factor = ke.FullyConnectedKroneckerFactor([["x"]])
    factor.update(batch(0), 0.75)
    before, weight = factor.cov, factor.average.weight
    measurement = factor.measure(batch(1))
    assert measurement.array.shape == before.shape
    np.testing.assert_array_equal(factor.cov, before)
    assert factor.average.weight == weight


@pytest.mark.parametrize("make", [make for make in ADDITIVE.values() if not make().sources])
def test_a_batch_that_is_measured_straight_into_the_average_gives_that_of_a_measurement(make):
    straight, measured = make(), make()
    for seed in (0, 10):
        values = rows(batch(seed), 0, 6)
        straight.commit(straight.to_measure(values), 0.75)
        measurement = measured.measure(values)
        assert measurement.array.any()
        measured.commit(measurement, 0.75)
    np.testing.assert_allclose(measured.cov, straight.cov, atol=EXACT)


def test_values_are_released_once_their_factors_have_measured_them():
    factors = ke.FullyConnectedKroneckerFactor([["x"]]), ke.FullyConnectedKroneckerFactor([["ds"]])
    values = {name: batch(0)[name] for name in ("x", "ds")}
    for straight in (None, factors[:1]):
        released = []
        of_all = Readers(factors, NumpyBackend(), {})
        update = of_all.measure({**values}, released.extend, straight)
        assert released == ([] if straight is None else ["ds"])
        assert all((factor.average.value is None) == (straight is None) for factor in factors)
        update.commit(0.0)
        assert sorted(released) == ["ds", "x"]
        for factor, x in zip(factors, values.values(), strict=True):
            np.testing.assert_allclose(factor.cov, x.T @ x / len(x), atol=EXACT)
